// The kernels for any processor, with 4 floats per register; see kernels.inl.
namespace echoline::model {
namespace {
constexpr int kLanes = 4;
}
}  // namespace echoline::model

#include "model/kernels.inl"
#include "model/training_kernels.inl"

namespace echoline::model {
// `extern`, because a constant is otherwise visible in its own file only.
extern const Kernels kPortableKernels;
const Kernels kPortableKernels = ECHOLINE_MODEL_KERNELS("portable", product<Bf16>, interleave, interleaved_floats);
extern const TrainingKernels kPortableTrainingKernels;
const TrainingKernels kPortableTrainingKernels = ECHOLINE_TRAINING_KERNELS("portable");
}  // namespace echoline::model
