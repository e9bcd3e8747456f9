// Draws the state of a run for `echoline up` and `echoline status`.
#include "cli/live_table.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/units.hpp"

namespace echoline::cli {
namespace {

using nlohmann::json;

constexpr Duration kLineInterval = std::chrono::seconds(30);
constexpr std::size_t kPrintedLinesMax = 200;

// At most `columns` characters; "..." marks a cut. Control characters are replaced by '?'.
std::string truncated_to(std::string_view text, std::size_t columns) {
  std::string out;
  // cut_at: the bytes of `out` after which the dots still fit.
  std::size_t used = 0, cut_at = 0;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte & 0xc0) != 0x80) {
      if (used == columns) return columns < 4 ? out : out.substr(0, cut_at) + "...";
      if (used + 3 == columns) cut_at = out.size();
      ++used;
    }
    out += byte < 0x20 || byte == 0x7f ? '?' : c;
  }
  return out;
}

std::size_t width(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

std::string padded_to(std::string text, std::size_t columns) {
  const std::size_t used = width(text);
  return used < columns ? std::move(text) + std::string(columns - used, ' ') : text;
}

// Puts the parts into lines, two spaces apart, as many to a line as fit.
void pack_parts(const std::vector<std::string>& parts, std::size_t columns, std::vector<std::string>& lines) {
  std::string line;
  for (const std::string& part : parts) {
    if (part.empty()) continue;
    if (!line.empty() && width(line) + 2 + width(part) > columns) lines.push_back(std::exchange(line, ""));
    line += (line.empty() ? "" : "  ") + part;
  }
  if (!line.empty()) lines.push_back(line);
}

std::string bar(double fraction, int cells) {
  const int full = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * cells + 0.5);
  return "[" + std::string(static_cast<std::size_t>(full), '#') +
         std::string(static_cast<std::size_t>(cells - full), '.') + "]";
}

template <class T>
T field_or(const json& object, const char* key, T fallback) {  // `fallback` if it is null, absent or of another type
  const auto it = object.find(key);
  if (it == object.end()) return fallback;
  if constexpr (std::is_same_v<T, std::string>) return it->is_string() ? it->get<T>() : fallback;
  if constexpr (std::is_same_v<T, bool>) return it->is_boolean() ? it->get<T>() : fallback;
  if constexpr (std::is_arithmetic_v<T>) return it->is_number() ? it->get<T>() : fallback;
  return fallback;
}

std::string bytes_text(const json& worker, const char* key) {
  return to_text(Bytes{static_cast<std::uint64_t>(std::max(0.0, field_or(worker, key, 0.0)))});
}

struct Row {
  std::uint64_t id = 0;
  std::string offer, version, rollouts, in, forwarded, note;
  int weight = 0;  // importance; below 0 for a lost worker
};

Row row_of(const json& w, double published, double publish_every) {
  Row row{static_cast<std::uint64_t>(field_or(w, "id", 0.0)),
          field_or(w, "offer", std::string()),
          "-",
          fmt::format("{}", field_or(w, "rollouts", 0.0)),
          bytes_text(w, "bytes_in"),
          bytes_text(w, "bytes_forwarded"),
          {},
          0};
  const auto add_note = [&](int weight, const std::string& text) {
    row.weight = std::max(row.weight, weight);
    row.note += (row.note.empty() ? "" : ", ") + text;
  };
  const double version = field_or(w, "version", -1.0);
  if (version >= 0) row.version = fmt::format("{}", version);
  if (field_or(w, "lost", false)) {
    row.note = "lost";
    row.weight = -1;
    return row;
  }
  if (field_or(w, "away", false)) add_note(5, "away");
  if (field_or(w, "quarantined", false)) add_note(5, "bad chunks");
  if (const double troubles = field_or(w, "troubles", 0.0); troubles > 0)
    add_note(4, fmt::format("{} troubles", troubles));
  if (version < 0)
    add_note(2, "joining");
  else if (version + publish_every < published)
    add_note(3, fmt::format("{} behind", published - version));
  const double rate = field_or(w, "rollouts_per_s", 0.0), expected_rate = field_or(w, "rollouts_per_s_expected", 0.0);
  if (rate > 0 && rate < 0.5 * expected_rate) add_note(2, fmt::format("slow: {:.1f} of {:.1f}/s", rate, expected_rate));
  if (field_or(w, "seed", false)) add_note(1, "seed");
  return row;
}

