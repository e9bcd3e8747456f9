// Escapes foreign text, for log lines and messages.
#include "base/text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

namespace echoline {
namespace {

struct Character {
  std::uint32_t code = 0;
  std::size_t bytes = 0;  // 0: not UTF-8
};

// Decodes the first UTF-8 character of a text that is not empty. Accepts only the shortest form, no surrogates, and
// nothing beyond U+10FFFF.
Character decode_first(std::string_view text) {
  const auto byte_at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte_at(0) < 0x80) return {byte_at(0), 1};
  const std::size_t bytes = byte_at(0) >= 0xf0 ? 4 : byte_at(0) >= 0xe0 ? 3 : 2;
  // 0xc0 and 0xc1 would begin only two-byte forms that are longer than needed.
  if (byte_at(0) < 0xc2 || byte_at(0) > 0xf4 || text.size() < bytes) return {};
  std::uint32_t code = byte_at(0) & (0xffu >> (bytes + 1));  // without the bits that state the length
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte_at(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte_at(i) & 0x3fu);
  }
  const bool longer_than_needed = (bytes == 3 && code < 0x800) || (bytes == 4 && code < 0x10000);
  if (longer_than_needed || (code >= 0xd800 && code <= 0xdfff) || code > 0x10ffff) return {};
  return {code, bytes};
}

bool is_safe_to_print(const Character& c) {
  const bool control = c.code < 0x20 || (c.code >= 0x7f && c.code < 0xa0);
  const bool line_separator = c.code == 0x2028 || c.code == 0x2029;
  const bool bidi_control = c.code == 0x061c || (c.code >= 0x200e && c.code <= 0x200f) ||
                            (c.code >= 0x202a && c.code <= 0x202e) || (c.code >= 0x2066 && c.code <= 0x2069);
  return c.bytes > 0 && !control && !line_separator && !bidi_control;
}

}  // namespace

std::string printable(std::string_view text, std::size_t bytes_max) {
  std::string out;
  out.reserve(std::min(text.size(), bytes_max));
  while (!text.empty()) {
    const Character character = decode_first(text);
    const std::size_t bytes = std::max<std::size_t>(character.bytes, 1);
    std::string piece(text.substr(0, bytes));
    if (!is_safe_to_print(character)) {
      if (character.bytes == 0)
        piece = fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
      else if (character.code == '\n' || character.code == '\t' || character.code == '\r')
        piece = character.code == '\n' ? "\\n" : character.code == '\t' ? "\\t" : "\\r";
      else
        piece = character.code < 0x80 ? fmt::format("\\x{:02x}", character.code)
                                      : fmt::format("\\u{{{:x}}}", character.code);
    }
    if (out.size() + piece.size() > bytes_max) return out + "...";
    out += piece;
    text.remove_prefix(bytes);
  }
  return out;
}

bool is_printable(std::string_view text) {
  while (!text.empty()) {
    const Character character = decode_first(text);
    if (!is_safe_to_print(character)) return false;
    text.remove_prefix(character.bytes);
  }
  return true;
}

}  // namespace echoline
