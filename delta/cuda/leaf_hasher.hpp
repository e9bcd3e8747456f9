// Digests of leaves (64 KiB of a tensor, delta/digest.hpp) on a device. Internal to this folder.
#pragma once
#include <span>
#include <vector>

#include "delta/cuda/memory.hpp"
#include "delta/digest.hpp"

namespace echoline::delta::cuda {

struct LeafRef {
  std::size_t tensor;
  std::size_t leaf;
};

// prepare() and start() queue the work; call store_digests() after waiting for the queue.
class LeafHasher {
 public:
  // `tensors` are on the device.
  Status prepare(const std::shared_ptr<DeviceBackend>& backend, const StateView& tensors, std::vector<LeafRef> leaves);
  Status start(DeviceBackend& backend);
  // Stores the digests in `leaves`, by tensor and leaf. The digests of all leaves that were not hashed must be known.
  void store_digests(const StateView& tensors, LeafDigests& leaves) const;

  std::uint64_t bytes() const;  // of all hashed leaves

 private:
  std::vector<LeafRef> leaves_;
  Mirrored memory_;  // table, digests, content of short leaves; the members below point to the host's copy
  std::span<HashLeaf> table_;
  std::span<std::byte> digests_, shorts_;
  HashJob job_{};
};

}  // namespace echoline::delta::cuda
