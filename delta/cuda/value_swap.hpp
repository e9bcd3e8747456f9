// Swaps the values of writes with a state's content on a device. A second swap restores the state, if the verification
// of the result fails. Internal to this folder.
#pragma once
#include <span>
#include <vector>

#include "delta/cuda/device.hpp"
#include "delta/cuda/leaf_hasher.hpp"
#include "delta/cuda/memory.hpp"
#include "delta/patch.hpp"

namespace echoline::delta::cuda {

using SortedWrites = std::vector<const TensorWrite*>;

// Sorts writes by place and drops empty ones; kInvalid if one is invalid or two overlap. Does not check positions.
Result<SortedWrites> sorted_writes(std::span<const TensorWrite> writes, const StateView& tensors);

// For each leaf (64 KiB, delta/digest.hpp) of each tensor, 1 if it must be hashed.
using LeafFlags = std::vector<std::vector<std::uint8_t>>;
// Flags the leaves of tensors whose digests are not known.
LeafFlags unknown_leaves(const StateView& tensors, const LeafDigests& known);
// The leaves whose flag is set.
std::vector<LeafRef> flagged_leaves(const LeafFlags& flags);

// Copies positions and values from many places of the host into one block of device memory. Several threads fill one
// half of a pinned buffer while the other half is copied.
class Upload {
 public:
  struct Place {  // offsets in the block, multiples of 16
    std::uint64_t positions, values;
  };
  void clear();
  // The memory of `write` must live until send() returns.
  Place add(const TensorWrite& write);
  std::uint64_t bytes() const { return bytes_; }
  // Queues the copy to `device`, which has room for bytes(). Uses the backend's marks, which are free unless an
  // extraction is running.
  Status send(const std::shared_ptr<DeviceBackend>& backend, std::byte* device, unsigned threads);
  // Whether the positions of write number `index` ascend; valid after send().
  bool is_ascending(std::size_t index) const { return sources_[2 * index].is_unordered == 0; }

 private:
  // The positions or the values of a write. A write has two sources, its positions first.
  struct Source {
    std::uint64_t offset, bytes;  // in the block
    const std::byte* data;
    bool is_positions;
    std::uint8_t is_unordered = 0;  // positions that do not ascend; set by any thread
  };
  static void copy(Source& source, std::uint64_t begin, std::uint64_t end, std::byte* to);
  void fill(std::uint64_t begin, std::uint64_t end, std::byte* to);  // fills a part of the block

  std::vector<Source> sources_;
  std::uint64_t bytes_ = 0;
  Buffer memory_{DeviceBackend::MemoryKind::kPinnedHost};
};

// The writes on the device, ready to be swapped with a state's content.
class ValueSwap {
 public:
  // Flags the leaves that the writes touch; for a write with many changes, all leaves of its part. kInvalid for invalid
  // positions, kExhausted if positions and values need more than options.apply_bytes_max.
  Status prepare(const std::shared_ptr<DeviceBackend>& backend, const DeviceOptions& options,
                 const SortedWrites& writes, const StateView& tensors, LeafFlags& leaves);
  // Queues the swap; a second one restores the old content.
  Status start(DeviceBackend& backend) { return job_.chunk_count == 0 ? ok() : backend.run(job_); }

 private:
  void add(const TensorWrite& write, std::byte* target, const std::uint32_t* positions, std::byte* values);
  void add(const SwapPart& part);

  Buffer changes_{DeviceBackend::MemoryKind::kDevice};  // positions and values of each write
  Mirrored tables_;
  std::vector<SwapPart> parts_;
  std::vector<SwapChunk> chunks_;
  Upload upload_;
  SwapJob job_{};
};

}  // namespace echoline::delta::cuda
