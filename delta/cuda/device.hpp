// Weights in a CUDA device's memory: finds the elements that differ between two versions, and applies a delta in place.
// Both give exactly the CPU's results (patch.hpp), and only changes are copied between host and device:
//   learner: the device holds prev and cur; the host holds two copies of prev, A and B
//            1. extract(prev, cur, sink): the sink writes the changes to B, which then equals cur
//            2. write_delta(A, B) encodes the difference
//            3. copy(cur, prev) on the device
//   worker:  resolve_delta() against a host copy gives the writes, apply() puts them on the device
// Compiled in every build; without a CUDA compiler Device::open() returns an error.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "delta/patch.hpp"

namespace echoline::delta::cuda {

class DeviceBackend;  // a GPU's memory and queue (backend.hpp)

struct DeviceOptions {
  int ordinal = 0;                         // number of the CUDA device
  std::uint64_t batch_bytes = 128u << 20;  // bytes of a state that extraction compares at a time
  // Size of each of extraction's buffers for changes: three in device memory and two in pinned host memory. If a
  // batch's changes do not fit, the batch is compared again in smaller parts. The buffers always have room for the
  // changes of one segment (8 MiB of a tensor).
  std::uint64_t changes_bytes = 64u << 20;
  // Device memory for positions and values during apply().
  std::uint64_t apply_bytes_max = 16ull << 30;
  unsigned threads = 0;  // host threads for checks and copies; 0: all
};

// A state on a device. Moving the object does not move its memory.
class DeviceState {
 public:
  DeviceState(DeviceState&&) = default;
  DeviceState& operator=(DeviceState&&) = default;
  DeviceState(const DeviceState&) = delete;
  DeviceState& operator=(const DeviceState&) = delete;

  // Names, types and shapes in canonical order; `bytes` are empty.
  StateView layout() const;
  std::size_t size() const { return tensors_.size(); }
  std::uint64_t total_bytes() const { return total_bytes_; }
  // The address on the device, for other kernels. Call forget_leaf_digests() after writing there, because the digests
  // of leaves (64 KiB of a tensor each, the leaves of the state's hash tree) are kept.
  std::byte* address(std::size_t index) const;
  void forget_leaf_digests();

 private:
  friend class Device;
  DeviceState() = default;
  std::shared_ptr<DeviceBackend> backend_;
  std::shared_ptr<std::byte> memory_;  // null: attached memory, not owned
  StateView tensors_;                  // `bytes` are on the device
  std::uint64_t total_bytes_ = 0;
  LeafDigests leaf_digests_;  // empty for tensors with unknown digests
  bool torn_ = false;         // partly changed, because the device failed during a change
};

// The changed elements of a part of a tensor.
struct ChangedPart {
  std::size_t tensor = 0;        // in canonical order
  std::uint64_t first_byte = 0;  // of the part within the tensor
  std::uint64_t byte_count = 0;  // of the part
  std::size_t element_bytes = 0;
  std::span<const std::uint32_t> positions;  // elements of the part, ascending
  std::span<const std::byte> values;         // their new values
};
// Receives parts in ascending order. Each is a segment: 8 MiB of a tensor; the last of a tensor may be shorter. The
// spans are valid during the call.
using ChangeSink = std::function<Status(std::span<const ChangedPart>)>;

struct ExtractStats {
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;
  double device_s = 0;  // in kernels
};

struct ApplyStats {
  std::uint64_t changed = 0;       // elements written
  std::uint64_t hashed_bytes = 0;  // in verified leaves
  double device_s = 0;             // in kernels
};

// A CUDA device with its own queue. Calls are synchronous, and expect that other work on the memory is complete
// (cudaDeviceSynchronize). Use from one thread at a time.
//
// Errors: kInvalid for arguments, kExhausted for memory, kUnavailable if the device or its driver fails. A state that
// was being changed is then torn: later calls fail until assign() or copy() fills it again.
class Device {
 public:
  static Result<Device> open(const DeviceOptions& options = {});
  // For open(), and for tests with another backend.
  Device(std::shared_ptr<DeviceBackend> backend, const DeviceOptions& options);
  Device(Device&&) noexcept;
  Device& operator=(Device&&) noexcept;
  ~Device();

  std::string_view name() const;

  // Allocates device memory and copies the state to it.
  Result<DeviceState> upload(const StateView& state);
  // Uses memory owned elsewhere, which must outlive the result: `bytes` are device addresses, multiples of 16.
  Result<DeviceState> attach(const StateView& state);
  // Replaces all content by that of a host state with the same tensors.
  Status assign(DeviceState& to, const StateView& from);
  // Replaces all content by that of another state on the device. Returns the seconds that the copy took there.
  Result<double> copy(const DeviceState& from, DeviceState& to);
  Result<OwnedState> download(const DeviceState& state);
  // Copies into an existing state with the same tensors.
  Status download(const DeviceState& state, OwnedState& target);
  // Returns a host state in pinned memory, which is copied several times as fast, or in ordinary memory if the system
  // grants none. Pinned memory is slow to allocate, so reuse the state. It may outlive this object.
  Result<OwnedState> pinned_like(const StateView& like);

  // Returns the digest that digest_state() would return for the content. Reuses known digests of unchanged leaves.
  Result<Digest> digest(DeviceState& state);

  // Passes the parts with differing elements to `sink`, with the values of `cur`, in ascending order, several per call.
  // If `sink` fails, stops and returns its error.
  Result<ExtractStats> extract(const DeviceState& prev, const DeviceState& cur, const ChangeSink& sink);

  // Applies `writes`, which name no element twice, and verifies that the state then has the digest `result` (kCorrupt
  // otherwise). On failure the content is restored, unless the device itself failed.
  Result<ApplyStats> apply(std::span<const TensorWrite> writes, const Digest& result, DeviceState& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Tells whether open() would succeed, and if not, why.
Status device_available();

}  // namespace echoline::delta::cuda
