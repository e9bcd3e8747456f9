// Writes to a state on a device, exchanged with what is there. Internal to this folder.
#pragma once
#include <deque>
#include <mutex>
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

// Gathers what lies in many places of the host in one block of device memory. Several threads fill pinned memory, from
// where it travels.
class Upload {
 public:
  void clear();
  // Returns the place of `bytes` bytes in the block, a multiple of 16. They must live until the block has travelled.
  std::uint64_t add(const void* from, std::uint64_t bytes);
  std::uint64_t bytes() const { return bytes_; }

  // Uses the machine's marks, which are free while nothing is extracted. `device` has room for bytes().
  Status start(const std::shared_ptr<Machine>& machine, std::byte* device);
  std::size_t pieces() const;
  Status send(std::size_t piece);  // of any thread

 private:
  struct Source {
    std::uint64_t at, bytes;
    const std::byte* from;
  };
  Result<unsigned> free_slot();

  std::vector<Source> sources_;
  std::uint64_t bytes_ = 0;
  Buffer memory_{Machine::Place::kPinnedHost};  // slots, of a piece each
  std::byte* device_ = nullptr;
  std::mutex mutex_;  // guards the machine and all below
  std::shared_ptr<Machine> machine_;
  unsigned unused_ = 0;              // slots that have not been filled yet
  std::deque<unsigned> travelling_;  // slots, the oldest first
};

// The writes on the device, ready to be exchanged with the content of a state.
class Exchange {
 public:
  // Flags the leaves that the writes touch. kInvalid when positions are not sound, kExhausted when positions and values
  // take more than options.apply_bytes_max.
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
