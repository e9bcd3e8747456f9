// The kernels for AVX2, with 8 floats per register; see kernels.inl.
namespace echoline::model {
namespace {
constexpr int kLanes = 8;
}
}  // namespace echoline::model

#include "model/kernels.inl"
#include "model/panels.inl"
#include "model/training_kernels.inl"

namespace echoline::model {
// `extern`, because a constant is otherwise visible in its own file only.
extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = ECHOLINE_MODEL_KERNELS("avx2", product_panels, pack_tiles, interleaved_floats);
extern const TrainingKernels kAvx2TrainingKernels;
const TrainingKernels kAvx2TrainingKernels = ECHOLINE_TRAINING_KERNELS("avx2");
}  // namespace echoline::model
