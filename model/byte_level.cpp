// The table of the byte-level alphabet, in both directions.
#include "model/byte_level.hpp"

#include <array>

#include "model/unicode.hpp"

namespace echoline::model {
namespace {

struct ByteAlphabet {
  static constexpr char32_t kFirstOther = 0x100;  // character of the first byte that is not printable
  std::array<char32_t, 256> character{};
  std::array<int, kFirstOther + 256> byte{};  // by character; -1: not in the alphabet
  ByteAlphabet() {
    byte.fill(-1);
    char32_t next = kFirstOther;
    for (unsigned b = 0; b < 256; ++b) {
      const bool is_printable = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
      character[b] = is_printable ? b : next++;
      byte[character[b]] = static_cast<int>(b);
    }
  }
};
const ByteAlphabet& byte_alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

}  // namespace

void append_byte_level(std::string& out, unsigned char byte) {
  const char32_t c = byte_alphabet().character[byte];
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else {  // the alphabet ends below U+0800
    out += static_cast<char>(0xc0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3f));
  }
}

std::optional<std::string> from_byte_level(std::string_view written) {
  std::string out;
  while (!written.empty()) {
    const auto character = first_character(written);
    const auto& bytes = byte_alphabet().byte;
    const int byte = character && character->code < bytes.size() ? bytes[character->code] : -1;
    if (byte < 0) return std::nullopt;
    out += static_cast<char>(byte);
    written.remove_prefix(character->bytes);
  }
  return out;
}

}  // namespace echoline::model
