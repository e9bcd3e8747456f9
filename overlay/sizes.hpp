// What follows from the size of the policy: how large a publication can become, what nodes must have room for, and what
// links carry.
#pragma once
#include <algorithm>
#include <cmath>

#include "base/units.hpp"
#include "chains/broadcast_model.hpp"
#include "overlay/wire/frame.hpp"

namespace echoline::overlay {

// The largest publication: a snapshot of `policy` bytes of tensors of which nothing could be saved.
inline Bytes publication_bytes_max(Bytes policy) { return {policy.count + policy.count / 32 + (1u << 20)}; }

// What a learner keeps in memory: a snapshot that late workers are being sent and a newer one, or the deltas after it.
inline Bytes learner_store_bytes(Bytes policy) {
  return {std::max<std::uint64_t>(1ull << 30, 2 * publication_bytes_max(policy).count)};
}

// Deltas that are folded into one for a late worker have at most this part of the policy's size, because folding copies
// them.
inline constexpr std::uint64_t kFoldShare = 8;

// What a worker keeps in memory: with a disk what has not been written yet; without one a snapshot and what follows it.
inline Bytes worker_memory_bytes(Bytes policy, bool disk) {
  constexpr std::uint64_t kLeast = 256ull << 20;
  const std::uint64_t most = publication_bytes_max(policy).count;
  return {disk || policy.count == 0 ? kLeast : most + std::max(kLeast, most / 2)};
}

// Parts of publications that arrive, on their way to a worker's engine. What it cannot follow waits where publications
// are kept.
inline constexpr Bytes kPartsUnreadMax{64ull << 20};

// What a worker keeps on its disk: snapshots, and deltas for those who come later. Whatever is there, until it has
// heard how large the policy is.
inline Bytes worker_disk_bytes(Bytes policy) {
  if (policy.count == 0) return {1ull << 60};
  return {std::max<std::uint64_t>(4ull << 30, 3 * publication_bytes_max(policy).count)};
}

// The least chunk in which such a policy can be cut.
inline Bytes chunk_bytes_min(Bytes policy) {
  const std::uint64_t least = (publication_bytes_max(policy).count + kChunksMax - 1) / kChunksMax;
  return {std::max<std::uint64_t>(kChunkBytesMin, least)};
}

// What the network adds to every byte: 66 bytes of TCP, IP and Ethernet headers for every 1448, 22 of TLS for every 16
// KiB, and acknowledgements. Without it the limit would be above what the link carries, and TCP would decide who is
// served, instead of the uplink.
inline constexpr double kWireOverhead = 0.05;

// What `bytes` of a publication, in chunks of `chunk` bytes, take of a link: every chunk has a head, whose proof is
// counted at its shortest, and the network adds its part. `chunk` must be positive (checked).
inline Bytes on_the_wire(Bytes bytes, Bytes chunk) {
  const std::uint64_t heads = chains::chunk_count(bytes, chunk) * (kFrameHeaderBytes + kChunkHeadFixedBytes);
  return {static_cast<std::uint64_t>(std::ceil(static_cast<double>(bytes.count + heads) * (1 + kWireOverhead)))};
}

}  // namespace echoline::overlay
