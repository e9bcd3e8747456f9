// The kernels for AVX-512, with 16 floats per register; see kernels.inl.
namespace echoline::model {
namespace {
constexpr int kLanes = 16;
}
}  // namespace echoline::model

#include "model/kernels.inl"
#include "model/panels.inl"
#include "model/training_kernels.inl"

namespace echoline::model {
// `extern`, because a constant is otherwise visible in its own file only.
extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = ECHOLINE_MODEL_KERNELS("avx512", product_panels, pack_tiles, interleaved_floats);
extern const TrainingKernels kAvx512TrainingKernels;
const TrainingKernels kAvx512TrainingKernels = ECHOLINE_TRAINING_KERNELS("avx512");
}  // namespace echoline::model
