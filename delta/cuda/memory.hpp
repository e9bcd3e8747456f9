// Memory of a backend that is freed automatically. Internal to this folder.
#pragma once
#include <memory>

#include "delta/cuda/backend.hpp"
#include "delta/tensor.hpp"

namespace echoline::delta::cuda {

// The least multiple of `unit` that is at least `value`.
inline std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

inline Result<std::shared_ptr<std::byte>> allocate(const std::shared_ptr<DeviceBackend>& backend,
                                                   DeviceBackend::MemoryKind kind, std::uint64_t bytes) {
  ECHO_ASSIGN(std::byte* const memory, backend->allocate(kind, bytes));
  return std::shared_ptr<std::byte>(memory, [backend, kind](std::byte* released) { backend->release(kind, released); });
}

// Memory that is kept between calls. It grows by the need plus a quarter, and only while no queued work uses it.
class Buffer {
 public:
  explicit Buffer(DeviceBackend::MemoryKind kind) : kind_(kind) {}
  Status reserve(const std::shared_ptr<DeviceBackend>& backend, std::uint64_t bytes) {
    if (bytes <= bytes_) return ok();
    memory_.reset();
    bytes_ = 0;
    bytes += bytes / 4;
    ECHO_ASSIGN(memory_, allocate(backend, kind_, bytes));
    bytes_ = bytes;
    return ok();
  }
  std::byte* data() const { return memory_.get(); }

 private:
  DeviceBackend::MemoryKind kind_;
  std::shared_ptr<std::byte> memory_;
  std::uint64_t bytes_ = 0;
};

// Memory of equal size on the device and on the host.
struct Mirrored {
  Buffer device{DeviceBackend::MemoryKind::kDevice};
  Buffer host{DeviceBackend::MemoryKind::kPinnedHost};
  Status reserve(const std::shared_ptr<DeviceBackend>& backend, std::uint64_t bytes) {
    ECHO_TRY(device.reserve(backend, bytes));
    return host.reserve(backend, bytes);
  }
};

// A device tensor's memory, for writing.
inline std::byte* device_bytes(const TensorView& tensor) { return const_cast<std::byte*>(tensor.bytes.data()); }

}  // namespace echoline::delta::cuda
