// Implements the functions for Unicode text with utf8proc.
#include "model/unicode.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <utility>

#include "base/result.hpp"

namespace echoline::model {
namespace {

struct Free {
  void operator()(utf8proc_uint8_t* bytes) const { std::free(bytes); }
};

const utf8proc_uint8_t* bytes_of(std::string_view text) {
  return reinterpret_cast<const utf8proc_uint8_t*>(text.data());
}

// First and last of ranges of characters with combining class 0 and NFC_Quick_Check=Yes, ascending. U+11A7 is listed
// because utf8proc 2.8 takes it for a part of the Hangul syllable before it.
constexpr std::pair<char32_t, char32_t> kRangesKeptByNfc[] = {
    {0x0000, 0x02ff}, {0x0388, 0x0482}, {0x048a, 0x0590}, {0x05d0, 0x060f},  {0x061b, 0x064a},
    {0x0671, 0x06d5}, {0x0904, 0x093b}, {0x0e01, 0x0e37}, {0x11a7, 0x11a7},  {0x1e00, 0x1f70},
    {0x2002, 0x20cf}, {0x2190, 0x2328}, {0x232b, 0x2adb}, {0x2e00, 0x3029},  {0x3030, 0x3096},
    {0x309b, 0xa66e}, {0xabee, 0xd7a3}, {0xfe30, 0xffef}, {0x1f000, 0x1faff}};

// See is_newer_than_unicode9(): first and last of ranges, ascending, of the characters that utf8proc knows.
constexpr std::pair<char32_t, char32_t> kNewerThanUnicode9[] = {
    {0x07fd, 0x07fd},   {0x0898, 0x089f},   {0x08ca, 0x08d3},   {0x09fe, 0x09fe},   {0x0c3c, 0x0c3c},
    {0x0d3b, 0x0d3c},   {0x0eba, 0x0eba},   {0x0ece, 0x0ece},   {0x1715, 0x1715},   {0x1abf, 0x1ace},
    {0x1df6, 0x1dfa},   {0x32ff, 0x32ff},   {0xa7f2, 0xa7f4},   {0xa82c, 0xa82c},   {0xab69, 0xab69},
    {0x10781, 0x10785}, {0x10787, 0x107b0}, {0x107b2, 0x107ba}, {0x10d24, 0x10d27}, {0x10eab, 0x10eac},
    {0x10efd, 0x10eff}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b},
    {0x1145e, 0x1145e}, {0x11839, 0x1183a}, {0x11930, 0x11930}, {0x11938, 0x11938}, {0x1193d, 0x1193e},
    {0x11943, 0x11943}, {0x119e0, 0x119e0}, {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99},
    {0x11d42, 0x11d42}, {0x11d44, 0x11d45}, {0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x16ff0, 0x16ff1},
    {0x1e030, 0x1e06d}, {0x1e08f, 0x1e08f}, {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef},
    {0x1e4ec, 0x1e4ef}, {0x1f16c, 0x1f16c}, {0x1fbf0, 0x1fbf9}};

template <std::size_t n>
bool is_in(const std::pair<char32_t, char32_t> (&ranges)[n], char32_t character) {
  const auto* range = std::upper_bound(std::begin(ranges), std::end(ranges), character,
                                       [](char32_t wanted, const auto& candidate) { return wanted < candidate.first; });
  return range != std::begin(ranges) && character <= std::prev(range)->second;
}

// Appends `text` as utf8proc maps it by `options`.
void append_mapped(std::string& out, std::string_view text, int options) {
  utf8proc_uint8_t* mapped = nullptr;
  const auto size = utf8proc_map(bytes_of(text), static_cast<utf8proc_ssize_t>(text.size()), &mapped,
                                 static_cast<utf8proc_option_t>(UTF8PROC_STABLE | options));
  ECHO_CHECK(size >= 0, "normal form of {} bytes: {}", text.size(), utf8proc_errmsg(size));
  const std::unique_ptr<utf8proc_uint8_t, Free> owned(mapped);
  out.append(reinterpret_cast<const char*>(mapped), static_cast<std::size_t>(size));
}
void append_composed(std::string& out, std::string_view text) { append_mapped(out, text, UTF8PROC_COMPOSE); }

}  // namespace

std::optional<Character> first_character(std::string_view text) {
  if (const auto byte = static_cast<unsigned char>(text.front()); byte < 0x80)
    return Character{.code = byte, .bytes = 1};
  utf8proc_int32_t code = 0;
  const auto bytes = utf8proc_iterate(bytes_of(text), static_cast<utf8proc_ssize_t>(text.size()), &code);
  if (bytes <= 0) return std::nullopt;
  return Character{.code = static_cast<char32_t>(code), .bytes = static_cast<std::size_t>(bytes)};
}

