// The state of a run as text: a table that redraws in place on a terminal, a line now and then elsewhere.
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

// The size of the terminal behind a file, absent when there is none or nothing can be drawn on it (TERM).
std::optional<Screen> screen_of(std::FILE* file);
// The columns of the terminal behind stdout, absent where there is none.
inline std::optional<std::size_t> screen_columns() {
  const auto screen = screen_of(stdout);
  return screen ? std::optional(screen->columns) : std::nullopt;
}

// A status.json (docs/run-folder.md) as lines, at most `rows` of them and none longer than `columns`. Where not every
// worker has room, those that matter come first (away, failing, stale, slow, seeds), then a line counts the rest.
std::vector<std::string> status_lines(const nlohmann::json& status, Screen screen);
// The same in one line.
std::string status_line(const nlohmann::json& status);

// Draws on a file. One thread. A file that cannot be written to any more ends nothing but the drawing.
class LiveTable {
 public:
  explicit LiveTable(std::FILE* out = stderr);
  void show(const nlohmann::json& status, TimePoint now);
  // A line that stays: printed above the table.
  void print(const std::string& line);
  // Leaves the last table on the screen.
  void finish() { drawn_ = 0; }

 private:
  void write(const std::string& text);
  void redraw(const std::string& printed);
  std::FILE* out_;
  std::optional<Screen> screen_;     // as it was when the table was drawn
  std::size_t drawn_ = 0;            // lines of the table on the screen
  nlohmann::json status_;            // what it shows
  std::deque<std::string> printed_;  // the last lines above it, for a screen that has changed its size
  TimePoint line_due_{};
  std::string last_line_, last_phase_;
};

}  // namespace echoline::cli
