// What the processes of one sandbox use, by their own /proc. Private to this folder.
#pragma once
#include <sys/types.h>

#include "data_plane/sandbox/launch.hpp"

namespace echoline::sandbox {

struct Usage {
  Bytes memory;  // of processes, each page once, and of /tmp with its inodes
  Duration cpu{};
};

// Looks from outside at the processes inside, through the view of /proc that they have themselves: no process of
// another sandbox and no later one with the same number can be taken for one of them.
class Watch {
 public:
  // `first`: the sandbox's process 1, by its number outside.
  explicit Watch(pid_t first) : first_(first) {}
  // Nothing while the sandbox is being set up, and after it has ended. Counts shared pages once only where all together
  // would be more than `enough`, for that takes longer.
  std::optional<Usage> look(Bytes enough);

 private:
  bool open();

  pid_t first_;
  Fd processes_, scratch_;
};

}  // namespace echoline::sandbox
