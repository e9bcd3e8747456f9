// Writes to a state on a device, exchanged with what is there. Internal to this folder.
#pragma once
#include <span>
#include <vector>

#include "delta/cuda/device.hpp"
#include "delta/cuda/leaf_hasher.hpp"
#include "delta/cuda/memory.hpp"
#include "delta/patch.hpp"

namespace echoline::delta::cuda {

using SortedWrites = std::vector<const TensorWrite*>;

// In the order of their place, those that write nothing left out; kInvalid when one is not sound or two overlap. Their
// positions are not looked at.
Result<SortedWrites> sorted_writes(std::span<const TensorWrite> writes, const StateView& tensors);

// Whether each leaf of each tensor is to be hashed.
using LeafFlags = std::vector<std::vector<std::uint8_t>>;
// Those whose digests are not known.
LeafFlags unknown_leaves(const StateView& tensors, const LeafDigests& known);
std::vector<LeafRef> flagged(const LeafFlags& flags);

// Gathers positions and values, which lie in many places of the host, in one block of device memory. Several threads
// fill one half of pinned memory while the other half travels.
class Upload {
 public:
  struct Place {  // in the block; multiples of 16
    std::uint64_t positions, values;
  };
  void clear();
  // What `write` refers to must live until send() returns.
  Place add(const TensorWrite& write);
  std::uint64_t bytes() const { return bytes_; }
  // Queues everything for `device`, which has room for bytes(). Uses the machine's marks, which are free while nothing
  // is extracted.
  Status send(const std::shared_ptr<Machine>& machine, std::byte* device, unsigned threads);
  // Whether the positions of write number `index` ascend; after send().
  bool ascending(std::size_t index) const { return sources_[2 * index].disorder == 0; }

 private:
  struct Source {
    std::uint64_t at, bytes;
    const std::byte* from;
    bool positions;
    std::uint8_t disorder = 0;
  };
  static void copy(Source& source, std::uint64_t begin, std::uint64_t end, std::byte* to);
  void fill(std::uint64_t begin, std::uint64_t end, std::byte* to);  // with a part of the block

  std::vector<Source> sources_;
  std::uint64_t bytes_ = 0;
  Buffer memory_{Machine::Place::kPinnedHost};
};

// The writes on the device, ready to be exchanged with the content of a state.
class Exchange {
 public:
  // Flags the leaves that the writes touch, and others near them. kInvalid when positions are not sound, kExhausted
  // when positions and values take more than options.apply_bytes_max.
  Status prepare(const std::shared_ptr<Machine>& machine, const DeviceOptions& options, const SortedWrites& writes,
                 const StateView& tensors, LeafFlags& leaves);
  // Done twice, everything is as before.
  Status start(Machine& machine) { return job_.chunk_count == 0 ? ok() : machine.run(job_); }

 private:
  void add(const TensorWrite& write, std::byte* target, const std::uint32_t* positions, std::byte* values);
  void add(const SwapPart& part);

  Buffer changes_{Machine::Place::kDevice};  // positions and values of each write
  Mirrored tables_;
  std::vector<SwapPart> parts_;
  std::vector<SwapChunk> chunks_;
  Upload upload_;
  SwapJob job_{};
};

}  // namespace echoline::delta::cuda
