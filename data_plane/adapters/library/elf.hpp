// Checks a shared library before it is sent to machines that could not load it. Private to data_plane/.
#pragma once
#include <string>
#include <string_view>

#include "base/result.hpp"

namespace echoline::data_plane::library {

// kInvalid unless the bytes are a shared library for this machine's kind of processor; the message says what was found
// and calls the file `name`.
Status check_library(std::string_view bytes, std::string_view name);

// Bytes as hexadecimal digits; from_hex() returns kCorrupt for any other text.
std::string to_hex(std::string_view bytes);
Result<std::string> from_hex(std::string_view digits);

}  // namespace echoline::data_plane::library
