// Writes to a state on a device, exchanged with what is there. Internal to this folder.
#pragma once
#include <array>
#include <span>
#include <vector>

#include "delta/cuda/leaf_hasher.hpp"
#include "delta/cuda/memory.hpp"
#include "delta/patch.hpp"

namespace echoline::delta::cuda {

using SortedWrites = std::vector<const TensorWrite*>;

// In the order of their place, those that write nothing left out; kInvalid when one is not sound or two overlap.
Result<SortedWrites> sorted_writes(std::span<const TensorWrite> writes, const StateView& tensors);

// Leaves whose digests are not known, or no longer after the writes.
std::vector<LeafRef> leaves_to_hash(const SortedWrites& writes, const StateView& tensors, const LeafDigests& known);

// Fills device memory front to back from two pinned blocks: one is filled while the other travels.
class Stager {
 public:
  // Uses the machine's marks, which are free while nothing is extracted.
  Status start(const std::shared_ptr<Machine>& machine);
  // What follows goes to `device`, a multiple of 16.
  Status go_to(std::byte* device);
  Status put(const void* from, std::uint64_t bytes);
  Status pad();   // until the next multiple of 16
  Status send();  // what was put so far

 private:
  Machine* machine_ = nullptr;
  std::byte* device_ = nullptr;
  std::array<Buffer, 2> blocks_{Buffer(Machine::Place::kPinnedHost), Buffer(Machine::Place::kPinnedHost)};
  std::array<bool, 2> travelling_{};
  std::uint64_t filled_ = 0;
  unsigned current_ = 0;
};

// The writes on the device, ready to be exchanged with the content of a state.
class Exchange {
 public:
  // kExhausted when positions and values take more than `bytes_max`.
  Status prepare(const std::shared_ptr<Machine>& machine, const SortedWrites& writes, const StateView& tensors,
                 std::uint64_t bytes_max);
  // Done twice, everything is as before.
  Status start(Machine& machine) { return job_.chunk_count == 0 ? ok() : machine.run(job_); }

 private:
  void add(const TensorWrite& write, std::byte* target, const std::uint32_t* positions, std::byte* values);
  void add(const SwapPart& part);

  Buffer changes_{Machine::Place::kDevice};  // positions and values of each write
  Buffer tables_{Machine::Place::kDevice};
  std::vector<SwapPart> parts_;
  std::vector<SwapChunk> chunks_;
  Stager stager_;
  SwapJob job_{};
};

}  // namespace echoline::delta::cuda
