// Unicode text: the characters of UTF-8, and the normal form NFC. Internal to model.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace echoline::model {

struct Character {
  char32_t code = 0;
  std::size_t bytes = 0;  // that it takes
};

// The first character of `text`, which must not be empty. Absent if these bytes are not UTF-8.
std::optional<Character> first_character(std::string_view text);

// Offset of the first byte that is not UTF-8.
std::optional<std::size_t> utf8_error(std::string_view text);

// Whether to_nfc() certainly leaves the character unchanged: it neither decomposes nor moves, and joins no earlier
// character. Covers not all such characters, but most in common texts.
bool nfc_keeps(char32_t character);

// Canonical composition. The text must be UTF-8 (checked).
std::string to_nfc(std::string_view text);

}  // namespace echoline::model
