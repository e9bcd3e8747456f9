// Starts one program in a sandbox and stops it right before its first instruction. Private to this folder.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <utility>

#include "data_plane/sandbox/sandbox.hpp"

namespace echoline::sandbox {

// Limits of a Command: files and folders shown to the program; bytes of all its words, names and paths; bytes of a
// file.
inline constexpr std::size_t kFilesMax = 64, kArgumentBytesMax = 1u << 20, kFileBytesMax = 64u << 20;

// A file descriptor with a unique owner.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

// A memory file that holds `content`, read from its beginning.
Result<Fd> make_memory_file(std::string_view content);

// Settings common to all programs of a pool.
struct LaunchSettings {
  std::string bubblewrap;
  bool supports_ro_bind_fd = false;  // bubblewrap has --ro-bind-fd, which can show files that only root can reach
  std::optional<uid_t> as_user;      // set if this process is root: the user that the program runs as
};

// A program that launch() has started, and this process's connections to it.
struct LaunchedProgram {
  std::optional<uid_t> as_user;
  pid_t pid = -1;   // process id of the outer of bubblewrap's two processes; the caller must wait for it (waitpid)
  Fd pidfd;         // pidfd of `pid`
  Fd status;        // bubblewrap reports the program's progress here, one JSON object per line
  Fd filter;        // bubblewrap waits here for the system call filter, then starts the program
  Fd in, out, err;  // this process's ends, non-blocking; no `in` if the input is a file
};

// Must be called by a thread that lives as long as the program may, because the program is killed when the thread ends.
// `input`: the content of its standard input; null: its standard input is a socket (`in`). `group_procs`: descriptor of
// cgroup.procs of the cgroup that the program enters; -1: none.
// kInvalid for an invalid command, kIo and kUnavailable if this machine refuses. bubblewrap's own errors appear in
// `err` and `status`.
Result<LaunchedProgram> launch(const LaunchSettings& settings, const Command& command, const std::string* input,
                               int group_procs);

// Sets the limits of the stopped program, given by its process id outside the sandbox and the user it runs as. Its
// child processes inherit them.
Status set_limits(pid_t pid, const Limits& limits, const std::optional<uid_t>& as_user);

}  // namespace echoline::sandbox
