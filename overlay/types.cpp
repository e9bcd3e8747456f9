#include "overlay/types.hpp"

namespace echoline::overlay {

std::string to_text(const Endpoint& endpoint) { return fmt::format("{}:{}", endpoint.host, endpoint.port); }

std::string to_hex(const Digest& digest) {
  std::string text;
  text.reserve(2 * digest.size());
  for (const std::byte b : digest) {
    text += "0123456789abcdef"[std::to_integer<unsigned>(b) >> 4];
    text += "0123456789abcdef"[std::to_integer<unsigned>(b) & 15];
  }
  return text;
}

}  // namespace echoline::overlay
