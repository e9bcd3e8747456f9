#include "model/runtime.hpp"

#include <malloc.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include "model/torch.hpp"

namespace echoline::model {

Runtime runtime() {
  Runtime r;
  r.torch_version = TORCH_VERSION;
  r.threads = at::get_num_threads();
  r.cuda_devices = static_cast<int>(torch::cuda::device_count());
  return r;
}

void keep_freed_memory() {
  constexpr int kBytes = 1 << 30;
  ::mallopt(M_MMAP_THRESHOLD, kBytes);
  ::mallopt(M_TRIM_THRESHOLD, kBytes);
}

}  // namespace echoline::model
