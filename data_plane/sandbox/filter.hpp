// Which system calls a program in a sandbox may make. Private to this folder.
#pragma once
#include <string>

#include "base/result.hpp"

namespace echoline::sandbox {

// A seccomp filter as the kernel takes it (struct sock_filter after struct sock_filter). Calls that reach into other
// processes, namespaces, mounts, keys, the kernel, devices or its clocks, that make sockets beyond the machine, or
// memory that no limit counts, fail with EPERM, or ENOSYS where programs have another way then. A call of another
// architecture ends the program. kUnavailable where the kernel or libseccomp has no filters.
Result<std::string> system_call_filter();

}  // namespace echoline::sandbox
