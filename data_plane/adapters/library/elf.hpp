// What a file says that it is, before it goes to machines that cannot load it. Private to data_plane/.
#pragma once
#include <string>
#include <string_view>

#include "base/result.hpp"

namespace echoline::data_plane::library {

// kInvalid with what was found instead: expected is a shared library for a processor of this machine's kind. `name`: of
// the file, for that.
Status check_library(std::string_view bytes, std::string_view name);

// Bytes as text, two digits each; kCorrupt unless it is that.
std::string to_digits(std::string_view bytes);
Result<std::string> from_digits(std::string_view digits);

}  // namespace echoline::data_plane::library
