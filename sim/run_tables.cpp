// Parsers of a scenario's table files, for study/sim_run_config.cpp.
#include "sim/run_tables.hpp"

#include <charconv>
#include <cmath>

#include "base/suggest.hpp"

namespace echoline::sim {
namespace {

constexpr std::size_t kProblemsMax = 10;

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const auto from = text.find_first_not_of(kBlank);
  if (from == std::string_view::npos) return {};
  return text.substr(from, text.find_last_not_of(kBlank) - from + 1);
}

std::string shown(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 40))
    out += static_cast<unsigned char>(c) < 32 || static_cast<unsigned char>(c) > 126 ? '?' : c;
  return out;
}

std::optional<double> number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

class Table {
 public:
  Table(std::string_view text, std::string_view name, std::string_view form) : rest_(text), name_(name), form_(form) {}

  // The cells of the next row; absent at the end.
  std::optional<std::vector<std::string_view>> next() {
    while (!rest_.empty() && problems_ < kProblemsMax) {
      const std::size_t end = std::min(rest_.find('\n'), rest_.size());
      std::string_view line = rest_.substr(0, end);
      rest_.remove_prefix(std::min(end + 1, rest_.size()));
      ++line_;
      line = trimmed(line.substr(0, line.find('#')));
      if (line.empty()) continue;
      const bool title = !std::exchange(seen_, true) && !number(trimmed(line.substr(0, line.find(','))));
      if (title) continue;
      if (++rows_ > kTableRowsMax) {
        problem(fmt::format("more than {} rows", kTableRowsMax));
        return std::nullopt;
      }
      std::vector<std::string_view> cells;
      for (;;) {
        const std::size_t comma = line.find(',');
        cells.push_back(trimmed(line.substr(0, comma)));
        if (comma == std::string_view::npos || cells.size() > 8) break;
        line.remove_prefix(comma + 1);
      }
      return cells;
    }
    return std::nullopt;
  }

  void problem(std::string_view what) {
    if (problems_++ < kProblemsMax) text_ += fmt::format("{}{}:{}: {}", text_.empty() ? "" : "\n", name_, line_, what);
  }
  void wrong_row() { problem(fmt::format("expected {}", form_)); }
  // Parses a cell; records an error if it is invalid.
  std::optional<double> value(std::string_view cell, std::string_view what, double min, double max) {
    const auto v = number(cell);
    if (v && *v >= min && *v <= max) return v;
    problem(fmt::format("{}: expected a number from {} to {}, found '{}'", what, min, max, shown(cell)));
    return std::nullopt;
  }
  // The time of a row, which must not be before the previous row's.
  std::optional<double> time(std::string_view cell) {
    const auto at = value(cell, "seconds", 0, 1e8);
    if (at && *at < before_) problem(fmt::format("rows must be ordered by time: {} comes after {}", *at, before_));
    return before_ = at.value_or(before_), at;
  }
  std::optional<std::uint32_t> region(std::string_view cell, std::span<const std::string> regions) {
    if (cell.empty()) return std::nullopt;
    for (std::size_t r = 0; r < regions.size(); ++r)
      if (regions[r] == cell) return static_cast<std::uint32_t>(r);
    problem(fmt::format("no region '{}'{}", shown(cell), did_you_mean(std::string(cell), regions)));
    return std::nullopt;
  }
  std::size_t rows() const { return rows_; }
  Status finish() {
    if (rows_ == 0 && problems_ == 0) problem(fmt::format("no rows; expected {}", form_));
    return text_.empty() ? ok() : Status(Error{Code::kInvalid, "", text_});
  }

 private:
  std::string_view rest_, name_, form_;
  std::size_t line_ = 0, rows_ = 0, problems_ = 0;
  bool seen_ = false;
  double before_ = 0;
  std::string text_;
};

}  // namespace

Result<Histogram> parse_lengths(std::string_view text, std::string_view name) {
  Table table(text, name, "tokens,weight");
  Histogram histogram;
  while (const auto cells = table.next()) {
    if (cells->size() != 2) {
      table.wrong_row();
      continue;
    }
    const auto tokens = table.value((*cells)[0], "tokens", 1, 1e7);
    const auto weight = table.value((*cells)[1], "weight", 0, 1e12);
    if (tokens && weight && *weight > 0) histogram.add(*tokens, *weight);
  }
  if (table.rows() > 0 && histogram.values.empty()) table.problem("no row has a weight above 0");
  ECHO_TRY(table.finish());
  return histogram;
}

Result<std::vector<Preemption>> parse_preemptions(std::string_view text, std::string_view name,
                                                  std::span<const std::string> regions) {
  Table table(text, name, "seconds,share or seconds,share,region");
  std::vector<Preemption> preemptions;
  while (const auto cells = table.next()) {
    if (cells->size() < 2 || cells->size() > 3) {
      table.wrong_row();
      continue;
    }
    const auto at = table.time((*cells)[0]), share = table.value((*cells)[1], "share", 0, 1);
    if (at && share)
      preemptions.push_back({from_seconds(*at), *share, table.region(cells->size() == 3 ? (*cells)[2] : "", regions)});
  }
  ECHO_TRY(table.finish());
  return preemptions;
}

Result<std::vector<Slowdown>> parse_slowdowns(std::string_view text, std::string_view name,
                                              std::span<const std::string> regions) {
  Table table(text, name, "seconds,share,tokens,links,lasts or seconds,share,tokens,links,lasts,region");
  std::vector<Slowdown> slowdowns;
  constexpr double kLeast = 0.001;  // less than this counts as a hang
  while (const auto cells = table.next()) {
    if (cells->size() < 5 || cells->size() > 6) {
      table.wrong_row();
      continue;
    }
    const auto at = table.time((*cells)[0]), share = table.value((*cells)[1], "share", 0, 1),
               tokens = table.value((*cells)[2], "tokens", kLeast, 1),
               links = table.value((*cells)[3], "links", kLeast, 1), lasts = table.value((*cells)[4], "lasts", 0, 1e8);
    if (!at || !share || !tokens || !links || !lasts) continue;
    slowdowns.push_back({from_seconds(*at), *share, *tokens, *links,
                         *lasts > 0 ? std::optional(from_seconds(*lasts)) : std::nullopt,
                         table.region(cells->size() == 6 ? (*cells)[5] : "", regions)});
  }
  ECHO_TRY(table.finish());
  return slowdowns;
}

}  // namespace echoline::sim
