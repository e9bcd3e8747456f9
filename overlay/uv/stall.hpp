// The kernel's data on a stalled connection. Internal to overlay/uv.
#pragma once
#include "overlay/narrow_paths.hpp"

namespace echoline::overlay {

// Zeros if the kernel has no data.
NarrowPaths::Stall stall_of(int fd);

}  // namespace echoline::overlay
