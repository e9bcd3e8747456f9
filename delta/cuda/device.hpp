// Weights in the memory of a CUDA device: which elements changed between two versions of them, and a delta applied to
// them in place. Both give bit for bit what the CPU gives (patch.hpp), and only the changes cross to the host or back:
//   learner: extract(prev, cur, sink) feeds a host mirror of prev, write_delta() encodes prev and mirror; copy(cur,
//   prev) worker:  resolve_delta() against a host mirror gives the writes, apply() puts them on the device
// Compiled in every build; without a CUDA compiler Device::open() says so.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "delta/patch.hpp"

namespace echoline::delta::cuda {

class Machine;

struct DeviceOptions {
  int ordinal = 0;
  // Extraction works on so many bytes of a state at a time. It has three buffers for the changes found in device memory
  // and two in pinned host memory, of at least what a segment takes. More changes than fit are compared again, less at
  // a time.
  std::uint64_t batch_bytes = 128u << 20;
  std::uint64_t records_bytes = 64u << 20;
  // Device memory that application may take for positions and values.
  std::uint64_t apply_bytes_max = 16ull << 30;
  unsigned threads = 0;  // of the host, for what it checks and copies; 0: as many as it has
};

// A state on a device. Moving it does not move its memory.
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
  // On the device, for kernels of others. Whoever writes there calls memory_changed() afterwards, or digests are wrong.
  std::byte* address(std::size_t index) const;
  void memory_changed();

 private:
  friend class Device;
  DeviceState() = default;
  std::shared_ptr<Machine> machine_;
  std::shared_ptr<std::byte> memory_;  // null when it belongs to somebody else
  StateView tensors_;                  // `bytes` are on the device
  std::uint64_t total_bytes_ = 0;
  std::vector<std::vector<Digest>> leaves_;  // of each tensor, where they are known
  bool torn_ = false;                        // the device failed in the middle of a change
};

// Elements of a part of a tensor that have changed.
struct ChangedPart {
  std::size_t tensor = 0;        // in canonical order
  std::uint64_t first_byte = 0;  // of the part within the tensor
  std::uint64_t byte_count = 0;  // of the part
  std::size_t element_bytes = 0;
  std::span<const std::uint32_t> positions;  // elements of the part, ascending
  std::span<const std::byte> values;         // their new values
};
// Parts in ascending order, each a segment (8 MiB of a tensor) or what there is of one. What the spans refer to lives
// until this returns.
using ChangeSink = std::function<Status(std::span<const ChangedPart>)>;

struct ExtractStats {
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;
  double device_s = 0;  // in kernels
};

struct ApplyStats {
  std::uint64_t changed = 0;       // elements written
  std::uint64_t hashed_bytes = 0;  // of the leaves that were verified
  double device_s = 0;             // in kernels
};

// A CUDA device with a queue of its own. Every call is complete when it returns, and expects that what others did to
// the memory is complete as well (cudaDeviceSynchronize). For one thread at a time.
//
// Errors: kInvalid for arguments, kExhausted for memory, kUnavailable when the device or its driver fails; a state that
// was being changed then is torn, which every later call with it says until assign() or copy() has filled it again.
class Device {
 public:
  static Result<Device> open(const DeviceOptions& options = {});
  Device(std::shared_ptr<Machine> machine, const DeviceOptions& options);
  Device(Device&&) noexcept;
  Device& operator=(Device&&) noexcept;
  ~Device();

  std::string_view name() const;

  // Allocates and fills.
  Result<DeviceState> upload(const StateView& state);
  // Takes the memory of others as it is: `bytes` are addresses on the device, multiples of 16. It must outlive the
  // result.
  Result<DeviceState> attach(const StateView& state);
  // Replaces all content; same tensors.
  Status assign(DeviceState& to, const StateView& from);
  // The same on the device. Gives the seconds it took there.
  Result<double> copy(const DeviceState& from, DeviceState& to);
  Result<OwnedState> download(const DeviceState& state);
  // Into a state of the same tensors.
  Status download(const DeviceState& state, OwnedState& into);
  // A state on the host in pinned memory, which travels several times as fast, or in ordinary memory where the system
  // gives none. Making it takes long; use it again. It may outlive this.
  Result<OwnedState> pinned_like(const StateView& like);

  // digest_state() of the content. What is known and cannot have changed is not hashed again.
  Result<Digest> digest(DeviceState& state);

  // Gives `sink` the parts in which elements differ, with the values in `cur`, in ascending order, some at a time; an
  // error of `sink` ends it.
  Result<ExtractStats> extract(const DeviceState& prev, const DeviceState& cur, const ChangeSink& sink);

  // Applies `writes`, no element twice, and proves that the state then has the digest `result`. On any failure the
  // content is as before, unless the device itself failed. kCorrupt: it has another digest.
  Result<ApplyStats> apply(std::span<const TensorWrite> writes, const Digest& result, DeviceState& state);

 private:
  struct Work;
  std::unique_ptr<Work> work_;
};

// Whether open() would succeed, and if not, why.
Status device_available();

}  // namespace echoline::delta::cuda
