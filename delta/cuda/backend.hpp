// The device operations that the host code uses: memory, and a queue of copies and kernels. The queue runs
// asynchronously and in order, except that copies to the host run beside later work. cuda_backend.cpp implements them
// with CUDA, the tests with the CPU. Internal to this folder.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "base/result.hpp"
#include "delta/cuda/kernels.hpp"

namespace echoline::delta::cuda {

// A GPU's memory and queue. Use from one thread at a time; release() may be called by any thread at any time.
class DeviceBackend {
 public:
  enum class MemoryKind { kDevice, kPinnedHost };

  virtual ~DeviceBackend() = default;
  virtual std::string_view name() const = 0;

  // Allocates memory, aligned to 256 bytes; `bytes` > 0. Fails with kExhausted, and states how much memory is free.
  virtual Result<std::byte*> allocate(MemoryKind kind, std::uint64_t bytes) = 0;
  virtual void release(MemoryKind kind, std::byte* memory) = 0;
  // kInvalid if the memory is not on this device, so that the kernels cannot work on it.
  virtual Status check_address(const std::byte* memory, std::uint64_t bytes) const = 0;

  // These calls queue work. Host memory must stay alive and unchanged until finish(), or wait_for() of a mark that was
  // set after the call, has returned. Any later call may return an error of earlier work.
  virtual Status copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes) = 0;
  // Runs after earlier work; later work does not wait for it.
  virtual Status copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes) = 0;
  virtual Status copy_within(std::byte* to, const std::byte* from, std::uint64_t bytes) = 0;
  virtual Status clear(std::byte* device, std::uint64_t bytes) = 0;
  virtual Status run(const ExtractJob& job) = 0;
  virtual Status run(const GatherJob& job) = 0;
  virtual Status run(const SwapJob& job) = 0;
  virtual Status run(const HashJob& job) = 0;

  // A mark is a position in the queue, after all work queued so far. Setting it again moves it.
  static constexpr unsigned kMarks = 2;
  virtual Status set_mark(unsigned mark) = 0;
  virtual Status wait_for(unsigned mark) = 0;
  virtual Status finish() = 0;  // waits for everything

  // Time that the device spent in kernels and internal copies since the last call; call after finish().
  virtual double take_busy_s() = 0;
};

// The CUDA device; kInvalid in a build without CUDA, kUnavailable if there is no such device.
Result<std::shared_ptr<DeviceBackend>> open_backend(int ordinal);

}  // namespace echoline::delta::cuda
