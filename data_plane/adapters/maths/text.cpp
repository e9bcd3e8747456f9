// UTF-8 and character classes as in Python, on which the published rules depend.
#include "data_plane/adapters/maths/text.hpp"

#include <algorithm>
#include <iterator>

namespace echoline::data_plane::maths {
namespace {

constexpr char32_t kReplacementCharacter = 0xfffd;  // for invalid UTF-8
constexpr std::size_t kBytesPerCharacterMax = 4;

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

struct DecodedCharacter {
  char32_t character;
  std::size_t bytes;
};

// The first character of `bytes`, which must not be empty: Unicode 14, table 3-7.
DecodedCharacter first_character(std::string_view bytes) {
  const auto lead = static_cast<unsigned char>(bytes[0]);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xc2 || lead > 0xf4) return {kReplacementCharacter, 1};
  const std::size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  char32_t character = lead & (0xffu >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if (i >= bytes.size()) return {kReplacementCharacter, i};
    const auto next = static_cast<unsigned char>(bytes[i]);
    unsigned char low = 0x80, high = 0xbf;
    if (i == 1 && lead == 0xe0) low = 0xa0;   // refuses overlong forms of a character
    if (i == 1 && lead == 0xed) high = 0x9f;  // refuses surrogates
    if (i == 1 && lead == 0xf0) low = 0x90;   // refuses overlong forms
    if (i == 1 && lead == 0xf4) high = 0x8f;  // refuses numbers above U+10FFFF
    if (next < low || next > high) return {kReplacementCharacter, i};
    character = (character << 6) | (next & 0x3fu);
  }
  return {character, length};
}

struct Range {
  char32_t first, last;
};
// The characters that is_digit() accepts; ascending.
constexpr Range kDigits[] = {
    {0x30, 0x39},       {0xb2, 0xb3},       {0xb9, 0xb9},       {0x660, 0x669},     {0x6f0, 0x6f9},
    {0x7c0, 0x7c9},     {0x966, 0x96f},     {0x9e6, 0x9ef},     {0xa66, 0xa6f},     {0xae6, 0xaef},
    {0xb66, 0xb6f},     {0xbe6, 0xbef},     {0xc66, 0xc6f},     {0xce6, 0xcef},     {0xd66, 0xd6f},
    {0xde6, 0xdef},     {0xe50, 0xe59},     {0xed0, 0xed9},     {0xf20, 0xf29},     {0x1040, 0x1049},
    {0x1090, 0x1099},   {0x1369, 0x1371},   {0x17e0, 0x17e9},   {0x1810, 0x1819},   {0x1946, 0x194f},
    {0x19d0, 0x19da},   {0x1a80, 0x1a89},   {0x1a90, 0x1a99},   {0x1b50, 0x1b59},   {0x1bb0, 0x1bb9},
    {0x1c40, 0x1c49},   {0x1c50, 0x1c59},   {0x2070, 0x2070},   {0x2074, 0x2079},   {0x2080, 0x2089},
    {0x2460, 0x2468},   {0x2474, 0x247c},   {0x2488, 0x2490},   {0x24ea, 0x24ea},   {0x24f5, 0x24fd},
    {0x24ff, 0x24ff},   {0x2776, 0x277e},   {0x2780, 0x2788},   {0x278a, 0x2792},   {0xa620, 0xa629},
    {0xa8d0, 0xa8d9},   {0xa900, 0xa909},   {0xa9d0, 0xa9d9},   {0xa9f0, 0xa9f9},   {0xaa50, 0xaa59},
    {0xabf0, 0xabf9},   {0xff10, 0xff19},   {0x104a0, 0x104a9}, {0x10a40, 0x10a43}, {0x10d30, 0x10d39},
    {0x10e60, 0x10e68}, {0x11052, 0x1105a}, {0x11066, 0x1106f}, {0x110f0, 0x110f9}, {0x11136, 0x1113f},
    {0x111d0, 0x111d9}, {0x112f0, 0x112f9}, {0x11450, 0x11459}, {0x114d0, 0x114d9}, {0x11650, 0x11659},
    {0x116c0, 0x116c9}, {0x11730, 0x11739}, {0x118e0, 0x118e9}, {0x11950, 0x11959}, {0x11c50, 0x11c59},
    {0x11d50, 0x11d59}, {0x11da0, 0x11da9}, {0x16a60, 0x16a69}, {0x16ac0, 0x16ac9}, {0x16b50, 0x16b59},
    {0x1d7ce, 0x1d7ff}, {0x1e140, 0x1e149}, {0x1e2f0, 0x1e2f9}, {0x1e950, 0x1e959}, {0x1f100, 0x1f10a},
    {0x1fbf0, 0x1fbf9}};

}  // namespace

