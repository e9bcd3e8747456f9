// Runs the device code of kernels.hpp on real threads.
#include <algorithm>

#include "delta/cuda/own_value.hpp"
#include "model/cuda/kernels.hpp"
#include "model/cuda/launch.hpp"

namespace echoline::model::cuda {
namespace {

using delta::cuda::kAllThreads;
using delta::cuda::OwnValue;

extern __shared__ uint4 block_memory[];

// The class `Block` of block.hpp, with real threads.
template <unsigned kCount>
class ThreadBlock {
 public:
  static constexpr unsigned kThreads = kCount;
  template <class T>
  using Local = OwnValue<T>;

  template <class T>
  __device__ __forceinline__ T* shared() {
    return reinterpret_cast<T*>(block_memory);
  }
  template <class F>
  __device__ __forceinline__ void on_each_thread(F&& f) {
    f(threadIdx.x);
  }
  template <class F>
  __device__ __forceinline__ void on_each_thread_and_wait(F&& f) {
    f(threadIdx.x);
    __syncthreads();
  }
  template <unsigned kWidth, class F>
  __device__ __forceinline__ void sum(F&& value) {
    float& sum_so_far = value(threadIdx.x);
    ECHO_UNROLL
    for (unsigned distance = kWidth / 2; distance > 0; distance /= 2)
      sum_so_far += __shfl_xor_sync(kAllThreads, sum_so_far, distance);
  }
  template <unsigned kWidth, class F>
  __device__ __forceinline__ void largest(F&& value) {
    float& largest_so_far = value(threadIdx.x);
    ECHO_UNROLL
    for (unsigned distance = kWidth / 2; distance > 0; distance /= 2)
      largest_so_far = larger(__shfl_xor_sync(kAllThreads, largest_so_far, distance), largest_so_far);
  }
  template <class Sums, class Low, class High, class Weights>
  __device__ __forceinline__ void multiply(Sums&& sums, Low&& low, High&& high, Weights&& weights) {
    float* const c = sums(threadIdx.x);
    const Vector &a = low(threadIdx.x), &b = high(threadIdx.x), &w = weights(threadIdx.x);
    ECHO_UNROLL
    for (unsigned k = 0; k < 4; k += 2)  // two instructions with 16 of the 32 inputs each
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a.words[k]), "r"(b.words[k]), "r"(a.words[k + 1]), "r"(b.words[k + 1]), "r"(w.words[k]),
            "r"(w.words[k + 1]));
  }
  __device__ __forceinline__ bool is_last_to_arrive(unsigned* counter, unsigned blocks) {
    __shared__ bool is_last;
    __threadfence();  // the other blocks see what this thread has written before the counter says so
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicInc(counter, blocks - 1) == blocks - 1;  // turns blocks - 1 into 0
    __syncthreads();
    __threadfence();
    return is_last;
  }
  // griddepcontrol.wait waits for the previous kernel; launch_dependents then lets the next one start. Loads of
  // constants should come before the wait, but the assembler would move them behind it. It does not move them out of
  // their basic block, so a branch, which is never taken, separates them from the wait.
  __device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    unsigned processor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
    if (processor == 0xffffffffu) __nanosleep(1);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  }
};

__global__ __launch_bounds__(kRowThreads) void receive_kernel(ReceiveJob job) {
  ThreadBlock<kRowThreads> block;
  receive_block(block, job, blockIdx.x);
}

__global__ __launch_bounds__(kRowThreads) void embed_kernel(EmbedJob job) {
  ThreadBlock<kRowThreads> block;
  embed_block(block, job, blockIdx.x);
}

__global__ __launch_bounds__(kRowThreads) void norm_kernel(NormJob job) {
  ThreadBlock<kRowThreads> block;
  norm_block(block, job, blockIdx.x);
}

