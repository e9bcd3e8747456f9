// Runs the device code of training_kernels.hpp on real threads.
#include "delta/cuda/own_value.hpp"
#include "model/cuda/training_kernels.hpp"
#include "model/cuda/training_launch.hpp"

namespace echoline::model::training {
namespace {

using delta::cuda::kAllThreads;
using delta::cuda::OwnValue;

struct Sum {
  template <class T>
  static __device__ __forceinline__ T of(T a, T b) {
    return a + b;
  }
};
struct Max {
  template <class T>
  static __device__ __forceinline__ T of(T a, T b) {
    return a > b ? a : b;
  }
};

// The class `Block` of training_values.hpp, with real threads.
template <unsigned kThreads>
class ThreadBlock {
 public:
  template <class T>
  using Local = OwnValue<T>;

  __device__ __forceinline__ explicit ThreadBlock(float* shared) : shared_(shared) {}
  __device__ __forceinline__ float* shared() { return shared_; }
  template <class F>
  __device__ __forceinline__ void each(F&& f) {
    f(threadIdx.x);
  }
  __device__ __forceinline__ void barrier() { __syncthreads(); }
  template <class T>
  __device__ __forceinline__ void warp_sum(OwnValue<T>& local) {
    local.value = over_warp<Sum>(local.value);
  }
  template <class T>
  __device__ __forceinline__ void warp_max(OwnValue<T>& local) {
    local.value = over_warp<Max>(local.value);
  }
  template <class T>
  __device__ __forceinline__ void block_sum(OwnValue<T>& local) {
    local.value = over_block<Sum>(local.value);
  }
  template <class T>
  __device__ __forceinline__ void block_max(OwnValue<T>& local) {
    local.value = over_block<Max>(local.value);
  }

