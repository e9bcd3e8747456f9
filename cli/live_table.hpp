// Shows the state of a run as text. On a terminal it is a table that is redrawn in place, elsewhere a line every 30 s
// and at each new phase.
#pragma once
#include <cstdio>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"

namespace echoline::cli {

struct Screen {
  std::size_t columns = 80, rows = 24;
  friend bool operator==(const Screen&, const Screen&) = default;
};

// The size of the terminal that `file` writes to. Absent if it is no terminal, or if TERM says that it cannot move the
// cursor.
std::optional<Screen> screen_of(std::FILE* file);
inline std::optional<std::size_t> screen_columns() {
  const auto screen = screen_of(stdout);
  return screen ? std::optional(screen->columns) : std::nullopt;
}

// The lines for a status.json (docs/run-folder.md): at most `rows` lines of at most `columns` characters. When there is
// no room for every worker, the important ones come first (away, failing, stale, slow, seeds) and a last line counts
// the rest.
std::vector<std::string> status_lines(const nlohmann::json& status, Screen screen);
// The same state in one line.
std::string status_line(const nlohmann::json& status);

// Draws on a file. For one thread. Write errors are ignored.
class LiveTable {
 public:
  explicit LiveTable(std::FILE* out = stderr);
  // Shows a status.json.
  void show(const nlohmann::json& status, TimePoint now);
  // Prints a line above the table; it stays there.
  void print(const std::string& line);
  // Leaves the last table on the screen.
  void finish() { lines_drawn_ = 0; }

 private:
  void write(const std::string& text);
  void redraw(const std::string& new_lines);
  std::FILE* out_;
  std::optional<Screen> screen_;           // the terminal's size when the table was drawn
  std::size_t lines_drawn_ = 0;            // height of the table that is on the screen
  nlohmann::json status_;                  // the status that is drawn
  std::deque<std::string> printed_lines_;  // the last printed lines, to print again after the terminal changed its size
  TimePoint next_line_at_{};               // without a terminal: when to write the next line
  std::string last_line_, last_phase_;
};

}  // namespace echoline::cli
