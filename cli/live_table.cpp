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

constexpr Duration kLineInterval = std::chrono::seconds(30);  // between status lines, if there is no terminal
constexpr std::size_t kPrintedLinesMax = 200;  // lines kept, to print them again after the terminal changed its size

// At most `columns` characters; "..." marks a cut. Control characters are replaced by '?'.
std::string truncated_to(std::string_view text, std::size_t columns) {
  std::string truncated;
  std::size_t columns_used = 0;
  std::size_t bytes_before_dots = 0;  // length of the part of `truncated` that leaves room for the dots
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte & 0xc0) != 0x80) {  // a UTF-8 character begins
      if (columns_used == columns) return columns < 4 ? truncated : truncated.substr(0, bytes_before_dots) + "...";
      if (columns_used + 3 == columns) bytes_before_dots = truncated.size();
      ++columns_used;
    }
    truncated += byte < 0x20 || byte == 0x7f ? '?' : c;
  }
  return truncated;
}

// Counts UTF-8 characters: every byte that does not continue one (10xxxxxx) begins one.
std::size_t column_count(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

std::string padded_to(std::string text, std::size_t columns) {
  const std::size_t text_columns = column_count(text);
  return text_columns < columns ? std::move(text) + std::string(columns - text_columns, ' ') : text;
}

// Appends the parts to `lines`, two spaces apart, as many to a line as fit.
void pack_parts(const std::vector<std::string>& parts, std::size_t columns, std::vector<std::string>& lines) {
  std::string line;
  for (const std::string& part : parts) {
    if (part.empty()) continue;
    if (!line.empty() && column_count(line) + 2 + column_count(part) > columns)
      lines.push_back(std::exchange(line, ""));
    line += (line.empty() ? "" : "  ") + part;
  }
  if (!line.empty()) lines.push_back(line);
}

std::string bar_text(double fraction, int cells) {
  const int full_cells = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * cells + 0.5);
  return "[" + std::string(static_cast<std::size_t>(full_cells), '#') +
         std::string(static_cast<std::size_t>(cells - full_cells), '.') + "]";
}

