// Comparison of two states on a device. Internal to this folder.
#pragma once
#include <array>
#include <span>
#include <vector>

#include "delta/cuda/device.hpp"
#include "delta/cuda/memory.hpp"

namespace echoline::delta::cuda {

// Part of a tensor that is extracted into one write; at most a segment.
struct Piece {
  std::size_t tensor;
  std::uint64_t first_byte;
  std::uint32_t bytes;
};

// One batch of pieces on its way through the device. Every tile of a piece reports where it put its changes, in the
// order in which tiles happen to finish. The host says where each belongs, and the device puts them there.
class BatchInFlight {
 public:
  explicit BatchInFlight(unsigned mark) : mark_(mark) {}

  // Room for pieces and tiles, and for `changes_bytes` of changes.
  Status reserve(const std::shared_ptr<Machine>& machine, std::size_t pieces_max, std::size_t tiles_max,
                 std::uint64_t changes_bytes);
  // Queues the comparison, which puts what it finds into `records`. The pieces must live until gather().
  Status compare(Machine& machine, const StateView& prev, const StateView& cur, std::span<const Piece> pieces,
                 std::span<std::byte> records);
  // Waits for it and queues what takes the changes to the host. The number of pieces for whose changes there was room,
  // from the first on; the others are to be compared again.
  Result<std::size_t> gather(Machine& machine, const StateView& tensors);
  // Waits for that. The changes of these pieces, those without any left out; until the next gather().
  Result<std::span<const ChangedPart>> collect(Machine& machine);

 private:
  const unsigned mark_;
  Mirrored tables_;  // segments; tiles; bytes used of the records; results; places
  Mirrored changes_;
  std::uint64_t changes_bytes_ = 0;
  std::uint64_t tiles_at_ = 0, used_at_ = 0, results_at_ = 0, places_at_ = 0;
  std::span<const Piece> pieces_;
  std::vector<std::uint32_t> tiles_;
  std::span<std::byte> records_;
  std::vector<ChangedPart> parts_;
};

class Extraction {
 public:
  // device_s is left to the caller.
  Result<ExtractStats> run(const std::shared_ptr<Machine>& machine, const DeviceOptions& options, const StateView& prev,
                           const StateView& cur, const ChangeSink& sink);

 private:
  Buffer records_{Machine::Place::kDevice};
  std::array<BatchInFlight, 2> batches_{BatchInFlight(0), BatchInFlight(1)};
};

}  // namespace echoline::delta::cuda
