// Measures the resource use of a sandbox's processes, by the sandbox's own /proc. Private to this folder.
#pragma once
#include <sys/types.h>

#include "data_plane/sandbox/launch.hpp"

namespace echoline::sandbox {

struct Usage {
  Bytes memory;  // of processes, each page once, and of /tmp with its inodes
  Duration cpu{};
};

// Reads from outside through the processes' own view of /proc. So it cannot mistake a process of another sandbox, or a
// later one with the same number, for one of them.
class Watch {
 public:
  // `first`: the process id, outside, of the sandbox's process 1.
  explicit Watch(pid_t first) : first_(first) {}
  // Nothing during the sandbox's set-up and after its end. Counts shared pages once only if the sum over the processes
  // exceeds `enough`, because that is slower.
  std::optional<Usage> look(Bytes enough);

 private:
  bool open();

  pid_t first_;
  Fd processes_, scratch_;
};

}  // namespace echoline::sandbox