// A field of a JSON object; `fallback` if it is null, absent or of another type.
template <class T>
T field_or(const json& object, const char* key, T fallback) {
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

// Importance of a row. More important rows are shown first; lost workers come last, because the reader can do nothing
// about them. A seed is a worker that the learner feeds.
constexpr int kLost = -1, kUsual = 0, kSeed = 1, kSlowOrJoining = 2, kBehind = 3, kTroubled = 4, kAwayOrCorrupt = 5;
constexpr double kSlowShare = 0.5;  // a worker below this share of its expected rate counts as slow

struct Row {
  std::uint64_t id = 0;
  std::string offer, version, rollouts, received, forwarded, note;
  int importance = kUsual;
};

// Makes a worker's row. A worker more than `publish_every` versions behind the newest one counts as behind. Ids and
// counts are read as doubles, which hold them exactly up to 2^53.
Row row_of(const json& worker, double newest_version, double publish_every) {
  Row row;
  row.id = static_cast<std::uint64_t>(field_or(worker, "id", 0.0));
  row.offer = field_or(worker, "offer", std::string());
  row.version = "-";
  row.rollouts = fmt::format("{}", field_or(worker, "rollouts", 0.0));
  row.received = bytes_text(worker, "bytes_in");
  row.forwarded = bytes_text(worker, "bytes_forwarded");
  const auto add_note = [&](int importance, const std::string& text) {
    row.importance = std::max(row.importance, importance);
    row.note += (row.note.empty() ? "" : ", ") + text;
  };
  const double version = field_or(worker, "version", -1.0);
  if (version >= 0) row.version = fmt::format("{}", version);
  if (field_or(worker, "lost", false)) {
    row.note = "lost";
    row.importance = kLost;
    return row;
  }
  if (field_or(worker, "away", false)) add_note(kAwayOrCorrupt, "away");
  if (field_or(worker, "quarantined", false)) add_note(kAwayOrCorrupt, "bad chunks");
  if (const double troubles = field_or(worker, "troubles", 0.0); troubles > 0)
    add_note(kTroubled, fmt::format("{} troubles", troubles));
  if (version < 0)
    add_note(kSlowOrJoining, "joining");
  else if (version + publish_every < newest_version)
    add_note(kBehind, fmt::format("{} behind", newest_version - version));
  const double rate = field_or(worker, "rollouts_per_s", 0.0),
               expected_rate = field_or(worker, "rollouts_per_s_expected", 0.0);
  if (rate > 0 && rate < kSlowShare * expected_rate)
    add_note(kSlowOrJoining, fmt::format("slow: {:.1f} of {:.1f}/s", rate, expected_rate));
  if (field_or(worker, "seed", false)) add_note(kSeed, "seed");
  return row;
}

std::string table_line(const Row& row, const std::string& id, std::size_t offer_width, std::size_t columns) {
  std::string line =
      fmt::format("{:>6}  {} {:>8}", id, padded_to(truncated_to(row.offer, offer_width), offer_width), row.version);
  // Each further column appears on a screen that is wide enough for it and a note.
  if (columns >= 56) line += fmt::format("{:>9}", row.rollouts);
  if (columns >= 64) line += fmt::format("{:>10}", row.received);
  if (columns >= 74) line += fmt::format("{:>10}", row.forwarded);
  if (!row.note.empty()) line += "  " + row.note;
  return truncated_to(line, columns);
}

Row row_of_node(const json& node) {
  Row row;
  row.id = static_cast<std::uint64_t>(field_or(node, "node", 0.0));
  row.offer = field_or(node, "name", std::string());
  row.version = fmt::format("{}", field_or(node, "version", 0.0));
  row.rollouts = "-";
  row.received = bytes_text(node, "bytes_in");
  row.forwarded = bytes_text(node, "bytes_forwarded");
  if (!field_or(node, "present", false)) {
    row.note = "away";
    row.importance = kAwayOrCorrupt;
  }
  return row;
}

void add_workers(const json& status, Screen screen, std::vector<std::string>& lines) {
  std::vector<Row> rows;
  const auto workers = status.find("workers");
  const double newest_version = field_or(status, "version", 0.0),
               publish_every = std::max(1.0, field_or(status, "publish_every", 1.0));
  if (workers != status.end() && workers->is_array())
    for (const json& worker : *workers)
      if (worker.is_object()) rows.push_back(row_of(worker, newest_version, publish_every));
  if (const auto nodes = status.find("nodes"); nodes != status.end() && nodes->is_array())
    for (const json& node : *nodes)
      if (node.is_object() && !rows.empty()) rows.push_back(row_of_node(node));
  const std::string topology = field_or(status, "topology", std::string());
  const std::size_t header_lines = 1, topology_lines = topology.empty() ? 0 : 1;
  const std::size_t other_lines = lines.size() + header_lines + topology_lines;  // lines that do not show a worker
  if (rows.empty() || other_lines + 1 > screen.rows) return;

  std::size_t rows_free = screen.rows - other_lines;
  const bool all_fit = rows.size() <= rows_free;
  if (!all_fit) {
    std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.importance > b.importance; });
    --rows_free;  // the last line counts the workers that are not shown
  }
  const std::size_t shown = std::min(rows_free, rows.size());
  std::size_t offer_width = 5;  // of the heading "offer"
  for (std::size_t i = 0; i < shown; ++i) offer_width = std::max(offer_width, column_count(rows[i].offer));
  std::size_t offer_width_max = 12;
  if (screen.columns >= 74) offer_width_max = 16;
  if (screen.columns >= 100) offer_width_max = 24;
  offer_width = std::min(offer_width, offer_width_max);
  const Row header{.offer = "offer",
                   .version = "version",
                   .rollouts = "rollouts",
                   .received = "in",
                   .forwarded = "forwarded",
                   .note = ""};
  lines.push_back(table_line(header, "worker", offer_width, screen.columns));
  for (std::size_t i = 0; i < shown; ++i)
    lines.push_back(table_line(rows[i], std::to_string(rows[i].id), offer_width, screen.columns));
  if (!all_fit) {
    std::size_t in_trouble = 0, lost = 0;
    for (std::size_t i = shown; i < rows.size(); ++i) {
      in_trouble += rows[i].importance > kSeed ? 1 : 0;
      lost += rows[i].importance == kLost ? 1 : 0;
    }
    std::string text = fmt::format("and {} more", rows.size() - shown);
    if (in_trouble > 0) text += fmt::format(", {} of them in trouble", in_trouble);
    if (lost > 0) text += fmt::format(", {} lost", lost);
    lines.push_back(truncated_to("        " + text, screen.columns));
  }
  if (!topology.empty()) lines.push_back(truncated_to(topology, screen.columns));
}

}  // namespace

