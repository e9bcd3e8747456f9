// The state of a run as text: a table that redraws in place on a terminal, a line now and then elsewhere.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/clock.hpp"

namespace echoline::cli {

// The lines of a status.json (learner/service.cpp writes it), at most 100 columns.
std::vector<std::string> status_lines(const nlohmann::json& status);
// The same in one line.
std::string status_line(const nlohmann::json& status);

// Draws on stderr. One thread.
class LiveTable {
 public:
  LiveTable();
  void show(const nlohmann::json& status, TimePoint now);
  // A line that stays: printed above the table.
  void print(const std::string& line);
  // Leaves the last table on the screen.
  void finish() { drawn_ = 0; }

 private:
  void erase();
  void draw();
  bool terminal_ = false;
  std::size_t drawn_ = 0;
  std::vector<std::string> lines_;
  TimePoint line_due_{};
  std::string last_line_;
};

}  // namespace echoline::cli
