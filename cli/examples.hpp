// Examples of each verb's use, which its --help and its manual page begin with.
#pragma once
#include <span>
#include <string_view>

namespace echoline::cli {

// The example commands of the verb with this path, such as "delta diff"; "" is the program. A command may have two
// lines, of which the first ends with a backslash. Empty for an unknown path.
std::span<const char* const> examples_of(std::string_view path);

}  // namespace echoline::cli
