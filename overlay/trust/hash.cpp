// BLAKE3 by its C library. Called for chunks, state files and fingerprints.
#include "overlay/trust/hash.hpp"

#include <blake3.h>
#include <fmt/format.h>

#include <new>

namespace echoline::overlay::trust {

Hash blake3(std::span<const std::byte> bytes) { return Hasher().update(bytes).finish(); }

Hasher::Hasher() {
  static_assert(sizeof(blake3_hasher) <= kStateBytesMax && alignof(blake3_hasher) <= 8);
  blake3_hasher_init(new (state_.data()) blake3_hasher);
}

Hasher& Hasher::update(std::span<const std::byte> bytes) {
  blake3_hasher_update(reinterpret_cast<blake3_hasher*>(state_.data()), bytes.data(), bytes.size());
  return *this;
}

Hash Hasher::finish() const {
  Hash hash;
  blake3_hasher_finalize(reinterpret_cast<const blake3_hasher*>(state_.data()),
                         reinterpret_cast<std::uint8_t*>(hash.data()), hash.size());
  return hash;
}

std::string to_hex(const Hash& hash) {
  std::string text;
  for (const std::byte byte : hash) text += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  return text;
}

}  // namespace echoline::overlay::trust
