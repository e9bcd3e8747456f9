// Measures how deep JSON nests, before a recursive parser or writer reads it. Private to data_plane/.
#pragma once
#include <cstddef>
#include <string_view>

namespace echoline::data_plane {

inline constexpr int kJsonDepthMax = 64;

// Brackets inside strings do not count.
inline bool nests_too_deep(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;  // skips the escaped character, which may be a quotation mark
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kJsonDepthMax) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

}  // namespace echoline::data_plane
