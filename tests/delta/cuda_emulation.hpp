// A device emulated on the CPU. It runs the device code of delta/cuda/kernels.hpp with loops instead of threads, so
// that this code and its callers are tested without a GPU. It does not show that the code is right under real
// concurrency, or how fast it is.
#pragma once
#include <array>
#include <cstdlib>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "delta/cuda/backend.hpp"
#include "delta/cuda/kernels.hpp"

namespace echoline::delta::cuda::test {

// Policies of kernels.hpp.
class LoopBlock {
 public:
  template <class T>
  using Local = std::array<T, kBlockThreads>;

  ExtractShared& shared() { return shared_; }

  template <class F>
  void each(F&& f) {
    for (unsigned thread = 0; thread < kBlockThreads; ++thread) f(thread);
  }

  template <class F>
  void scan_warps(F&& value) {
    for (unsigned thread = 0; thread < kBlockThreads; ++thread)
      if (thread % kWarpThreads != 0) value(thread) += value(thread - 1);
  }

  std::uint64_t atomic_add(unsigned long long* to, std::uint64_t value) { return std::exchange(*to, *to + value); }

 private:
  ExtractShared shared_;
};

class LoopWarp {
 public:
  template <class T>
  using Local = std::array<T, kWarpThreads>;

  template <class F>
  void each(F&& f) {
    for (unsigned thread = 0; thread < kWarpThreads; ++thread) f(thread);
  }

  template <unsigned kFirst, unsigned kLast, class F>
  void sum(F&& value) {
    constexpr unsigned kBits = 2 * kLast - kFirst;
    std::array<Pair, kWarpThreads> sums{};
    for (unsigned thread = 0; thread < kWarpThreads; ++thread) {
      sums[thread & ~kBits].a += value(thread).a;
      sums[thread & ~kBits].b += value(thread).b;
    }
    for (unsigned thread = 0; thread < kWarpThreads; ++thread) value(thread) = sums[thread & ~kBits];
  }
};

// Runs queued work only when a caller waits for it, and the blocks of a kernel in random order. Runs copies to the host
// at random times: as late as a device may, or earlier than work that was queued ahead of them.
class EmulatedBackend final : public DeviceBackend {
 public:
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

  explicit EmulatedBackend(std::uint64_t seed) : random_(seed) {}
  ~EmulatedBackend() override;

  std::string_view name() const override { return "emulated device"; }
  Result<std::byte*> allocate(MemoryKind kind, std::uint64_t bytes) override;
  void release(MemoryKind kind, std::byte* memory) override;
  Status check_address(const std::byte* memory, std::uint64_t bytes) const override;
  Status copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes) override;
  Status copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes) override;
  Status copy_within(std::byte* to, const std::byte* from, std::uint64_t bytes) override;
  Status clear(std::byte* device, std::uint64_t bytes) override;
  Status run(const ExtractJob& job) override;
  Status run(const GatherJob& job) override;
  Status run(const SwapJob& job) override;
  Status run(const HashJob& job) override;
  Status set_mark(unsigned mark) override;
  Status wait_for(unsigned mark) override;
  Status finish() override;
  double take_busy_s() override { return 0; }

  // After `calls` more calls, the next `count` calls fail without an effect.
  void fail_after(std::uint64_t calls, std::uint64_t count) {
    calls_until_failure_ = calls;
    failures_left_ = count;
  }
  void stop_failing() { calls_until_failure_ = kNever; }
  // Makes memory that another owner allocated count as device memory.
  void adopt(const void* memory, std::uint64_t bytes) { adopted_[static_cast<const std::byte*>(memory)] = bytes; }
  // Bytes left for allocations on the host and the device together.
  void limit_memory(std::uint64_t bytes) { bytes_left_ = bytes; }
  std::size_t blocks_allocated() const { return blocks_.size(); }
  unsigned kernels_run() const { return kernels_run_; }

 private:
  Status count_call();  // fails if fail_after() was called for this call
  Status enqueue(std::function<void()> work);
  // A position in both queues: the number of entries before it since the start.
  struct Point {
    std::uint64_t work = 0, copies_out = 0;
  };
  Point now() const { return {work_done_ + queue_.size(), copies_done_ + copies_out_.size()}; }
  // Run what is queued before `end` or `point`, and run_until() perhaps some work after it.
  void run_queue_until(std::uint64_t end);
  void run_until(const Point& point);
  bool is_device(const std::byte* memory, std::uint64_t bytes) const;
  std::vector<std::uint32_t> random_order(std::uint32_t count);

  Random random_;
  std::map<const std::byte*, std::pair<MemoryKind, std::uint64_t>> blocks_;
  std::map<const std::byte*, std::uint64_t> adopted_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t work_done_ = 0;  // entries of `queue_` done since the start
  struct CopyOut {
    std::uint64_t after_work;  // number of entries of `queue_` that come before
    std::function<void()> copy;
  };
  std::deque<CopyOut> copies_out_;
  std::uint64_t copies_done_ = 0;  // copies done since the start
  std::array<Point, kMarks> marks_{};
  std::uint64_t calls_until_failure_ = kNever, failures_left_ = 0;
  std::uint64_t bytes_left_ = kNever;
  unsigned kernels_run_ = 0;
};

}  // namespace echoline::delta::cuda::test
