// The alphabet of byte-level BPE, in which a tokenizer.json writes each byte as one character. Internal to model.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace echoline::model {

// Appends the character of `byte`. Bytes that are printable in Latin-1 are their own characters; the others are, in
// order, the characters from U+0100 on.
void append_byte_level(std::string& out, unsigned char byte);
// The bytes that a text in this alphabet stands for; absent if the text has a character of no byte.
std::optional<std::string> from_byte_level(std::string_view written);

}  // namespace echoline::model
