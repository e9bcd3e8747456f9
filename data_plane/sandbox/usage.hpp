// Measures the resource use of a sandbox's processes, in the sandbox's own /proc. Private to this folder.
#pragma once
#include <sys/types.h>

#include "data_plane/sandbox/launch.hpp"

namespace echoline::sandbox {

struct Usage {
  Bytes memory;    // of the processes, and of /tmp with its inodes
  Duration cpu{};  // of all processes together
};

// Runs outside the sandbox but reads the sandbox's /proc, which lists only its processes. So a process of another
// sandbox, or a later one with the same number, is never counted.
class UsageMeter {
 public:
  // `first_pid`: the process id, outside, of the sandbox's process 1.
  explicit UsageMeter(pid_t first_pid) : first_pid_(first_pid) {}
  // Nothing during the sandbox's set-up and after its end. Memory is the sum over the processes, with a shared page
  // counted for each; if that exceeds `exact_above`, it is measured again with each page counted once, which is slower.
  std::optional<Usage> measure(Bytes exact_above);

 private:
  bool open();

  pid_t first_pid_;
  Fd processes_, scratch_;  // the sandbox's /proc and /tmp
};

}  // namespace echoline::sandbox