std::optional<std::size_t> utf8_error(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto character = first_character(text.substr(i));
    if (!character) return i;
    i += character->bytes;
  }
  return std::nullopt;
}

bool is_one_character(std::string_view text) {
  const auto character = text.empty() ? std::nullopt : first_character(text);
  return character && character->bytes == text.size();
}

bool is_white_space(char32_t character) {
  if ((character >= 0x09 && character <= 0x0d) || character == 0x85) return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(character))) {
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return true;
    default:
      return false;
  }
}

bool is_word_character(char32_t character) {
  // Alphabetic symbols: circled and squared letters.
  if ((character >= 0x24b6 && character <= 0x24e9) || (character >= 0x1f130 && character <= 0x1f149) ||
      (character >= 0x1f150 && character <= 0x1f169) || (character >= 0x1f170 && character <= 0x1f189))
    return true;
  if (character == 0x200c || character == 0x200d) return true;  // joiners
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(character))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

bool is_newer_than_unicode9(char32_t character) { return is_in(kNewerThanUnicode9, character); }
bool nfc_keeps(char32_t character) { return is_in(kRangesKeptByNfc, character); }

// A plain character is one for which nfc_keeps() is true. Other characters are composed together with the plain one
// before them, which they may join. The rest of the text is copied. A character newer than Unicode 9 is copied too, and
// characters after it are not composed with those before it.
std::string to_nfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  std::size_t begin = 0, last_plain = 0;  // start of the text not yet in `out`, and of the last plain character
  bool has_other = false;                 // a character after last_plain is not plain
  for (std::size_t i = 0; i < text.size();) {
    const auto character = first_character(text.substr(i));
    ECHO_CHECK(character.has_value(), "byte {} of a text for NFC is not UTF-8", i);
    if (is_newer_than_unicode9(character->code)) {
      if (std::exchange(has_other, false))
        append_composed(out, text.substr(begin, i - begin));
      else
        out += text.substr(begin, i - begin);
      out += text.substr(i, character->bytes);
      begin = last_plain = i + character->bytes;
    } else if (nfc_keeps(character->code)) {
      if (std::exchange(has_other, false)) {
        append_composed(out, text.substr(begin, i - begin));
        begin = i;
      }
      last_plain = i;
    } else if (!std::exchange(has_other, true)) {
      out += text.substr(begin, last_plain - begin);
      begin = last_plain;
    }
    i += character->bytes;
  }
  if (has_other)
    append_composed(out, text.substr(begin));
  else
    out += text.substr(begin);
  return out;
}

std::string to_normal_form(std::string_view text, NormalForm form) {
  if (form == NormalForm::kNfc) return to_nfc(text);
  const bool is_compatible = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  const int options = UTF8PROC_DECOMPOSE | (is_compatible ? UTF8PROC_COMPAT : 0);
  std::string decomposed;
  std::size_t begin = 0;  // start of the text not yet in `decomposed`
  for (std::size_t i = 0; i < text.size();) {
    const auto character = first_character(text.substr(i));
    ECHO_CHECK(character.has_value(), "byte {} of a text for a normal form is not UTF-8", i);
    if (is_newer_than_unicode9(character->code)) {
      append_mapped(decomposed, text.substr(begin, i - begin), options);
      decomposed += text.substr(i, character->bytes);
      begin = i + character->bytes;
    }
    i += character->bytes;
  }
  append_mapped(decomposed, text.substr(begin), options);
  return form == NormalForm::kNfkc ? to_nfc(decomposed) : decomposed;
}

std::string to_valid_utf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  const auto byte_at = [&](std::size_t i) { return i < bytes.size() ? static_cast<unsigned char>(bytes[i]) : 0u; };
  for (std::size_t i = 0; i < bytes.size();) {
    const unsigned lead = byte_at(i);
    // The length that the first byte announces (0: it begins no character), and the range of the second byte, which
    // excludes overlong forms, surrogates and numbers above U+10FFFF.
    const std::size_t length = lead < 0x80   ? 1
                               : lead < 0xc2 ? 0
                               : lead < 0xe0 ? 2
                               : lead < 0xf0 ? 3
                               : lead < 0xf5 ? 4
                                             : 0;
    const unsigned second_min = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned second_max = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    std::size_t valid = length == 0 ? 0 : 1;  // number of bytes that can begin a character
    while (valid > 0 && valid < length && byte_at(i + valid) >= (valid == 1 ? second_min : 0x80) &&
           byte_at(i + valid) <= (valid == 1 ? second_max : 0xbf))
      ++valid;
    if (length > 0 && valid == length)
      out += bytes.substr(i, length);
    else
      out += "\xef\xbf\xbd";
    i += std::max<std::size_t>(valid, 1);
  }
  return out;
}

}  // namespace echoline::model
