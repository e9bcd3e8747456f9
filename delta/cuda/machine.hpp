// What the host side asks of a device: memory, and a queue of copies and kernels that runs in order and on its own, but
// for copies to the host, which run beside what is queued after them.
// cuda_machine.cpp does it with CUDA, the tests with the CPU. Internal to this folder.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "base/result.hpp"
#include "delta/cuda/kernels.hpp"

namespace echoline::delta::cuda {

// Used by one thread at a time; release() may be called by any, beside that one.
class Machine {
 public:
  enum class Place { kDevice, kPinnedHost };

  virtual ~Machine() = default;
  virtual std::string_view name() const = 0;

  // Memory at a multiple of 256; `bytes` > 0. kExhausted says what is free.
  virtual Result<std::byte*> allocate(Place place, std::uint64_t bytes) = 0;
  virtual void release(Place place, std::byte* memory) = 0;
  // kInvalid when the kernels cannot work on this memory.
  virtual Status check_address(const std::byte* memory, std::uint64_t bytes) const = 0;

  // These queue work; host memory must live and stay as it is until a wait for a later mark, or finish(). An error of
  // earlier work may appear in any later call.
  virtual Status copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes) = 0;
  // After what was queued before. What is queued afterwards does not wait for it.
  virtual Status copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes) = 0;
  virtual Status copy_within(std::byte* to, const std::byte* from, std::uint64_t bytes) = 0;
  virtual Status clear(std::byte* device, std::uint64_t bytes) = 0;
  virtual Status run(const ExtractJob& job) = 0;
  virtual Status run(const GatherJob& job) = 0;
  virtual Status run(const SwapJob& job) = 0;
  virtual Status run(const HashJob& job) = 0;

  // A mark stands behind what was queued until now; setting it again moves it.
  static constexpr unsigned kMarks = 2;
  virtual Status set_mark(unsigned mark) = 0;
  virtual Status wait_for(unsigned mark) = 0;
  virtual Status finish() = 0;  // waits for everything

  // Time the device spent in kernels and copies within it since the last call; after finish().
  virtual double take_busy_s() = 0;
};

// The CUDA device; kInvalid in a build without CUDA, kUnavailable when there is no such device.
Result<std::shared_ptr<Machine>> open_machine(int ordinal);

}  // namespace echoline::delta::cuda
