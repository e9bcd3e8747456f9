// Replaces cuda_machine.cpp in builds without a CUDA compiler, or with a libtorch without CUDA.
#include "model/cuda/machine.hpp"

namespace echoline::model::cuda {

Result<std::unique_ptr<Machine>> open_machine(const torch::Device&) {
  return fail(Code::kUnavailable, "open decoder", "this program was built without CUDA kernels");
}

}  // namespace echoline::model::cuda
