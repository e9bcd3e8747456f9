// BLAKE3: the hash of all data that crosses untrusted machines.
#pragma once
#include <array>
#include <cstddef>
#include <span>
#include <string>

namespace echoline::overlay::trust {

using Hash = std::array<std::byte, 32>;

// Any thread. Uses AVX-512, AVX2 or SSE if the processor has them.
Hash blake3(std::span<const std::byte> bytes);

// The same hash over bytes that arrive in pieces. An object belongs to one thread; a copy continues independently.
class Hasher {
 public:
  Hasher();
  Hasher& update(std::span<const std::byte> bytes);
  // The hash of everything so far; more may follow.
  Hash finish() const;

 private:
  static constexpr std::size_t kStateBytesMax = 2048;
  alignas(8) std::array<std::byte, kStateBytesMax> state_;
};

// Lowercase hexadecimal, 64 characters.
std::string to_hex(const Hash& hash);

}  // namespace echoline::overlay::trust
