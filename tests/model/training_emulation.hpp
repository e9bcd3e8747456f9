// A block of threads as a loop on the CPU, for the device code of model/cuda/training_kernels.hpp. It does not show
// that the code is right under real concurrency, or how fast it is.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "model/cuda/training_kernels.hpp"
#include "model/cuda/training_update.hpp"

namespace echoline::model::training::test {

// With `backward` the threads of each() run in the opposite order, which must not change anything.
template <unsigned kThreads>
class LoopBlock {
 public:
  template <class T>
  using Local = std::array<T, kThreads>;

  explicit LoopBlock(bool backward) : backward_(backward), shared_(kSharedFloats, NAN) {}
  float* shared() { return shared_.data(); }
  template <class F>
  void each(F&& f) {
    for (unsigned i = 0; i < kThreads; ++i) f(backward_ ? kThreads - 1 - i : i);
  }
  void barrier() {}
  template <class T>
  void warp_sum(std::array<T, kThreads>& values) {
    combine_groups(values, kWarpSize, [](T a, T b) { return a + b; });
  }
  template <class T>
  void warp_max(std::array<T, kThreads>& values) {
    combine_groups(values, kWarpSize, [](T a, T b) { return a > b ? a : b; });
  }
  template <class T>
  void block_sum(std::array<T, kThreads>& values) {
    combine_groups(values, kThreads, [](T a, T b) { return a + b; });
  }
  template <class T>
  void block_max(std::array<T, kThreads>& values) {
    combine_groups(values, kThreads, [](T a, T b) { return a > b ? a : b; });
  }

 private:
  template <class T, class F>
  static void combine_groups(std::array<T, kThreads>& values, unsigned size, const F& join) {
    for (unsigned first = 0; first < kThreads; first += size) {
      T total = values[first];
      for (unsigned i = 1; i < size; ++i) total = join(total, values[first + i]);
      for (unsigned i = 0; i < size; ++i) values[first + i] = total;
    }
  }
  bool backward_;
  std::vector<float> shared_;
};

// Runs f(block, index) for the given number of blocks, each with its own shared memory.
template <unsigned kThreads, class F>
void run_blocks(std::int64_t count, const F& f) {
  for (std::int64_t i = 0; i < count; ++i) {
    LoopBlock<kThreads> block(i % 2 == 1);
    f(block, i);
  }
}

}  // namespace echoline::model::training::test
