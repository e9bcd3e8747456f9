// Maps errors of the operating system to codes.
#pragma once
#include "base/result.hpp"

namespace echoline {

// The code of an errno: kNotFound if something does not exist, kExhausted if the disk, a quota or the maximum file size
// is reached, else kIo.
Code os_code(int error);

}  // namespace echoline