 private:
  template <class Operation, class T>
  static __device__ __forceinline__ T over_warp(T value) {
#pragma unroll
    for (unsigned distance = kWarpSize / 2; distance > 0; distance /= 2)
      value = Operation::of(value, __shfl_xor_sync(kAllThreads, value, distance));
    return value;
  }
  template <class Operation, class T>
  static __device__ __forceinline__ T over_block(T value) {
    __shared__ T warp_values[kThreads / kWarpSize];
    value = over_warp<Operation>(value);
    __syncthreads();  // waits until all threads have read the values of an earlier call
    if (threadIdx.x % kWarpSize == 0) warp_values[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    value = warp_values[0];
#pragma unroll
    for (unsigned i = 1; i < kThreads / kWarpSize; ++i) value = Operation::of(value, warp_values[i]);
    return value;
  }
  float* shared_;
};

// A kernel `name` that runs `function` with `threads` threads and `floats` floats of shared memory per block: 1 where
// the function needs none, because an array cannot be empty. The `large` kernels are for heads above kDimMax / 2, which
// take more registers (see HeadPacks).
#define ECHO_KERNEL(name, Job, function, threads, floats)        \
  template <class T>                                             \
  __global__ __launch_bounds__(threads) void name(Job<T> job) {  \
    __shared__ float shared[floats];                             \
    ThreadBlock<threads> block(shared);                          \
    function(block, job, static_cast<std::int64_t>(blockIdx.x)); \
  }
ECHO_KERNEL(norm_kernel, NormJob, norm_rows, kNormThreads, 1)
ECHO_KERNEL(norm_backward_kernel, NormBackwardJob, norm_backward_rows, kNormThreads, 2 * kNormBackwardRows)
ECHO_KERNEL(column_sums_kernel, ColumnSumsJob, column_sums, kColumnThreads, kColumnThreads)
ECHO_KERNEL(rotate_kernel, RotateJob, rotate_token<1>, kRotateThreads, 1)
ECHO_KERNEL(rotate_large_kernel, RotateJob, rotate_token<2>, kRotateThreads, 1)
ECHO_KERNEL(rotate_backward_kernel, RotateBackwardJob, rotate_backward_tokens<1>, kRotateThreads, 2 * kDimMax)
ECHO_KERNEL(rotate_backward_large_kernel, RotateBackwardJob, rotate_backward_tokens<2>, kRotateThreads, 2 * kDimMax)
ECHO_KERNEL(gather_rows_kernel, GatherJob, gather_row, kGatherThreads, 1)
ECHO_KERNEL(gate_kernel, GateJob, gate_part, kGateThreads, 1)
ECHO_KERNEL(gate_backward_kernel, GateJob, gate_backward_part, kGateThreads, 1)
ECHO_KERNEL(score_kernel, ScoreJob, score_row, kScoreThreads, 1)
ECHO_KERNEL(score_backward_kernel, ScoreJob, score_backward_row, kScoreThreads, 1)
#undef ECHO_KERNEL

// The same for functions without shared memory.
#define ECHO_KERNEL(name, Job, function)                            \
  __global__ __launch_bounds__(kUpdateThreads) void name(Job job) { \
    ThreadBlock<kUpdateThreads> block(nullptr);                     \
    function(block, job, static_cast<std::int64_t>(blockIdx.x));    \
  }
ECHO_KERNEL(update_kernel, UpdateJob, update_part)
ECHO_KERNEL(squares_kernel, SquaresJob, squares_part)
ECHO_KERNEL(update_add_kernel, AddJob, add_part)
#undef ECHO_KERNEL

// The number of blocks for `count` items.
unsigned blocks(std::int64_t count, std::int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

}  // namespace

template <class T>
cudaError_t launch(const NormJob<T>& job, cudaStream_t stream) {
  norm_kernel<<<blocks(job.rows, kNormRows), kNormThreads, 0, stream>>>(job);
  return cudaGetLastError();
}
template <class T>
cudaError_t launch(const NormBackwardJob<T>& job, cudaStream_t stream) {
  norm_backward_kernel<<<blocks(job.rows, kNormBackwardRows), kNormThreads, 0, stream>>>(job);
  return cudaGetLastError();
}
template <class T>
cudaError_t launch(const ColumnSumsJob<T>& job, cudaStream_t stream) {
  column_sums_kernel<<<blocks(job.width, kWarpSize), kColumnThreads, 0, stream>>>(job);
  return cudaGetLastError();
}
template <class T>
cudaError_t launch(const RotateJob<T>& job, cudaStream_t stream) {
  if (job.dim <= kDimMax / 2)
    rotate_kernel<<<blocks(job.tokens, 1), kRotateThreads, 0, stream>>>(job);
  else
    rotate_large_kernel<<<blocks(job.tokens, 1), kRotateThreads, 0, stream>>>(job);
  return cudaGetLastError();
}
template <class T>
cudaError_t launch(const RotateBackwardJob<T>& job, cudaStream_t stream) {
  const unsigned parts = blocks(job.forward.tokens, kRotateBackwardTokens);
  if (job.forward.dim <= kDimMax / 2)
    rotate_backward_kernel<<<parts, kRotateThreads, 0, stream>>>(job);
  else
    rotate_backward_large_kernel<<<parts, kRotateThreads, 0, stream>>>(job);
  return cudaGetLastError();
}
template <class T>
cudaError_t launch(const GatherJob<T>& job, cudaStream_t stream) {
  gather_rows_kernel<<<blocks(job.count, 1), kGatherThreads, 0, stream>>>(job);
  return cudaGetLastError();
}
template <class T>
cudaError_t launch(const GateJob<T>& job, cudaStream_t stream) {
  const unsigned parts = blocks(job.rows * job.width, std::int64_t{kGateThreads} * kValuesPerPack<T>);
  if (job.slope)
    gate_backward_kernel<<<parts, kGateThreads, 0, stream>>>(job);
  else
    gate_kernel<<<parts, kGateThreads, 0, stream>>>(job);
  return cudaGetLastError();
}
template <class T>
cudaError_t launch(const ScoreJob<T>& job, cudaStream_t stream) {
  if (job.slopes)
    score_backward_kernel<<<blocks(job.rows, 1), kScoreThreads, 0, stream>>>(job);
  else
    score_kernel<<<blocks(job.rows, 1), kScoreThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

// Instantiates launch() for both types of values.
#define ECHO_BOTH(Job)                                                     \
  template cudaError_t launch(const Job<float>& job, cudaStream_t stream); \
  template cudaError_t launch(const Job<Bf16>& job, cudaStream_t stream);
ECHO_BOTH(NormJob)
ECHO_BOTH(NormBackwardJob)
ECHO_BOTH(ColumnSumsJob)
ECHO_BOTH(RotateJob)
ECHO_BOTH(RotateBackwardJob)
ECHO_BOTH(GatherJob)
ECHO_BOTH(GateJob)
ECHO_BOTH(ScoreJob)
#undef ECHO_BOTH

cudaError_t launch(const UpdateJob& job, cudaStream_t stream) {
  update_kernel<<<static_cast<unsigned>(job.part_count), kUpdateThreads, 0, stream>>>(job);
  return cudaGetLastError();
}
cudaError_t launch(const SquaresJob& job, cudaStream_t stream) {
  squares_kernel<<<static_cast<unsigned>(job.part_count), kUpdateThreads, 0, stream>>>(job);
  return cudaGetLastError();
}
cudaError_t launch(const AddJob& job, cudaStream_t stream) {
  update_add_kernel<<<static_cast<unsigned>(job.part_count), kUpdateThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace echoline::model::training
