// The kernels for one instruction set; see kernels.inl.
namespace echoline::model {
namespace {
constexpr int kLanes = 16;
}
}  // namespace echoline::model

#include "model/kernels.inl"

namespace echoline::model {
extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = ECHOLINE_MODEL_KERNELS("avx512");
}  // namespace echoline::model
