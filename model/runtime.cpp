#include "model/runtime.hpp"

#include <malloc.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include "model/kernels.hpp"
#include "model/torch.hpp"

namespace echoline::model {

Runtime runtime() {
  Runtime r;
  r.torch_version = TORCH_VERSION;
  r.kernels = kernels().name;
  r.threads = at::get_num_threads();
  r.cuda_devices = static_cast<int>(torch::cuda::device_count());
  return r;
}

void keep_freed_memory() {
  // What is larger (of the size of an embedding, a few in a step) leaves a hole that nothing of its size comes back to
  // before others have settled there: it has an area of its own, and goes.
  ::mallopt(M_MMAP_THRESHOLD, 200 << 20);
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

}  // namespace echoline::model
