// The block kernels, compiled for any processor.
#include "delta/block.inl"

namespace echoline::delta {
extern const Kernels kPortableKernels;
const Kernels kPortableKernels = ECHOLINE_KERNEL_SET("portable");
}  // namespace echoline::delta
