// Compares two states on a device. Internal to this folder.
#pragma once
#include <array>
#include <span>
#include <vector>

#include "delta/cuda/device.hpp"
#include "delta/cuda/memory.hpp"

namespace echoline::delta::cuda {

// A segment: a part of a tensor of at most 8 MiB (delta/segment.hpp). The device compares it in tiles (kernels.hpp).
struct TensorSegment {
  std::size_t tensor;
  std::uint64_t first_byte;
  std::uint32_t bytes;
};

// One batch of segments in the device's queue. Each tile of a segment stores its changes (a record) in the order in
// which tiles finish. The host computes the records' final places, and the device moves them there.
class BatchInFlight {
 public:
  explicit BatchInFlight(unsigned mark) : mark_(mark) {}

  // Allocates room for segments and tiles, and for `changes_bytes` of changes.
  Status reserve(const std::shared_ptr<DeviceBackend>& backend, std::size_t segments_max, std::size_t tiles_max,
                 std::uint64_t changes_bytes);
  // Queues the comparison, which stores its results in `records`. The segments must live until gather()
  // returns.
  Status compare(DeviceBackend& backend, const StateView& prev, const StateView& cur,
                 std::span<const TensorSegment> segments, std::span<std::byte> records);
  // Waits for the comparison and queues the copy of the changes to the host. Returns the number of segments, from the
  // first on, whose changes had room; the others must be compared again.
  Result<std::size_t> gather(DeviceBackend& backend, const StateView& tensors);
  // Waits for the copy. Returns the changes of the gathered segments, without empty ones; valid until the next
  // gather().
  Result<std::span<const ChangedPart>> collect(DeviceBackend& backend);

 private:
  const unsigned mark_;  // number of the backend's mark that this batch uses
  Mirrored tables_;      // segments; tiles; bytes used of the records; results; places
  Mirrored changes_;     // of the gathered segments
  std::uint64_t changes_bytes_ = 0;
  std::uint64_t tiles_offset_ = 0, used_offset_ = 0, results_offset_ = 0, places_offset_ = 0;  // in `tables_`
  std::span<const TensorSegment> segments_;
  std::vector<std::uint32_t> tiles_;  // as in ExtractJob
  std::span<std::byte> records_;      // of the caller, shared by the batches
  std::vector<ChangedPart> parts_;
};

// Compares two states batch by batch. While the changes of one batch are copied to the host, the next one is compared.
class Extraction {
 public:
  // The caller sets device_s.
  Result<ExtractStats> run(const std::shared_ptr<DeviceBackend>& backend, const DeviceOptions& options,
                           const StateView& prev, const StateView& cur, const ChangeSink& sink);

 private:
  Buffer records_{DeviceBackend::MemoryKind::kDevice};
  std::array<BatchInFlight, 2> batches_{BatchInFlight(/*mark=*/0), BatchInFlight(/*mark=*/1)};
};

}  // namespace echoline::delta::cuda
