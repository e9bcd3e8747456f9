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
// order in which tiles happen to finish; the host puts them in order.
class BatchInFlight {
 public:
  explicit BatchInFlight(unsigned mark) : mark_(mark) {}

  Status reserve(const std::shared_ptr<Machine>& machine, std::size_t pieces_max, std::size_t tiles_max,
                 std::uint64_t records_bytes_max);
  // Queues the comparison. The pieces must live until collect().
  Status start(Machine& machine, const StateView& prev, const StateView& cur, std::span<const Piece> pieces);
  // Waits for it. The writes of all pieces, those without changes left out.
  Result<std::vector<TensorWrite>> collect(Machine& machine, const StateView& tensors);

 private:
  // Places of the tables, the same on both sides.
  struct Places {
    std::uint64_t tiles = 0, used = 0, results = 0, records = 0, end = 0;
  };
  // The changes of a tile among those of its piece.
  struct Run {
    std::uint64_t first = 0, count = 0;
  };
  Status run(Machine& machine, const std::vector<std::uint32_t>& tiles);
  // Copies what the device found in `tiles` to its place in `writes`; gives the tiles for which it had no room.
  Result<std::vector<std::size_t>> take_records(Machine& machine, const std::vector<std::size_t>& tiles,
                                                const std::vector<Run>& runs, std::vector<TensorWrite>& writes);
  const TileResult& result(std::size_t index) const;

  const unsigned mark_;
  Mirrored memory_;  // segments; tiles; bytes used of the records; results; records
  Places at_;
  std::span<const Piece> pieces_;
  std::vector<std::uint32_t> tiles_;
};

class Extraction {
 public:
  // device_s is left to the caller.
  Result<ExtractStats> run(const std::shared_ptr<Machine>& machine, const DeviceOptions& options, const StateView& prev,
                           const StateView& cur, const WriteSink& sink);

 private:
  std::array<BatchInFlight, 2> batches_{BatchInFlight(0), BatchInFlight(1)};
};

}  // namespace echoline::delta::cuda
