// The characters of names that become parts of paths and ids.
#pragma once
#include <algorithm>
#include <string_view>

namespace echoline {

// Whether the text has only letters, digits, '-', '_' and '.'. True for an empty text.
inline bool has_only_name_characters(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  });
}

}  // namespace echoline
