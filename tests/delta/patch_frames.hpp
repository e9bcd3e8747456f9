// Repairs the checksums of damaged patches.
#pragma once
#include <cstring>
#include <vector>

#include "delta/digest.hpp"

namespace echoline::delta::test {

using Blob = std::vector<std::byte>;

// Corrects the checksums of all frames that can be found, so that damage reaches the parser behind them.
inline void fix_checksums(Blob& patch) {
  constexpr std::size_t kMagicBytes = 10, kHeadBytes = 5, kChecksumBytes = 8, kDigestBytes = 16;
  Blob checksums;
  for (std::size_t frame = kMagicBytes; frame + kHeadBytes + kChecksumBytes <= patch.size();) {
    std::uint32_t body_bytes = 0;
    std::memcpy(&body_bytes, patch.data() + frame + 1, 4);
    const std::size_t end = frame + kHeadBytes + body_bytes;
    if (body_bytes > patch.size() || end + kChecksumBytes > patch.size()) return;
    // The trailer ends with the digest of all checksums.
    if (patch[frame] == std::byte{'T'} && body_bytes >= kDigestBytes)
      std::memcpy(patch.data() + end - kDigestBytes, digest_bytes(checksums).bytes.data(), kDigestBytes);
    const Digest sum = digest_bytes(std::span(patch).subspan(frame, end - frame));
    std::memcpy(patch.data() + end, sum.bytes.data(), kChecksumBytes);
    checksums.insert(checksums.end(), sum.bytes.begin(), sum.bytes.begin() + kChecksumBytes);
    frame = end + kChecksumBytes;
  }
}

}  // namespace echoline::delta::test
