// The arithmetic of a pass over few rows on a CPU, for several instruction sets, of which the best that the processor
// has is chosen at run time. Private to model/.
#pragma once
#include <cstdint>

namespace echoline::model {

// bf16: the upper half of an fp32.
using Bf16 = std::uint16_t;

struct Kernels {
  const char* name;
  // y[r * y_stride + o] = x[r * in] . w[o * in], added to what is there if `add`; for o in [begin, end).
  // The weights are converted as they are read, sums are fp32. bf16 weights want x in the order of interleave().
  void (*product_fp32)(const float* x, std::int64_t rows, std::int64_t in, const float* w, std::int64_t begin,
                       std::int64_t end, float* y, std::int64_t y_stride, bool add);
  void (*product_bf16)(const float* x, std::int64_t rows, std::int64_t in, const Bf16* w, std::int64_t begin,
                       std::int64_t end, float* y, std::int64_t y_stride, bool add);
  void (*interleave)(const float* x, std::int64_t rows, std::int64_t in, float* out);
  // out = x / rms(x) * weight
  void (*rms_norm)(const float* x, const float* weight, std::int64_t count, float eps, float* out);
  // The same in place for a head, not where `weight` is null; then rotated: x * cos + (halves of x exchanged) * sin.
  void (*rotate)(float* x, const float* weight, std::int64_t dim, float eps, const float* cos, const float* sin);
  // gate = silu(gate) * up
  void (*gate)(float* gate, const float* up, std::int64_t count);
  // In fp64.
  double (*sum)(const float* x, std::int64_t count);
  // Attention of `heads` queries [heads, dim] over the first `seen` tokens of a text, the pages of which hold 16 each:
  // keys [dim, 16], values [16, dim], page p at pages[p] * stride. `scratch`: heads * (seen rounded up to 16) floats.
  void (*attend)(const float* q, std::int64_t heads, std::int64_t dim, std::int64_t seen, const std::int64_t* pages,
                 const float* keys, const float* values, std::int64_t stride, float* scratch, float* out);
};

// For this processor; the environment variable ECHOLINE_KERNELS names another of them (avx512, avx2, portable).
const Kernels& kernels();
// All that run here, the best first.
struct KernelSets {
  const Kernels* of[3];
  int count;
};
KernelSets available_kernels();

}  // namespace echoline::model
