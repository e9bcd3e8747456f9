// What the kernel knows of a connection that does not get on. Internal to overlay/uv.
#pragma once
#include "overlay/narrow_paths.hpp"

namespace echoline::overlay {

// Zeros where the kernel does not tell.
NarrowPaths::Stall stall_of(int fd);

}  // namespace echoline::overlay
