// The arithmetic of a training pass on a CPU except its matrix products, in fp32, forward and backward: attention,
// norms, rotations, the gate and the softmax over the vocabulary. There is a set of these functions for each
// instruction set of model/kernels. Private to model/.
#pragma once
#include <cstdint>
#include <string_view>

#include "model/segment.hpp"

namespace echoline::model {

// One key and value head of packed tokens (model/segment.hpp), and its `group` query heads. Token t's queries are at
// q + t * stride (`group` * dim floats), its key at k + t * stride, its value at v + t * stride.
struct AttentionHead {
  const float *q, *k, *v;
  std::int64_t stride, group, dim;
  std::int64_t window = 0;  // a query attends to this many keys at most, the last ones; 0: to all that it may see
};

struct TrainingKernels {
  const char* name;
  // Attention of `count` segments: a prefix segment and the segments that share it, or a single segment. Writes token
  // t's outputs to out + t * out_stride (`group` * dim floats), and the logarithms of its softmax sums to sums + t *
  // sums_stride (`group` floats).
  void (*attend)(const AttentionHead& head, const Segment* segments, std::int64_t count, float* out,
                 std::int64_t out_stride, float* sums, std::int64_t sums_stride);
  // The gradients of attend(). `out` and `sums` are its results, `out_gradient` has the layout of `out`. The gradients
  // of queries, keys and values are written to dq, dk and dv, with the layout of q, k and v.
  void (*attend_backward)(const AttentionHead& head, const Segment* segments, std::int64_t count, const float* out,
                          const float* out_gradient, std::int64_t out_stride, const float* sums,
                          std::int64_t sums_stride, float* dq, float* dk, float* dv);
  // The gradients of Kernels::rms_norm: writes that of x to dx, and adds that of `weight` to dw.
  void (*rms_norm_backward)(const float* x, const float* weight, const float* dy, std::int64_t count, float eps,
                            float* dx, float* dw);
  // The gradients of Kernels::rotate: replaces dy by that of the input x, and adds that of `weight` to dw. If `weight`
  // is null, there is no norm, and dw is unused.
  void (*rotate_backward)(const float* x, const float* weight, std::int64_t dim, float eps, const float* cos,
                          const float* sin, float* dy, float* dw);
  // out = silu(gate) * up
  void (*gate)(const float* gate, const float* up, std::int64_t count, float* out);
  void (*gate_backward)(const float* gate, const float* up, const float* dy, std::int64_t count, float* d_gate,
                        float* d_up);
  // The same for gelu(gate) * up, with the approximation of GELU by tanh.
  void (*gelu_gate)(const float* gate, const float* up, std::int64_t count, float* out);
  void (*gelu_gate_backward)(const float* gate, const float* up, const float* dy, std::int64_t count, float* d_gate,
                             float* d_up);
  // Sets `logprob` to log softmax(scale * logits)[target], `entropy` to the entropy of the distribution, and `log_sum`
  // to the logarithm of the sum of exp(scale * logits).
  void (*score)(const float* logits, std::int64_t count, float scale, std::int64_t target, float* logprob,
                float* entropy, float* log_sum);
  // Replaces the logits by their gradient: gradient * d log softmax(scale * logits)[target] / d logits.
  void (*score_backward)(float* logits, std::int64_t count, float scale, std::int64_t target, float log_sum,
                         float gradient);
};

// The kernels for the instruction set of kernels().
const TrainingKernels& training_kernels();
// The kernels for the instruction set with this Kernels::name.
const TrainingKernels& training_kernels_named(std::string_view name);

}  // namespace echoline::model
