// Starts the kernels of kernels.cu on a stream; the jobs' pointers are device addresses. Jobs must not be empty.
// Internal to this folder.
#pragma once
#include <cuda_runtime_api.h>

#include "delta/cuda/kernels.hpp"

namespace echoline::delta::cuda {

cudaError_t launch(const ExtractJob& job, cudaStream_t stream);
cudaError_t launch(const GatherJob& job, cudaStream_t stream);
cudaError_t launch(const SwapJob& job, cudaStream_t stream);
cudaError_t launch(const HashJob& job, cudaStream_t stream);

}  // namespace echoline::delta::cuda