template <unsigned kGroups, bool kGated>
__global__ __launch_bounds__(kProductThreads) void product_kernel(ProductJob job) {
  ThreadBlock<kProductThreads> block;
  product_block<kGroups, kGated>(block, job, blockIdx.x, gridDim.x);
}

__global__ __launch_bounds__(kRowThreads) void gate_kernel(GateJob job) {
  ThreadBlock<kRowThreads> block;
  block.wait_for_inputs();
  gate_thread(job, std::size_t{blockIdx.x} * kRowThreads + threadIdx.x);
}

template <unsigned kDim>
__global__ __launch_bounds__(kRowThreads) void rotate_kernel(RotateJob job) {
  ThreadBlock<kRowThreads> block;
  block.wait_for_inputs();
  rotate_block<kDim>(block, job, blockIdx.x);
}

template <unsigned kDim, unsigned kHeads, unsigned kThreads>
__global__ __launch_bounds__(kThreads) void attend_kernel(AttendJob job) {
  ThreadBlock<kThreads> block;
  attend_block<kDim, kHeads>(block, job, blockIdx.z, blockIdx.y, blockIdx.x);
}

// 4: the compiler limits registers so that four blocks fit on a multiprocessor.
__global__ __launch_bounds__(kSampleThreads, 4) void sample_kernel(SampleJob job) {
  ThreadBlock<kSampleThreads> block;
  sample_block(block, job, blockIdx.y, blockIdx.x);
}

constexpr std::size_t kSharedBytesDefault = 48 << 10;  // a kernel may use this much shared memory without asking

// Lets the kernel use `shared_bytes` of shared memory per block.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, std::size_t shared_bytes) {
  if (shared_bytes <= kSharedBytesDefault) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
}

// Launches a kernel. If launcher.overlapped, it may start before the previous kernel has ended.
template <class Job>
cudaError_t start(const Launcher& launcher, void (*kernel)(Job), const Job& job, dim3 grid, unsigned threads,
                  std::size_t shared_bytes) {
  if (const cudaError_t error = allow_shared_memory(kernel, shared_bytes); error != cudaSuccess) return error;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = launcher.stream;
  config.attrs = &overlap;
  config.numAttrs = launcher.overlapped ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, job);
}

// Starts at most as many blocks as run at the same time: a block that has finished a round continues with another one.
template <unsigned kGroups, bool kGated>
cudaError_t launch_product(const Launcher& launcher, const ProductJob& job) {
  const auto kernel = product_kernel<kGroups, kGated>;
  const std::size_t shared_bytes =
      product_sums_bytes<kGroups, kGated>() + (job.norm != nullptr ? product_stage_bytes(job.rows, job.in) : 0);
  if (const cudaError_t error = allow_shared_memory(kernel, shared_bytes); error != cudaSuccess) return error;
  int blocks_per_processor = 1;
  if (const cudaError_t error =
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_processor, kernel, kProductThreads, shared_bytes);
      error != cudaSuccess)
    return error;
  const unsigned tiles = (job.outputs + kTileOutputs - 1) / kTileOutputs, tiles_per_round = kProductWarps / job.parts;
  const unsigned useful_blocks = (tiles + tiles_per_round - 1) / tiles_per_round;
  const unsigned blocks = std::min(
      useful_blocks, launcher.processors * static_cast<unsigned>(blocks_per_processor < 1 ? 1 : blocks_per_processor));
  return start(launcher, kernel, job, dim3(blocks), kProductThreads, shared_bytes);
}

template <unsigned kDim, unsigned kHeads, unsigned kThreads>
cudaError_t launch_attend(const Launcher& launcher, const AttendJob& job) {
  return start(launcher, attend_kernel<kDim, kHeads, kThreads>, job, dim3(job.splits, job.kv_heads, job.rows), kThreads,
               attend_shared_bytes<kDim, kHeads>(kThreads));
}

