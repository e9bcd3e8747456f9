// Starts one program in a sandbox, stopped right before it begins. Private to this folder.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <utility>

#include "data_plane/sandbox/sandbox.hpp"

namespace echoline::sandbox {

inline constexpr std::size_t kFilesMax = 64, kWordsBytesMax = 1u << 20, kFileBytesMax = 64u << 20;

// A descriptor that moves.
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

// A file in memory that holds `content`, to be read from its beginning.
Result<Fd> memory_file(std::string_view content);

// What all programs of a pool have in common.
struct Settings {
  std::string bubblewrap;
  bool binds_descriptors = false;  // it knows --ro-bind-fd: what only root can come by can be shown as well
  std::optional<uid_t> as_user;    // whom root becomes
};

struct Launched {
  std::optional<uid_t> as_user;
  pid_t pid = -1;   // bubblewrap's, outside; to be waited for by whoever launches
  Fd pidfd;         // of it
  Fd status;        // bubblewrap says what becomes of the program, a JSON object per line
  Fd filter;        // the program begins when its filter was written here, and never without
  Fd in, out, err;  // our ends, not blocking; no `in` where the input is a file
};

// Must be called by a thread that lives as long as the program may: the program ends with it. `input`: its standard
// input is a file with this; none: a socket. `group_procs`: cgroup.procs of a group to enter, or -1. kInvalid for a
// command that cannot be one, kIo and kUnavailable when this machine refuses; what bubblewrap itself refuses shows in
// `err` and `status`.
Result<Launched> launch(const Settings& settings, const Command& command, const std::string* input, int group_procs);

// Sets the limits of the stopped program with this process id outside, which runs as that user. Its own processes
// inherit them.
Status limit(pid_t pid, const Limits& limits, const std::optional<uid_t>& as_user);

}  // namespace echoline::sandbox
