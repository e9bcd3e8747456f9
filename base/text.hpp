// Texts that came from elsewhere, made fit for a log, a file or a terminal.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace echoline {

inline constexpr std::size_t kPrintableBytesMax = 1024;

// One line of valid UTF-8. What would move a cursor, begin a line or turn the direction of writing, and bytes that are
// not UTF-8, stand as \n, \t, \xNN or \u{N}; after `bytes_max` of the result the rest is left out, which "..." tells.
std::string printable(std::string_view text, std::size_t bytes_max = kPrintableBytesMax);
// Whether printable() would leave it as it is, but for its length.
bool is_printable(std::string_view text);

}  // namespace echoline
