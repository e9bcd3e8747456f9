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

// How a process ended: exactly one of the two is set.
struct ProcessEnd {
  std::optional<int> status, signal;
};

// Use from one thread. The child leads its own process group, so that Ctrl-C reaches only its parent. It gets SIGTERM
// when the parent dies.
class ChildProcess {
 public:
  // The child's stdin is /dev/null, and so is its stdout unless it shares this program's.
  static Result<ChildProcess> start(const std::vector<std::string>& argv, bool shares_stdout = false);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;
  ~ChildProcess();  // kills a running child

  // Waits up to `wait` for output and passes complete lines on. Returns how the child ended, after all its output.
  std::optional<ProcessEnd> pump(Duration wait, const std::function<void(const std::string&)>& on_line);
  void signal(int number);

 private:
  ChildProcess(pid_t pid, int stderr_fd) : pid_(pid), stderr_fd_(stderr_fd) {}
  pid_t pid_ = -1;
  int stderr_fd_ = -1;        // descriptor of the child's stderr
  std::string partial_line_;  // output after the last line break
};

}  // namespace echoline
