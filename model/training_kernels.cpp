// Chooses the training kernels for an instruction set.
#include "model/training_kernels.hpp"

#include "model/kernels.hpp"

namespace echoline::model {

#if defined(__x86_64__)
extern const TrainingKernels kAvx512TrainingKernels, kAvx2TrainingKernels;
#endif
extern const TrainingKernels kPortableTrainingKernels;

const TrainingKernels& training_kernels_named(std::string_view name) {
#if defined(__x86_64__)
  if (name == kAvx2TrainingKernels.name) return kAvx2TrainingKernels;
  if (name != kPortableTrainingKernels.name)
    return kAvx512TrainingKernels;  // also for AMX, which has no training kernels of its own
#else
  (void)name;
#endif
  return kPortableTrainingKernels;
}

const TrainingKernels& training_kernels() {
  static const TrainingKernels& chosen = training_kernels_named(kernels().name);
  return chosen;
}

}  // namespace echoline::model
