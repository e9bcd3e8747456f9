// Starts the kernels of kernels.cu on a stream. The pointers of a job are device addresses, multiples of 16. A job must
// have at least one row. Internal to this folder.
#pragma once
#include <cuda_runtime_api.h>

#include "model/cuda/kernels.hpp"

namespace echoline::model::cuda {

// Parameters of kernel launches on one device.
struct Launcher {
  cudaStream_t stream = nullptr;
  unsigned processors = 1;  // multiprocessors of the device
  bool overlapped = false;  // a kernel may start before the previous one has ended (compute capability 9.0)
};

// Sets `out` from the stream and the device's properties. Fails for a compute capability below 8.0.
cudaError_t make_launcher(int device, cudaStream_t stream, Launcher& out);

cudaError_t launch(const Launcher& launcher, const ReceiveJob& job);
cudaError_t launch(const Launcher& launcher, const EmbedJob& job);
cudaError_t launch(const Launcher& launcher, const NormJob& job);
cudaError_t launch(const Launcher& launcher, const ProductJob& job);
cudaError_t launch(const Launcher& launcher, const GateJob& job);
cudaError_t launch(const Launcher& launcher, const RotateJob& job, unsigned dim);
cudaError_t launch(const Launcher& launcher, const AttendJob& job, unsigned dim);
cudaError_t launch(const Launcher& launcher, const SampleJob& job);

}  // namespace echoline::model::cuda
