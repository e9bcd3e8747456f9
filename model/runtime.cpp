#include "model/runtime.hpp"

#include <torch/torch.h>
#include <torch/version.h>

namespace echoline::model {

Runtime runtime() {
  Runtime r;
  r.torch_version = TORCH_VERSION;
  r.threads = at::get_num_threads();
  r.cuda_devices = static_cast<int>(torch::cuda::device_count());
  return r;
}

}  // namespace echoline::model
