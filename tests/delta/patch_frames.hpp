// Repairs the checksums of damaged patches.
#pragma once
#include <cstring>
#include <vector>

#include "delta/digest.hpp"

namespace echoline::delta::test {

using Blob = std::vector<std::byte>;

// Corrects the checksums of all frames that can be found, so that damage reaches the parser behind them.
inline void fix_checksums(Blob& patch) {
  Blob sums;
  for (std::size_t at = 10; at + 13 <= patch.size();) {
    std::uint32_t length = 0;
    std::memcpy(&length, patch.data() + at + 1, 4);
    const std::size_t end = at + 5 + length;
    if (length > patch.size() || end + 8 > patch.size()) return;
    if (patch[at] == std::byte{'T'} && length >= 16)
      std::memcpy(patch.data() + end - 16, digest_bytes(sums).bytes.data(), 16);
    const Digest sum = digest_bytes(std::span(patch).subspan(at, end - at));
    std::memcpy(patch.data() + end, sum.bytes.data(), 8);
    sums.insert(sums.end(), sum.bytes.begin(), sum.bytes.begin() + 8);
    at = end + 8;
  }
}

}  // namespace echoline::delta::test
