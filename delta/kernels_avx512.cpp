// The block kernels, compiled for AVX-512.
#include "delta/block.inl"

namespace echoline::delta {
extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = ECHOLINE_KERNEL_SET("avx512");
}  // namespace echoline::delta