std::string table_line(const Row& r, const std::string& id, std::size_t offer_width, std::size_t columns) {
  std::string line =
      fmt::format("{:>6}  {} {:>8}", id, padded_to(truncated_to(r.offer, offer_width), offer_width), r.version);
  if (columns >= 56) line += fmt::format("{:>9}", r.rollouts);
  if (columns >= 64) line += fmt::format("{:>10}", r.in);
  if (columns >= 74) line += fmt::format("{:>10}", r.forwarded);
  if (!r.note.empty()) line += "  " + r.note;
  return truncated_to(line, columns);
}

void add_workers(const json& status, Screen screen, std::vector<std::string>& lines) {
  std::vector<Row> rows;
  const auto workers = status.find("workers");
  const double published = field_or(status, "version", 0.0),
               every = std::max(1.0, field_or(status, "publish_every", 1.0));
  if (workers != status.end() && workers->is_array())
    for (const json& w : *workers)
      if (w.is_object()) rows.push_back(row_of(w, published, every));
  const std::string topology = field_or(status, "topology", std::string());
  const std::size_t other_lines = lines.size() + 1 + (topology.empty() ? 0 : 1);  // lines that do not show a worker
  if (rows.empty() || other_lines + 1 > screen.rows) return;

  std::size_t rows_free = screen.rows - other_lines;
  const bool all_fit = rows.size() <= rows_free;
  if (!all_fit) {
    std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.weight > b.weight; });
    --rows_free;  // for the line that counts the rest
  }
  const std::size_t shown = std::min(rows_free, rows.size());
  std::size_t offer_width = 5;
  for (std::size_t i = 0; i < shown; ++i) offer_width = std::max(offer_width, width(rows[i].offer));
  offer_width = std::min(offer_width, screen.columns >= 100 ? std::size_t{24} : screen.columns >= 74 ? 16 : 12);
  const Row header{0, "offer", "version", "rollouts", "in", "forwarded", "", 0};
  lines.push_back(table_line(header, "worker", offer_width, screen.columns));
  for (std::size_t i = 0; i < shown; ++i)
    lines.push_back(table_line(rows[i], std::to_string(rows[i].id), offer_width, screen.columns));
  if (!all_fit) {
    std::size_t notable = 0, lost = 0;
    for (std::size_t i = shown; i < rows.size(); ++i) {
      notable += rows[i].weight > 1 ? 1 : 0;
      lost += rows[i].weight < 0 ? 1 : 0;
    }
    std::string text = fmt::format("and {} more", rows.size() - shown);
    if (notable > 0) text += fmt::format(", {} of them in trouble", notable);
    if (lost > 0) text += fmt::format(", {} lost", lost);
    lines.push_back(truncated_to("        " + text, screen.columns));
  }
  if (!topology.empty()) lines.push_back(truncated_to(topology, screen.columns));
}

}  // namespace

