// Parsers of a scenario's table files, for study/sim_run_config.cpp.
#include "sim/run_tables.hpp"

#include <charconv>
#include <cmath>

#include "base/suggest.hpp"

namespace echoline::sim {
namespace {

constexpr std::size_t kProblemsMax = 10;  // reported for one file
constexpr std::size_t kCellsMax = 8;      // read of one row; more than any table has
constexpr double kTimeMaxS = 1e8, kTokensMax = 1e7, kWeightMax = 1e12;
constexpr std::size_t kExcerptBytesMax = 40;  // of a cell, in a message

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const auto from = text.find_first_not_of(kBlank);
  if (from == std::string_view::npos) return {};
  return text.substr(from, text.find_last_not_of(kBlank) - from + 1);
}

// The first characters of a cell, for a message.
std::string printable_start(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, kExcerptBytesMax))
    out += static_cast<unsigned char>(c) < 32 || static_cast<unsigned char>(c) > 126 ? '?' : c;
  return out;
}

std::optional<double> parse_number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

// Reads the rows of a file and collects its mistakes.
class Table {
 public:
  Table(std::string_view text, std::string_view name, std::string_view expected_row)
      : text_left_(text), name_(name), expected_row_(expected_row) {}

  // The cells of the next row; absent at the end, or after too many problems.
  std::optional<std::vector<std::string_view>> next_row() {
    while (!text_left_.empty() && problem_count_ < kProblemsMax) {
      const std::size_t end = std::min(text_left_.find('\n'), text_left_.size());
      std::string_view line = text_left_.substr(0, end);
      text_left_.remove_prefix(std::min(end + 1, text_left_.size()));
      ++line_;
      line = trimmed(line.substr(0, line.find('#')));
      if (line.empty()) continue;
      const bool is_first_row = !std::exchange(has_read_row_, true);
      const bool is_header = is_first_row && !parse_number(trimmed(line.substr(0, line.find(','))));
      if (is_header) continue;
      if (++rows_ > kTableRowsMax) {
        add_problem(fmt::format("more than {} rows", kTableRowsMax));
        return std::nullopt;
      }
      std::vector<std::string_view> cells;
      for (;;) {
        const std::size_t comma = line.find(',');
        cells.push_back(trimmed(line.substr(0, comma)));
        if (comma == std::string_view::npos || cells.size() > kCellsMax) break;
        line.remove_prefix(comma + 1);
      }
      return cells;
    }
    return std::nullopt;
  }

  void add_problem(std::string_view what) {
    if (problem_count_++ < kProblemsMax)
      problems_text_ += fmt::format("{}{}:{}: {}", problems_text_.empty() ? "" : "\n", name_, line_, what);
  }
  void add_wrong_row() { add_problem(fmt::format("expected {}", expected_row_)); }
  // Parses a cell; records an error if it is invalid.
  std::optional<double> number(std::string_view cell, std::string_view what, double min, double max) {
    const auto value = parse_number(cell);
    if (value && *value >= min && *value <= max) return value;
    add_problem(fmt::format("{}: expected a number from {} to {}, found '{}'", what, min, max, printable_start(cell)));
    return std::nullopt;
  }
  // The time of a row, which must not be before the previous row's.
  std::optional<double> time(std::string_view cell) {
    const auto time_s = number(cell, "seconds", 0, kTimeMaxS);
    if (!time_s) return time_s;
    if (*time_s < last_time_s_)
      add_problem(fmt::format("rows must be ordered by time: {} comes after {}", *time_s, last_time_s_));
    last_time_s_ = *time_s;
    return time_s;
  }
  std::optional<std::uint32_t> region(std::string_view cell, std::span<const std::string> regions) {
    if (cell.empty()) return std::nullopt;
    for (std::size_t index = 0; index < regions.size(); ++index)
      if (regions[index] == cell) return static_cast<std::uint32_t>(index);
    add_problem(fmt::format("no region '{}'{}", printable_start(cell), did_you_mean(std::string(cell), regions)));
    return std::nullopt;
  }
  std::size_t rows() const { return rows_; }
  Status finish() {
    if (rows_ == 0 && problem_count_ == 0) add_problem(fmt::format("no rows; expected {}", expected_row_));
    return problems_text_.empty() ? ok() : Status(Error{Code::kInvalid, "", problems_text_});
  }

 private:
  std::string_view text_left_, name_, expected_row_;
  std::size_t line_ = 0, rows_ = 0, problem_count_ = 0;
  bool has_read_row_ = false;
  double last_time_s_ = 0;
  std::string problems_text_;
};

}  // namespace

Result<Histogram> parse_lengths(std::string_view text, std::string_view name) {
  Table table(text, name, "tokens,weight");
  Histogram histogram;
  while (const auto cells = table.next_row()) {
    if (cells->size() != 2) {
      table.add_wrong_row();
      continue;
    }
    const auto tokens = table.number((*cells)[0], "tokens", 1, kTokensMax);
    const auto weight = table.number((*cells)[1], "weight", 0, kWeightMax);
    if (tokens && weight && *weight > 0) histogram.add(*tokens, *weight);
  }
  if (table.rows() > 0 && histogram.values.empty()) table.add_problem("no row has a weight above 0");
  ECHO_TRY(table.finish());
  return histogram;
}

Result<std::vector<Preemption>> parse_preemptions(std::string_view text, std::string_view name,
                                                  std::span<const std::string> regions) {
  Table table(text, name, "seconds,share or seconds,share,region");
  std::vector<Preemption> preemptions;
  while (const auto cells = table.next_row()) {
    if (cells->size() < 2 || cells->size() > 3) {
      table.add_wrong_row();
      continue;
    }
    const auto time_s = table.time((*cells)[0]), share = table.number((*cells)[1], "share", 0, 1);
    if (time_s && share)
      preemptions.push_back({.at = from_seconds(*time_s),
                             .share = *share,
                             .region = table.region(cells->size() == 3 ? (*cells)[2] : "", regions)});
  }
  ECHO_TRY(table.finish());
  return preemptions;
}

Result<std::vector<Slowdown>> parse_slowdowns(std::string_view text, std::string_view name,
                                              std::span<const std::string> regions) {
  Table table(text, name, "seconds,share,tokens,links,lasts or seconds,share,tokens,links,lasts,region");
  std::vector<Slowdown> slowdowns;
  constexpr double kShareMin = 0.001;  // a slower machine should be described as hung
  while (const auto cells = table.next_row()) {
    if (cells->size() < 5 || cells->size() > 6) {
      table.add_wrong_row();
      continue;
    }
    const auto time_s = table.time((*cells)[0]), share = table.number((*cells)[1], "share", 0, 1),
               tokens = table.number((*cells)[2], "tokens", kShareMin, 1),
               links = table.number((*cells)[3], "links", kShareMin, 1),
               lasts = table.number((*cells)[4], "lasts", 0, kTimeMaxS);
    if (!time_s || !share || !tokens || !links || !lasts) continue;
    slowdowns.push_back({.at = from_seconds(*time_s),
                         .share = *share,
                         .token_rate_left = *tokens,
                         .link_rate_left = *links,
                         .lasts = *lasts > 0 ? std::optional(from_seconds(*lasts)) : std::nullopt,
                         .region = table.region(cells->size() == 6 ? (*cells)[5] : "", regions)});
  }
  ECHO_TRY(table.finish());
  return slowdowns;
}

}  // namespace echoline::sim
