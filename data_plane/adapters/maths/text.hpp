// Text as the published grading rules see it: a sequence of Unicode characters, of which a response is the UTF-8 form.
// Bytes that are no UTF-8 become U+FFFD as in Python's errors="replace", one for every maximal part of a sequence that
// could have been one. Private to data_plane/adapters/.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace echoline::data_plane::maths {

using Characters = std::u32string;
using CharacterView = std::u32string_view;

Characters decode(std::string_view bytes);
std::string encode(CharacterView text);  // of what decode() gives

// How many characters decode() would give.
std::uint64_t count_characters(std::string_view bytes);

// The end of `bytes` that decodes to its last `count` characters (all of it where there are fewer). Looks at that end
// only.
std::string_view last_characters(std::string_view bytes, std::size_t count);

// White space and digits as Python's str.isspace() and str.isdigit() have them (Unicode 14): superscripts and circled
// digits are digits, fractions and Roman numerals are not. Fixed here, so that every machine says the same.
bool is_space(char32_t c);
bool is_digit(char32_t c);

CharacterView trimmed(CharacterView text);
// Every occurrence, from the left, none overlapping another. `from` is not empty.
Characters replaced(CharacterView text, CharacterView from, CharacterView to);
std::size_t occurrences(CharacterView text, CharacterView what);

}  // namespace echoline::data_plane::maths
