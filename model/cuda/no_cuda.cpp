// Stands in for cuda_machine.cpp where no CUDA compiler was found, or libtorch has no CUDA.
#include "model/cuda/machine.hpp"

namespace echoline::model::cuda {

Result<std::unique_ptr<Machine>> open_machine(const torch::Device&) {
  return fail(Code::kUnavailable, "open decoder", "this program was built without CUDA kernels");
}

}  // namespace echoline::model::cuda
