// A GPU emulated on the CPU: runs the device code of model/cuda/kernels.hpp with loops instead of threads. Its
// arithmetic and addresses are thus tested without a GPU. It does not show that the code is right under real
// concurrency, or how fast it is.
#pragma once
#include <array>
#include <cstdlib>
#include <memory>
#include <vector>

#include "model/cuda/backend.hpp"

namespace echoline::model::cuda::test {

template <unsigned kCount>
class LoopBlock {
 public:
  static constexpr unsigned kThreads = kCount;
  template <class T>
  class Local {
   public:
    T& operator[](unsigned thread) { return values_[thread]; }

   private:
    std::unique_ptr<T[]> values_{new T[kCount]};
  };

  // Memory of the exact size, for the address sanitizer, filled with NaN.
  explicit LoopBlock(std::size_t shared_bytes) : shared_bytes_(shared_bytes) {}

  template <class T>
  T* shared() {
    if (shared_.empty()) shared_.resize((shared_bytes_ + 15) / 16, {{~0u, ~0u, ~0u, ~0u}});
    return reinterpret_cast<T*>(shared_.data());
  }
  template <class F>
  void on_each_thread(F&& f) {
    for (unsigned thread = 0; thread < kCount; ++thread) f(thread);
  }
  template <class F>
  void on_each_thread_and_wait(F&& f) {
    on_each_thread(f);
  }
  template <unsigned kWidth, class F>
  void sum(F&& value) {
    for (unsigned first = 0; first < kCount; first += kWidth) {
      std::array<float, kWidth> sums;
      for (unsigned i = 0; i < kWidth; ++i) sums[i] = value(first + i);
      for (unsigned distance = kWidth / 2; distance > 0; distance /= 2) {
        const auto before = sums;
        for (unsigned i = 0; i < kWidth; ++i) sums[i] += before[i ^ distance];
      }
      for (unsigned i = 0; i < kWidth; ++i) value(first + i) = sums[i];
    }
  }
  template <unsigned kWidth, class F>
  void largest(F&& value) {
    for (unsigned first = 0; first < kCount; first += kWidth) {
      float top = value(first);
      for (unsigned i = 1; i < kWidth; ++i) top = larger(value(first + i), top);
      for (unsigned i = 0; i < kWidth; ++i) value(first + i) = top;
    }
  }
  template <class Sums, class Low, class High, class Weights>
  void multiply(Sums&& sums, Low&& low, High&& high, Weights&& weights) {
    const auto at = [](const Vector& v, unsigned i) {
      return i % 2 == 0 ? first_of(v.words[i / 2]) : second_of(v.words[i / 2]);
    };
    for (unsigned warp = 0; warp < kCount; warp += kWarpThreads)
      for (unsigned row = 0; row < 16; ++row)
        for (unsigned output = 0; output < kTileOutputs; ++output) {
          float sum = 0;
          for (unsigned part = 0; part < 4; ++part)
            for (unsigned i = 0; i < kVectorCount; ++i) {
              const unsigned thread = warp + row % 8 * 4 + part;
              sum += at(row < 8 ? low(thread) : high(thread), i) * at(weights(warp + output * 4 + part), i);
            }
          sums(warp + row % 8 * 4 + output / 2)[row / 8 * 2 + output % 2] += sum;
        }
  }
  bool is_last_to_arrive(unsigned* counter, unsigned blocks) {
    if (++*counter < blocks) return false;
    *counter = 0;
    return true;
  }
  void wait_for_inputs() {}

 private:
  std::size_t shared_bytes_;
  std::vector<Vector> shared_;
};

// Work runs at once, or, while it is recorded, at its replay. The order of blocks changes.
class EmulatedBackend final : public DeviceBackend {
 public:
  explicit EmulatedBackend(unsigned processors) : processors_(processors) {}

  unsigned processors() const override { return processors_; }
  void run(const ReceiveJob& job) override;
  void run(const EmbedJob& job) override;
  void run(const NormJob& job) override;
  void run(const ProductJob& job) override;
  void run(const GateJob& job) override;
  void run(const RotateJob& job, unsigned dim) override;
  void run(const AttendJob& job, unsigned dim) override;
  void run(const SampleJob& job) override;
  void multiply(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                const torch::Tensor& out) override;
  torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v) override;
  std::unique_ptr<Recording> record(const std::function<void()>& work) override;
  void wait() override {}

  // The next `count` recordings fail.
  void fail_recordings(int count) { failures_ = count; }
  int recorded() const { return recorded_; }  // recordings made so far

 private:
  struct Works;
  void queue(std::function<void()> work);
  std::vector<unsigned> any_order(unsigned count);

  unsigned processors_;
  std::uint64_t order_ = 1;
  int failures_ = 0, recorded_ = 0;
  std::vector<std::function<void()>>* recording_ = nullptr;
};

}  // namespace echoline::model::cuda::test
