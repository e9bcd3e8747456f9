// Block::Local of the device code in delta/cuda and model/cuda, on a GPU: a value per thread, of which each thread
// holds only its own. For nvcc only.
#pragma once

namespace echoline::delta::cuda {

template <class T>
struct OwnValue {
  T value;
  __device__ __forceinline__ T& operator[](unsigned) { return value; }
};

constexpr unsigned kAllThreads = 0xffffffffu;  // of a warp

}  // namespace echoline::delta::cuda
