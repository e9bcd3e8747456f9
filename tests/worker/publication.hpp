// A publication as the overlay hands it to an engine, from its bytes.
#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "delta/tensor.hpp"
#include "overlay/types.hpp"

namespace echoline::worker {

inline overlay::Publication publication(std::uint64_t version, std::optional<std::uint64_t> base,
                                        std::vector<std::byte> payload, const delta::Digest& digest) {
  overlay::Publication p;
  p.version = Version{version};
  if (base) p.base = Version{*base};
  p.policy_digest = digest.bytes;
  p.payload = overlay::Payload({overlay::Slice(std::move(payload))});
  return p;
}

inline std::vector<std::byte> bytes_of(const overlay::Publication& p) {
  const overlay::Slice payload = *p.payload.bytes();
  return {payload.bytes().begin(), payload.bytes().end()};
}

}  // namespace echoline::worker