std::optional<Screen> screen_of(std::FILE* file) {
  const char* terminal_type = std::getenv("TERM");
  if (::isatty(::fileno(file)) != 1 || terminal_type == nullptr || std::string_view(terminal_type) == "dumb")
    return std::nullopt;
  struct winsize size {};
  if (::ioctl(::fileno(file), TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) return Screen{};
  return Screen{size.ws_col, size.ws_row};
}

std::vector<std::string> status_lines(const json& status, Screen screen) {
  const double step = field_or(status, "step", 0.0), steps = std::max(1.0, field_or(status, "steps", 1.0));
  std::vector<std::string> lines;
  const std::size_t name_columns = std::max<std::size_t>(screen.columns, 40) - 16;  // leaves room for a short bar
  const int bar_cells = screen.columns >= 80 ? 30 : 10;
  pack_parts({truncated_to(field_or(status, "run", std::string()), name_columns), bar_text(step / steps, bar_cells),
              fmt::format("step {} of {}", step, steps), fmt::format("{:.0f} s", field_or(status, "wall_seconds", 0.0)),
              field_or(status, "phase", std::string())},
             screen.columns, lines);
  std::vector<std::string> parts{fmt::format("reward {:.3f}", field_or(status, "reward", 0.0))};
  if (const auto accuracy = status.find("accuracy"); accuracy != status.end() && accuracy->is_object())
    for (const auto& [when, value] : accuracy->items())
      if (value.is_number()) parts.push_back(fmt::format("accuracy {} {:.3f}", when, value.get<double>()));
  parts.push_back(fmt::format("learner idle {:.1f} %", 100 * field_or(status, "idle_fraction", 0.0)));
  parts.push_back("delta " + bytes_text(status, "delta_bytes"));
  parts.push_back(fmt::format("T_b {:.2f} s", field_or(status, "t_b_seconds", 0.0)));
  parts.push_back(fmt::format("{}${:.4f} (${:.2f}/h)", field_or(status, "prices_known", true) ? "" : "at least ",
                              field_or(status, "usd", 0.0), field_or(status, "usd_per_hour", 0.0)));
  if (const auto credit = status.find("credit_usd"); credit != status.end() && credit->is_number()) {
    const auto hours = status.find("credit_hours");
    parts.push_back(fmt::format(
        "credit ${:.2f}{}", credit->get<double>(),
        hours != status.end() && hours->is_number() ? fmt::format(" ({:.1f} h)", hours->get<double>()) : ""));
  }
  pack_parts(parts, screen.columns, lines);
  if (const std::string trouble = field_or(status, "account_trouble", std::string()); !trouble.empty())
    lines.push_back(truncated_to(trouble, screen.columns));
  if (lines.size() > screen.rows) lines.resize(screen.rows);
  for (std::string& line : lines) line = truncated_to(line, screen.columns);
  add_workers(status, screen, lines);
  return lines;
}

std::string status_line(const json& status) {
  return fmt::format("step {}/{}  reward {:.3f}  idle {:.1f} %  T_b {:.2f} s  ${:.4f}  {}",
                     field_or(status, "step", 0.0), field_or(status, "steps", 0.0), field_or(status, "reward", 0.0),
                     100 * field_or(status, "idle_fraction", 0.0), field_or(status, "t_b_seconds", 0.0),
                     field_or(status, "usd", 0.0), field_or(status, "phase", std::string()));
}

LiveTable::LiveTable(std::FILE* out) : out_(out) {}

void LiveTable::write(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), out_);  // errors are ignored: see the class
  std::fflush(out_);
}

// Replaces the drawn table by `new_lines` and draws the table below them. It writes once, so that the screen does not
// flicker.
void LiveTable::redraw(const std::string& new_lines) {
  const std::optional<Screen> current = screen_of(out_);
  if (!current) return write(new_lines);
  std::vector<std::string> lines;
  // One row stays free for the cursor below the table, and on a screen with enough rows three more for the last
  // messages above it. Every screen has at least one row.
  const std::size_t other_lines = current->rows >= 16 ? 4 : 1;
  if (status_.is_object()) lines = status_lines(status_, {current->columns, current->rows - other_lines});
  std::string text = "\x1b[?7l";  // switches line wrapping off: a wrapped line would count as two
  if (lines_drawn_ > 0 && current != screen_) {
    // After a change of size, the terminal may have wrapped or cut the old text. Clear the screen and print the last
    // lines again.
    text += "\x1b[H\x1b[2J";
    const std::size_t rows_free = current->rows > lines.size() + 1 ? current->rows - lines.size() - 1 : 0;
    const std::size_t reprinted = std::min(rows_free, printed_lines_.size());
    for (std::size_t i = printed_lines_.size() - reprinted; i < printed_lines_.size(); ++i)
      text += truncated_to(printed_lines_[i], current->columns) + "\r\n";
  } else {
    // Goes up to the table's first line and erases the screen from there.
    if (lines_drawn_ > 0) text += fmt::format("\r\x1b[{}A\x1b[J", lines_drawn_);
    text += "\x1b[?7h" + new_lines + "\x1b[?7l";
  }
  for (const std::string& line : lines) text += line + "\r\n";
  screen_ = current;
  lines_drawn_ = lines.size();
  write(text + "\x1b[?7h");  // switches line wrapping on again
}

void LiveTable::show(const json& status, TimePoint now) {
  if (screen_of(out_)) {
    status_ = status;
    redraw("");
    return;
  }
  const std::string line = status_line(status), phase = field_or(status, "phase", std::string());
  if (line == last_line_ || (now < next_line_at_ && phase == last_phase_)) return;
  write(line + "\n");
  last_line_ = line;
  last_phase_ = phase;
  next_line_at_ = now + kLineInterval;
}

void LiveTable::print(const std::string& line) {
  printed_lines_.push_back(line);
  if (printed_lines_.size() > kPrintedLinesMax) printed_lines_.pop_front();
  redraw(line + "\n");
}

}  // namespace echoline::cli
