// Counts the bytes of all tensors, by the reports of libtorch's allocators.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdint>

#include "model/torch.hpp"

namespace echoline {

// Called for every tensor of the thread it is set for (c10::DebugInfoGuard), including backward passes on a CPU.
class TensorCount : public c10::MemoryReportingInfoBase {
 public:
#if TORCH_VERSION_MAJOR >= 2
  void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device) override { count(size); }
#else
  void reportMemoryUsage(void*, std::int64_t size, std::int64_t, std::int64_t, c10::Device) override { count(size); }
#endif
  bool memoryProfilingEnabled() const override { return true; }
  double now() const { return static_cast<double>(now_); }    // bytes
  double most() const { return static_cast<double>(most_); }  // since the last forget_most()
  void forget_most() { most_ = now_; }

 private:
  void count(std::int64_t size) {
    now_ += size;
    most_ = std::max(most_, now_);
  }
  std::int64_t now_ = 0, most_ = 0;
};

}  // namespace echoline