Characters decode(std::string_view bytes) {
  Characters text;
  text.reserve(bytes.size());
  while (!bytes.empty()) {
    const DecodedCharacter decoded = first_character(bytes);
    text += decoded.character;
    bytes.remove_prefix(decoded.bytes);
  }
  return text;
}

std::string encode(CharacterView text) {
  std::string bytes;
  bytes.reserve(text.size());
  const auto append_byte = [&](char32_t value) { bytes += static_cast<char>(static_cast<unsigned char>(value)); };
  for (const char32_t c : text) {
    if (c < 0x80) {
      append_byte(c);
    } else if (c < 0x800) {
      append_byte(0xc0 | (c >> 6));
      append_byte(0x80 | (c & 0x3f));
    } else if (c < 0x10000) {
      append_byte(0xe0 | (c >> 12));
      append_byte(0x80 | ((c >> 6) & 0x3f));
      append_byte(0x80 | (c & 0x3f));
    } else {
      append_byte(0xf0 | (c >> 18));
      append_byte(0x80 | ((c >> 12) & 0x3f));
      append_byte(0x80 | ((c >> 6) & 0x3f));
      append_byte(0x80 | (c & 0x3f));
    }
  }
  return bytes;
}

std::uint64_t count_characters(std::string_view bytes) {
  std::uint64_t count = 0;
  for (; !bytes.empty(); ++count) bytes.remove_prefix(first_character(bytes).bytes);
  return count;
}

std::string_view last_characters(std::string_view bytes, std::size_t count) {
  // The last `count` characters are within 4 * count bytes. Reads three more, to find a byte where a character begins:
  // one that is not a continuation byte, or one that follows three of them.
  const std::size_t bytes_to_read = kBytesPerCharacterMax * count + kBytesPerCharacterMax - 1;
  if (bytes.size() > bytes_to_read) {
    bytes.remove_prefix(bytes.size() - bytes_to_read);
    for (std::size_t i = 1; i < kBytesPerCharacterMax && is_continuation(bytes[0]); ++i) bytes.remove_prefix(1);
  }
  for (std::uint64_t excess = count_characters(bytes); excess > count; --excess)
    bytes.remove_prefix(first_character(bytes).bytes);
  return bytes;
}

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

bool is_digit(char32_t c) {
  const auto above = std::upper_bound(std::begin(kDigits), std::end(kDigits), c,
                                      [](char32_t value, const Range& range) { return value < range.first; });
  return above != std::begin(kDigits) && c <= std::prev(above)->last;
}

CharacterView trimmed(CharacterView text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

Characters replaced(CharacterView text, CharacterView from, CharacterView to) {
  Characters result;
  result.reserve(text.size());
  for (;;) {
    const std::size_t begin = text.find(from);
    result += text.substr(0, begin);
    if (begin == CharacterView::npos) return result;
    result += to;
    text.remove_prefix(begin + from.size());
  }
}

std::size_t occurrences(CharacterView text, CharacterView what) {
  std::size_t count = 0;
  for (std::size_t begin = text.find(what); begin != CharacterView::npos; begin = text.find(what, begin + what.size()))
    ++count;
  return count;
}

}  // namespace echoline::data_plane::maths
