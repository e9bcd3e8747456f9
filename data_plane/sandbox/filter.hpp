// The system calls that a sandboxed program may make. Private to this folder.
#pragma once
#include <string>

#include "base/result.hpp"

namespace echoline::sandbox {

// Returns a seccomp filter in the kernel's form (an array of struct sock_filter). It refuses calls that reach other
// processes, namespaces, mounts, keys, the kernel, devices or clocks, sockets beyond the machine, and memory that no
// limit counts: with EPERM, or with ENOSYS if programs have a fallback. A call of another architecture kills the
// program. kUnavailable if the kernel or libseccomp does not support filters.
Result<std::string> system_call_filter();

}  // namespace echoline::sandbox
