// Makes foreign text safe for logs, files and terminals.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace echoline {

inline constexpr std::size_t kPrintableBytesMax = 1024;

// Returns one line of valid UTF-8. Control characters, line breaks, direction marks and invalid bytes become \n, \t,
// \xNN or \u{N}. A result longer than `bytes_max` is cut there, and "..." is added.
std::string printable(std::string_view text, std::size_t bytes_max = kPrintableBytesMax);
// Whether printable() would leave the text unchanged, apart from its length.
bool is_printable(std::string_view text);

}  // namespace echoline
