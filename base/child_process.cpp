// Starts and watches child processes, for `echoline up`, sweeps and bundles.
#include "base/child_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

namespace echoline {

Result<ChildProcess> ChildProcess::start(const std::vector<std::string>& argv, bool shares_stdout) {
  int pipe_ends[2];
  if (::pipe2(pipe_ends, O_CLOEXEC) != 0) return fail(Code::kIo, "start process", "pipe: {}", std::strerror(errno));
  std::vector<char*> arguments;
  for (const std::string& a : argv) arguments.push_back(const_cast<char*>(a.c_str()));
  arguments.push_back(nullptr);
  constexpr int kCannotStart = 127;  // the exit status of shells for a program that cannot be started
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) {
    const int error = errno;
    ::close(pipe_ends[0]);
    ::close(pipe_ends[1]);
    return fail(Code::kIo, "start process", "fork: {}", std::strerror(error));
  }
  if (pid == 0) {     // only async-signal-safe calls until exec
    ::setpgid(0, 0);  // so that Ctrl-C reaches only the parent
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(kCannotStart);  // the parent died before prctl()
    const int null = ::open("/dev/null", O_RDWR);
    ::dup2(null, STDIN_FILENO);
    if (!shares_stdout) ::dup2(null, STDOUT_FILENO);
    ::dup2(pipe_ends[1], STDERR_FILENO);
    ::execv(arguments[0], arguments.data());
    ::_exit(kCannotStart);
  }
  ::close(pipe_ends[1]);
  ::fcntl(pipe_ends[0], F_SETFL, O_NONBLOCK);
  return ChildProcess(pid, pipe_ends[0]);
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      stderr_fd_(std::exchange(other.stderr_fd_, -1)),
      partial_line_(std::move(other.partial_line_)) {}

ChildProcess::~ChildProcess() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  if (stderr_fd_ >= 0) ::close(stderr_fd_);
}

void ChildProcess::signal(int number) {
  if (pid_ > 0) ::kill(pid_, number);
}

std::optional<ProcessEnd> ChildProcess::pump(Duration wait, const std::function<void(const std::string&)>& on_line) {
  pollfd output{stderr_fd_, POLLIN, 0};
  ::poll(&output, 1, static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(wait).count()));
  const auto drain = [&] {
    char block[4096];
    for (;;) {
      const ssize_t n = ::read(stderr_fd_, block, sizeof block);
      if (n <= 0) break;
      partial_line_.append(block, static_cast<std::size_t>(n));
      for (std::size_t end; (end = partial_line_.find('\n')) != std::string::npos; partial_line_.erase(0, end + 1))
        on_line(partial_line_.substr(0, end));
    }
  };
  drain();
  int status = 0;
  if (pid_ <= 0 || ::waitpid(pid_, &status, WNOHANG) != pid_) return std::nullopt;
  pid_ = -1;
  drain();  // the child may have written more before it ended
  if (!partial_line_.empty()) on_line(std::exchange(partial_line_, ""));
  ProcessEnd end;
  if (WIFSIGNALED(status))
    end.signal = WTERMSIG(status);
  else
    end.status = WEXITSTATUS(status);
  return end;
}

}  // namespace echoline
