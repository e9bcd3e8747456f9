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

// First and last of ranges with class 0 and NFC_Quick_Check Yes, ascending. U+11A7 is listed because utf8proc 2.8 takes
// it for a part of the Hangul syllable before it.
constexpr std::pair<char32_t, char32_t> kRangesKeptByNfc[] = {
    {0x0000, 0x02ff}, {0x0388, 0x0482}, {0x048a, 0x0590}, {0x05d0, 0x060f},  {0x061b, 0x064a},
    {0x0671, 0x06d5}, {0x0904, 0x093b}, {0x0e01, 0x0e37}, {0x11a7, 0x11a7},  {0x1e00, 0x1f70},
    {0x2002, 0x20cf}, {0x2190, 0x2328}, {0x232b, 0x2adb}, {0x2e00, 0x3029},  {0x3030, 0x3096},
    {0x309b, 0xa66e}, {0xabee, 0xd7a3}, {0xfe30, 0xffef}, {0x1f000, 0x1faff}};

void append_composed(std::string& to, std::string_view text) {
  utf8proc_uint8_t* composed = nullptr;
  const auto size = utf8proc_map(bytes_of(text), static_cast<utf8proc_ssize_t>(text.size()), &composed,
                                 static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  ECHO_CHECK(size >= 0, "NFC of {} bytes: {}", text.size(), utf8proc_errmsg(size));
  const std::unique_ptr<utf8proc_uint8_t, Free> owned(composed);
  to.append(reinterpret_cast<const char*>(composed), static_cast<std::size_t>(size));
}

}  // namespace

std::optional<Character> first_character(std::string_view text) {
  if (const auto byte = static_cast<unsigned char>(text.front()); byte < 0x80) return Character{byte, 1};
  utf8proc_int32_t code = 0;
  const auto bytes = utf8proc_iterate(bytes_of(text), static_cast<utf8proc_ssize_t>(text.size()), &code);
  if (bytes <= 0) return std::nullopt;
  return Character{static_cast<char32_t>(code), static_cast<std::size_t>(bytes)};
}

std::optional<std::size_t> utf8_error(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto character = first_character(text.substr(i));
    if (!character) return i;
    i += character->bytes;
  }
  return std::nullopt;
}

bool nfc_keeps(char32_t character) {
  const auto* range = std::upper_bound(std::begin(kRangesKeptByNfc), std::end(kRangesKeptByNfc), character,
                                       [](char32_t c, const auto& r) { return c < r.first; });
  return range != std::begin(kRangesKeptByNfc) && character <= std::prev(range)->second;
}

// Characters that are not plain are composed together with the preceding plain one, which they may join; all else is
// copied.
std::string to_nfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  std::size_t begin = 0, last = 0;  // start of the text not yet in `out`, and of the last plain character
  bool to_compose = false;          // a later character is not plain
  for (std::size_t i = 0; i < text.size();) {
    const auto character = first_character(text.substr(i));
    ECHO_CHECK(character.has_value(), "byte {} of a text for NFC is not UTF-8", i);
    if (nfc_keeps(character->code)) {
      if (std::exchange(to_compose, false)) {
        append_composed(out, text.substr(begin, i - begin));
        begin = i;
      }
      last = i;
    } else if (!std::exchange(to_compose, true)) {
      out += text.substr(begin, last - begin);
      begin = last;
    }
    i += character->bytes;
  }
  if (to_compose)
    append_composed(out, text.substr(begin));
  else
    out += text.substr(begin);
  return out;
}

}  // namespace echoline::model
