// Replaces cuda_backend.cpp in builds without a CUDA compiler, or with a libtorch without CUDA.
#include "model/cuda/backend.hpp"

namespace echoline::model::cuda {

Result<std::unique_ptr<DeviceBackend>> open_backend(const torch::Device&) {
  return fail(Code::kUnavailable, "open decoder", "this program was built without CUDA kernels");
}

}  // namespace echoline::model::cuda
