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

// The first character of `text`, which must not be empty. Absent if `text` does not begin with a UTF-8 character.
std::optional<Character> first_character(std::string_view text);

// Whether `text` is one character.
bool is_one_character(std::string_view text);

// The property White_Space, and what Unicode's \w has: letters, marks, decimal digits, connectors and joiners.
bool is_white_space(char32_t character);
bool is_word_character(char32_t character);

// Offset of the first byte that is not UTF-8; absent if `text` is UTF-8.
std::optional<std::size_t> utf8_error(std::string_view text);

// Whether Unicode has added the character after version 9, with a combining class or a decomposition. Hugging Face's
// normalizers, with which models are trained, know Unicode 9 only. So their normal forms, and those below, keep such a
// character, and move no mark across it.
bool is_newer_than_unicode9(char32_t character);

// If true, to_nfc() leaves the character unchanged: it does not decompose, move or join an earlier character. False for
// some such characters, but for few of those in common texts.
bool nfc_keeps(char32_t character);

// The text in the normal form NFC (canonical composition). The text must be UTF-8 (checked).
std::string to_nfc(std::string_view text);

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };
// The text must be UTF-8 (checked).
std::string to_normal_form(std::string_view text, NormalForm form);

// `bytes` with each maximal part that is not UTF-8 replaced by U+FFFD, as Unicode recommends.
std::string to_valid_utf8(std::string_view bytes);

}  // namespace echoline::model
