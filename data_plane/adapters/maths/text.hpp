// Text in the form the published grading rules use: a sequence of Unicode characters, encoded as UTF-8 in a response.
// Invalid UTF-8 becomes U+FFFD as with Python's errors="replace": one for each maximal invalid part. Private to
// data_plane/adapters/.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace echoline::data_plane::maths {

using Characters = std::u32string;
using CharacterView = std::u32string_view;

Characters decode(std::string_view bytes);
std::string encode(CharacterView text);  // accepts any result of decode()

// The number of characters that decode() would return.
std::uint64_t count_characters(std::string_view bytes);

// The end of `bytes` that decodes to its last `count` characters, or all of it if it has fewer. Reads only that end.
std::string_view last_characters(std::string_view bytes, std::size_t count);

// White space and digits by Python's str.isspace() and str.isdigit() (Unicode 14): superscripts and circled digits are
// digits, fractions and Roman numerals are not. The tables are part of this program, so that all machines agree.
bool is_space(char32_t c);
bool is_digit(char32_t c);

CharacterView trimmed(CharacterView text);
// Replaces every occurrence, left to right, without overlap. `from` must not be empty.
Characters replaced(CharacterView text, CharacterView from, CharacterView to);
std::size_t occurrences(CharacterView text, CharacterView what);

}  // namespace echoline::data_plane::maths
