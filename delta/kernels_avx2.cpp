// The block kernels, compiled for AVX2.
#include "delta/block.inl"

namespace echoline::delta {
extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = ECHOLINE_KERNEL_SET("avx2");
}  // namespace echoline::delta
