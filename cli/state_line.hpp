// The state of long work on the last line of the terminal at stderr, below the lines that stay. Elsewhere only the
// lines that stay are printed.
#pragma once
#include <fmt/format.h>

#include <cstdio>
#include <mutex>
#include <string>

#include "cli/live_table.hpp"
#include "cli/output.hpp"

namespace echoline::cli {

// Members may be called from any thread. The state disappears with clear() or the object.
class StateLine {
 public:
  StateLine() = default;
  ~StateLine() { clear(); }
  StateLine(const StateLine&) = delete;
  StateLine& operator=(const StateLine&) = delete;

  void print_line(const std::string& text) {
    const std::lock_guard lock(mutex_);
    erase_state();
    print_stderr("{}\n", text);
  }
  void show(const std::string& state) {
    const std::lock_guard lock(mutex_);
    if (state == shown_) return;
    const auto screen = screen_of(stderr);
    if (!screen) return;
    erase_state();
    shown_ = state;
    print_stderr("{}", state.substr(0, screen->columns > 1 ? screen->columns - 1 : 0));
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    erase_state();
  }

 private:
  void erase_state() {
    if (!shown_.empty()) print_stderr("\r\x1b[K");
    shown_.clear();
  }

  std::mutex mutex_;
  std::string shown_;  // the whole state, though a narrow terminal shows only its beginning
};

}  // namespace echoline::cli