template <unsigned kDim, unsigned kHeads>
cudaError_t launch_attend(const Launcher& launcher, const AttendJob& job) {
  if constexpr (kHeads <= 4)  // more heads always have kAttendThreads
    if (attend_threads(job.rows, job.heads / job.kv_heads) == kAttendThreadsFewRows)
      return launch_attend<kDim, kHeads, kAttendThreadsFewRows>(launcher, job);
  return launch_attend<kDim, kHeads, kAttendThreads>(launcher, job);
}

template <unsigned kDim>
cudaError_t launch_attend(const Launcher& launcher, const AttendJob& job) {
  switch (attend_heads(job.heads / job.kv_heads)) {
    case 1:
      return launch_attend<kDim, 1>(launcher, job);
    case 2:
      return launch_attend<kDim, 2>(launcher, job);
    case 4:
      return launch_attend<kDim, 4>(launcher, job);
    default:
      return launch_attend<kDim, 8>(launcher, job);
  }
}

}  // namespace

cudaError_t make_launcher(int device, cudaStream_t stream, Launcher& out) {
  int processors = 0, major = 0;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess)
    return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      error != cudaSuccess)
    return error;
  if (major < 8) return cudaErrorNoKernelImageForDevice;  // the kernels use bf16 instructions
  out = {stream, static_cast<unsigned>(processors), /*overlapped=*/major >= 9};
  return cudaSuccess;
}

cudaError_t launch(const Launcher& launcher, const ReceiveJob& job) {
  return start(launcher, receive_kernel, job, dim3(job.blocks), kRowThreads, /*shared_bytes=*/0);
}

cudaError_t launch(const Launcher& launcher, const EmbedJob& job) {
  return start(launcher, embed_kernel, job, dim3(job.rows), kRowThreads, /*shared_bytes=*/0);
}

cudaError_t launch(const Launcher& launcher, const NormJob& job) {
  return start(launcher, norm_kernel, job, dim3(job.rows), kRowThreads, kRowThreads / kWarpThreads * sizeof(float));
}

cudaError_t launch(const Launcher& launcher, const ProductJob& job) {
  const bool gated = job.second != nullptr;
  switch (product_groups(job.rows)) {
    case 1:
      return gated ? launch_product<1, true>(launcher, job) : launch_product<1, false>(launcher, job);
    case 2:
      return gated ? launch_product<2, true>(launcher, job) : launch_product<2, false>(launcher, job);
    case 4:
      return gated ? launch_product<4, true>(launcher, job) : launch_product<4, false>(launcher, job);
    default:
      return gated ? launch_product<8, true>(launcher, job) : launch_product<8, false>(launcher, job);
  }
}

cudaError_t launch(const Launcher& launcher, const GateJob& job) {
  const std::size_t vectors = std::size_t{job.rows} * (job.width / kVectorCount);
  return start(launcher, gate_kernel, job, dim3(static_cast<unsigned>((vectors + kRowThreads - 1) / kRowThreads)),
               kRowThreads, /*shared_bytes=*/0);
}

cudaError_t launch(const Launcher& launcher, const RotateJob& job, unsigned dim) {
  const auto kernel = dim == 16   ? rotate_kernel<16>
                      : dim == 32 ? rotate_kernel<32>
                      : dim == 64 ? rotate_kernel<64>
                                  : rotate_kernel<128>;
  return start(launcher, kernel, job, dim3(job.tokens), kRowThreads, /*shared_bytes=*/0);
}

cudaError_t launch(const Launcher& launcher, const AttendJob& job, unsigned dim) {
  switch (dim) {
    case 16:
      return launch_attend<16>(launcher, job);
    case 32:
      return launch_attend<32>(launcher, job);
    case 64:
      return launch_attend<64>(launcher, job);
    default:
      return launch_attend<128>(launcher, job);
  }
}

cudaError_t launch(const Launcher& launcher, const SampleJob& job) {
  return start(launcher, sample_kernel, job, dim3(sample_blocks(job.vocab), job.rows), kSampleThreads,
               sizeof(SampleShared));
}

}  // namespace echoline::model::cuda
