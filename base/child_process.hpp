// A child process whose stderr this program reads line by line.
#pragma once
#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline {

// How a process ended: exactly one of the two.
struct ProcessEnd {
  std::optional<int> status, signal;
};

// One thread. The child leads a process group of its own, so that Ctrl-C reaches only its parent, which decides; it
// gets SIGTERM when the parent dies.
class ChildProcess {
 public:
  // stdin of the child is /dev/null, and so is its stdout unless it shares this program's.
  static Result<ChildProcess> start(const std::vector<std::string>& argv, bool shares_stdout = false);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;
  ~ChildProcess();  // kills a child that still runs

  // Waits up to `wait` for output; hands out whole lines. Returns how it ended, once it has and its output is drained.
  std::optional<ProcessEnd> pump(Duration wait, const std::function<void(const std::string&)>& line);
  void signal(int number);

 private:
  ChildProcess(pid_t pid, int output) : pid_(pid), output_(output) {}
  pid_t pid_ = -1;
  int output_ = -1;
  std::string partial_;
};

}  // namespace echoline
