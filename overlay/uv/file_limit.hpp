// How many files this process may have open.
#pragma once
#include <cstddef>

namespace echoline::overlay {

// Raises the limit as far as the process may, and returns it. Sockets are files, and the usual limit of 1,024 is for
// programs with few of them.
std::size_t raise_file_limit();

}  // namespace echoline::overlay
