// Unicode text: the characters of UTF-8, and the normal forms. Internal to model.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace echoline::model {

struct Character {
  char32_t code = 0;
  std::size_t bytes = 0;  // length in UTF-8
};

// The first character of `text`, which must not be empty. Absent if these bytes are not UTF-8.
std::optional<Character> first_character(std::string_view text);

// Whether `text` is one character.
bool is_one_character(std::string_view text);

// The property White_Space, and what Unicode's \w has: letters, marks, decimal digits, connectors and joiners.
bool is_white_space(char32_t character);
bool is_word_character(char32_t character);

// Offset of the first byte that is not UTF-8.
std::optional<std::size_t> utf8_error(std::string_view text);

// A character newer than Unicode 9 that has a combining class or decomposes. Hugging Face's normalizers, with which
// models are trained, are of Unicode 9: in their normal forms, and so in those below, it stays and no mark moves across
// it.
bool is_newer_than_unicode9(char32_t character);

// Whether to_nfc() certainly leaves the character unchanged: it neither decomposes nor moves, and joins no earlier
// character. False for some such characters, but true for most of them in common texts.
bool nfc_keeps(char32_t character);

// Canonical composition. The text must be UTF-8 (checked).
std::string to_nfc(std::string_view text);

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };
// The text must be UTF-8 (checked).
std::string to_normal_form(std::string_view text, NormalForm form);

// `bytes` with U+FFFD for each maximal part that is not UTF-8, as Unicode recommends.
std::string to_valid_utf8(std::string_view bytes);

}  // namespace echoline::model
