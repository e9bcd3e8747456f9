// Replaces cuda_backend.cpp in builds without a CUDA compiler.
#include "delta/cuda/backend.hpp"

namespace echoline::delta::cuda {

Result<std::shared_ptr<DeviceBackend>> open_backend(int) {
  return fail(Code::kInvalid, "open CUDA device",
              "this program was built without CUDA; install nvcc, configure with -DECHOLINE_CUDA=ON and build again");
}

}  // namespace echoline::delta::cuda
