// Kinds of errors of the operating system.
#pragma once
#include "base/result.hpp"

namespace echoline {

// Of an errno: kNotFound when something does not exist, kExhausted when the disk, a quota or the largest size of a file
// is used up, else kIo.
Code os_code(int error);

}  // namespace echoline
