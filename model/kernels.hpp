// The arithmetic of a pass without gradients on a CPU, for several instruction sets. The best one for the processor is
// chosen at run time. Private to model/.
#pragma once
#include <cstdint>

namespace echoline::model {

// The bits of a bf16 number, which are the upper half of those of an fp32 number.
using Bf16 = std::uint16_t;

struct Kernels {
  const char* name;
  // The product x w^T for the rows [begin, end) of w. y[r * y_stride + o] becomes the dot product of row r of x with
  // row o of w, both of `in` values; with `add`, the product is added to y. Sums are fp32. Each result is the same for
  // any begin and end.
  void (*product_fp32)(const float* x, std::int64_t rows, std::int64_t in, const float* w, std::int64_t begin,
                       std::int64_t end, float* y, std::int64_t y_stride, bool add);
  // As product_fp32() with bf16 weights and packed x. As exact as with fp32 weights of the same values.
  void (*product_bf16)(const float* packed, std::int64_t rows, std::int64_t in, const Bf16* w, std::int64_t begin,
                       std::int64_t end, float* y, std::int64_t y_stride, bool add);
  // Packs rows [begin, end) of x for product_bf16(); `begin` is a multiple of 16. `packed` has room for packed_floats()
  // and is aligned to 64 bytes.
  void (*pack)(const float* x, std::int64_t rows, std::int64_t in, std::int64_t begin, std::int64_t end, float* packed);
  std::int64_t (*packed_floats)(std::int64_t rows, std::int64_t in);
  // out = x / rms(x) * weight
  void (*rms_norm)(const float* x, const float* weight, std::int64_t count, float eps, float* out);
  // rms_norm() of a head in place, unless `weight` is null; then the rotation x * cos + (halves of x swapped) * sin.
  void (*rotate)(float* x, const float* weight, std::int64_t dim, float eps, const float* cos, const float* sin);
  // gate = silu(gate) * up
  void (*gate)(float* gate, const float* up, std::int64_t count);
  // gate = gelu(gate) * up, with the approximation of GELU by tanh
  void (*gelu_gate)(float* gate, const float* up, std::int64_t count);
  // out[i] = x[i] - log(sum of e^x), with an fp64 sum. NaN everywhere if x has NaN or positive infinity.
  void (*log_softmax)(const float* x, std::int64_t count, float* out);
  // The sum of x, added up in fp64.
  double (*sum)(const float* x, std::int64_t count);
  // Attention of `heads` queries q [heads, dim] over tokens [first_token, token_count) of a text, whose first
  // `token_count` tokens are in pages of 16 tokens. The keys [dim, 16] and values [16, dim] of the text's p-th page
  // begin at offset pages[p] * stride. `scratch` is memory for heads * (token_count rounded up to a multiple of 16)
  // floats.
  void (*attend)(const float* q, std::int64_t heads, std::int64_t dim, std::int64_t first_token,
                 std::int64_t token_count, const std::int64_t* pages, const float* keys, const float* values,
                 std::int64_t stride, float* scratch, float* out);
};

// The fastest set for this processor, or the one that the environment variable ECHOLINE_KERNELS names, if it runs
// here: amx, avx512, avx2 or portable.
const Kernels& kernels();
// All sets that run on this processor.
struct KernelSets {
  const Kernels* best_first[4];
  int count;
};
KernelSets available_kernels();

}  // namespace echoline::model
