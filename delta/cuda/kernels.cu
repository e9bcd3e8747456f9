// Runs the device code of kernels.hpp on real threads.
#include "delta/cuda/kernels.hpp"
#include "delta/cuda/launch.hpp"
#include "delta/cuda/own_value.hpp"

namespace echoline::delta::cuda {
namespace {

class ThreadBlock {
 public:
  template <class T>
  using Local = OwnValue<T>;

  __device__ __forceinline__ explicit ThreadBlock(ExtractShared& shared) : shared_(shared) {}
  __device__ __forceinline__ ExtractShared& shared() { return shared_; }

  template <class F>
  __device__ __forceinline__ void each(F&& f) {
    f(threadIdx.x);
    __syncthreads();
  }

  template <class F>
  __device__ __forceinline__ void scan_warps(F&& value) {
    unsigned long long sum = value(threadIdx.x);
    ECHO_UNROLL
    for (unsigned distance = 1; distance < kWarpThreads; distance *= 2) {
      const unsigned long long before = __shfl_up_sync(kAllThreads, sum, distance);
      if (threadIdx.x % kWarpThreads >= distance) sum += before;
    }
    value(threadIdx.x) = sum;
  }

  __device__ __forceinline__ std::uint64_t atomic_add(unsigned long long* to, std::uint64_t value) {
    return atomicAdd(to, static_cast<unsigned long long>(value));
  }

 private:
  ExtractShared& shared_;
};

class ThreadWarp {
 public:
  template <class T>
  using Local = OwnValue<T>;

  template <class F>
  __device__ __forceinline__ void each(F&& f) {
    f(threadIdx.x % kWarpThreads);
  }

  template <unsigned kFirst, unsigned kLast, class F>
  __device__ __forceinline__ void sum(F&& value) {
    Pair& own = value(threadIdx.x % kWarpThreads);
    ECHO_UNROLL
    for (unsigned distance = kFirst; distance <= kLast; distance *= 2) {
      own.a += __shfl_xor_sync(kAllThreads, static_cast<unsigned long long>(own.a), distance);
      own.b += __shfl_xor_sync(kAllThreads, static_cast<unsigned long long>(own.b), distance);
    }
  }
};

__global__ __launch_bounds__(kBlockThreads) void extract_kernel(ExtractJob job) {
  __shared__ ExtractShared shared;
  ThreadBlock block(shared);
  extract_block(block, job, blockIdx.x);
}

__global__ __launch_bounds__(kBlockThreads) void gather_kernel(GatherJob job) {
  const std::uint32_t tile = blockIdx.x * kBlockWarps + threadIdx.x / kWarpThreads;
  if (tile >= job.tile_count) return;  // whole warps
  ThreadWarp warp;
  gather_warp(warp, job, tile);
}

__global__ __launch_bounds__(kBlockThreads) void swap_kernel(SwapJob job) { swap_thread(job, blockIdx.x, threadIdx.x); }

__global__ __launch_bounds__(kBlockThreads) void hash_kernel(HashJob job) {
  const std::uint32_t index = blockIdx.x * kBlockWarps + threadIdx.x / kWarpThreads;
  if (index >= job.leaf_count) return;  // whole warps
  ThreadWarp warp;
  hash_warp(warp, job, index);
}

}  // namespace

cudaError_t launch(const ExtractJob& job, cudaStream_t stream) {
  extract_kernel<<<job.tile_count, kBlockThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

cudaError_t launch(const GatherJob& job, cudaStream_t stream) {
  gather_kernel<<<(job.tile_count + kBlockWarps - 1) / kBlockWarps, kBlockThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

cudaError_t launch(const SwapJob& job, cudaStream_t stream) {
  swap_kernel<<<job.chunk_count, kBlockThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

cudaError_t launch(const HashJob& job, cudaStream_t stream) {
  hash_kernel<<<(job.leaf_count + kBlockWarps - 1) / kBlockWarps, kBlockThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace echoline::delta::cuda
