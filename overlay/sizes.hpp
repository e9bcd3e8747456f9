// Sizes that follow from the policy's size: the largest publication, the stores of the nodes, and the load of links.
#pragma once
#include <algorithm>
#include <cmath>

#include "base/units.hpp"
#include "chains/broadcast_model.hpp"
#include "overlay/wire/frame.hpp"

namespace echoline::overlay {

// The largest publication: a full snapshot of `policy` bytes of tensors that do not compress at all. 1/32 and 1 MiB are
// a generous allowance for the codec's headers.
inline Bytes publication_bytes_max(Bytes policy) { return {policy.count + policy.count / 32 + (1u << 20)}; }

// The learner's memory for publications: a snapshot in transfer to late workers, and a newer one or the deltas after
// it.
inline Bytes learner_store_bytes(Bytes policy) {
  return {std::max<std::uint64_t>(1ull << 30, 2 * publication_bytes_max(policy).count)};
}

// Deltas are folded into one for a late worker only up to 1/kFoldShare of the policy's size, because folding copies
// them.
inline constexpr std::uint64_t kFoldShare = 8;

// A worker's memory for publications. With a disk: chunks not written yet. Without one: a snapshot and the deltas after
// it. The minimum also holds while the policy's size is not known (0).
inline Bytes worker_memory_bytes(Bytes policy, bool has_disk) {
  constexpr std::uint64_t kMin = 256ull << 20, kWithDisk = 64ull << 20;
  const std::uint64_t snapshot = publication_bytes_max(policy).count;
  if (has_disk) return {kWithDisk};
  return {policy.count == 0 ? kMin : snapshot + std::max(kMin, snapshot / 2)};
}

// Limit on arriving parts of publications that the worker's engine has not read yet. Further parts wait in the store.
inline constexpr Bytes kPartsUnreadMax{64ull << 20};

// A worker's disk for publications: snapshots, and deltas for later workers. Unlimited while the policy's size is not
// known (0).
inline Bytes worker_disk_bytes(Bytes policy) {
  if (policy.count == 0) return {1ull << 60};
  return {std::max<std::uint64_t>(4ull << 30, 3 * publication_bytes_max(policy).count)};
}

// The smallest chunk size at which the largest publication of a policy has at most kChunksMax chunks.
inline Bytes chunk_bytes_min(Bytes policy) {
  const std::uint64_t needed = (publication_bytes_max(policy).count + kChunksMax - 1) / kChunksMax;
  return {std::max<std::uint64_t>(kChunkBytesMin, needed)};
}

// The fraction that the network adds to every byte: 66 bytes of TCP, IP and Ethernet headers for every 1448, 22 of TLS
// for every 16 KiB, and acknowledgements. Without this allowance, a rate limit would exceed the link's capacity, and
// TCP instead of the class Uplink would choose the next receiver.
inline constexpr double kWireOverhead = 0.05;

// The bytes that a link carries for `bytes` of a publication in chunks of `chunk` bytes: the bytes, a head per chunk
// with its shortest proof, and the network's overhead. `chunk` must be positive (checked).
inline Bytes on_the_wire(Bytes bytes, Bytes chunk) {
  const std::uint64_t heads = chains::chunk_count(bytes, chunk) * (kFrameHeaderBytes + kChunkHeadFixedBytes);
  return {static_cast<std::uint64_t>(std::ceil(static_cast<double>(bytes.count + heads) * (1 + kWireOverhead)))};
}

}  // namespace echoline::overlay
