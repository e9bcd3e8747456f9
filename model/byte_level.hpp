// The alphabet in which byte-level BPE writes bytes. Internal to model.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace echoline::model {

// Every byte is one printable character: bytes that are printable in Latin-1 are themselves, the others, in order, the
// characters from U+0100 on.
void append_byte_level(std::string& out, unsigned char byte);
// The bytes of a text in that alphabet; absent if it has another character.
std::optional<std::string> from_byte_level(std::string_view written);

}  // namespace echoline::model