std::optional<Screen> screen_of(std::FILE* file) {
  const char* term = std::getenv("TERM");
  if (::isatty(::fileno(file)) != 1 || term == nullptr || std::string_view(term) == "dumb") return std::nullopt;
  struct winsize size {};
  if (::ioctl(::fileno(file), TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) return Screen{};
  return Screen{size.ws_col, size.ws_row};
}

std::vector<std::string> status_lines(const json& s, Screen screen) {
  const double step = field_or(s, "step", 0.0), steps = std::max(1.0, field_or(s, "steps", 1.0));
  std::vector<std::string> lines;
  pack_parts({truncated_to(field_or(s, "run", std::string()), std::max<std::size_t>(screen.columns, 40) - 16),
              bar(step / steps, screen.columns >= 80 ? 30 : 10), fmt::format("step {} of {}", step, steps),
              fmt::format("{:.0f} s", field_or(s, "wall_seconds", 0.0)), field_or(s, "phase", std::string())},
             screen.columns, lines);
  std::vector<std::string> parts{fmt::format("reward {:.3f}", field_or(s, "reward", 0.0))};
  if (const auto accuracy = s.find("accuracy"); accuracy != s.end() && accuracy->is_object())
    for (const auto& [when, value] : accuracy->items())
      if (value.is_number()) parts.push_back(fmt::format("accuracy {} {:.3f}", when, value.get<double>()));
  parts.push_back(fmt::format("learner idle {:.1f} %", 100 * field_or(s, "idle_fraction", 0.0)));
  parts.push_back("delta " + bytes_text(s, "delta_bytes"));
  parts.push_back(fmt::format("T_b {:.2f} s", field_or(s, "t_b_seconds", 0.0)));
  parts.push_back(fmt::format("{}${:.4f} (${:.2f}/h)", field_or(s, "prices_known", true) ? "" : "at least ",
                              field_or(s, "usd", 0.0), field_or(s, "usd_per_hour", 0.0)));
  pack_parts(parts, screen.columns, lines);
  if (lines.size() > screen.rows) lines.resize(screen.rows);
  for (std::string& line : lines) line = truncated_to(line, screen.columns);
  add_workers(s, screen, lines);
  return lines;
}

std::string status_line(const json& s) {
  return fmt::format("step {}/{}  reward {:.3f}  idle {:.1f} %  T_b {:.2f} s  ${:.4f}  {}", field_or(s, "step", 0.0),
                     field_or(s, "steps", 0.0), field_or(s, "reward", 0.0), 100 * field_or(s, "idle_fraction", 0.0),
                     field_or(s, "t_b_seconds", 0.0), field_or(s, "usd", 0.0), field_or(s, "phase", std::string()));
}

LiveTable::LiveTable(std::FILE* out) : out_(out) {}

void LiveTable::write(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), out_);  // errors are ignored: see the class
  std::fflush(out_);
}

// Puts `printed` where the table was and the table below it. One write, so that the screen does not flicker.
void LiveTable::redraw(const std::string& printed) {
  const std::optional<Screen> current = screen_of(out_);
  if (!current) return write(printed);
  std::vector<std::string> lines;
  // One row for the cursor below the table. On a screen with enough rows, three more for the last messages above it.
  const std::size_t other_lines = current->rows >= 16 ? 4 : 1;
  if (status_.is_object()) lines = status_lines(status_, {current->columns, current->rows - other_lines});
  std::string text = "\x1b[?7l";  // switches line wrapping off: a wrapped line would count as two
  if (drawn_ > 0 && current != screen_) {
    // After a change of size, the terminal may have wrapped or cut the old text. Clear the screen and print the last
    // lines again.
    text += "\x1b[H\x1b[2J";
    const std::size_t room = current->rows > lines.size() + 1 ? current->rows - lines.size() - 1 : 0;
    const std::size_t reprinted = std::min(room, printed_.size());
    for (std::size_t i = printed_.size() - reprinted; i < printed_.size(); ++i)
      text += truncated_to(printed_[i], current->columns) + "\r\n";
  } else {
    if (drawn_ > 0) text += fmt::format("\r\x1b[{}A\x1b[J", drawn_);
    text += "\x1b[?7h" + printed + "\x1b[?7l";
  }
  for (const std::string& line : lines) text += line + "\r\n";
  screen_ = current;
  drawn_ = lines.size();
  write(text + "\x1b[?7h");
}

void LiveTable::show(const json& status, TimePoint now) {
  if (screen_of(out_)) {
    status_ = status;
    redraw("");
    return;
  }
  const std::string line = status_line(status), phase = field_or(status, "phase", std::string());
  if (line == last_line_ || (now < line_due_ && phase == last_phase_)) return;
  write(line + "\n");
  last_line_ = line;
  last_phase_ = phase;
  line_due_ = now + kLineInterval;
}

void LiveTable::print(const std::string& line) {
  printed_.push_back(line);
  if (printed_.size() > kPrintedLinesMax) printed_.pop_front();
  redraw(line + "\n");
}

}  // namespace echoline::cli
