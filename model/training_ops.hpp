// Hand-written parts of a pass with gradients: less memory between forward and backward, and on a CPU fewer passes over
// it. Uses model/training_kernels in fp32 on a CPU, otherwise libtorch's functions. Private to model/.
#pragma once
#include "model/packed.hpp"

namespace echoline::model {

// x / rms(x) * weight over the last dimension, computed in fp32.
torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight, double eps);

// x joint_weight^T. q, k and v, the weights of queries, keys and values, are the rows of `joint_weight` and the
// parameters that receive the gradient.
torch::Tensor joint_product(const torch::Tensor& x, const torch::Tensor& joint_weight, const torch::Tensor& q,
                            const torch::Tensor& k, const torch::Tensor& v);

struct Rotation {
  torch::Tensor cos, sin;  // fp32 [positions, dim]; row t has position t % positions. The first half of sin is negated
  torch::Tensor q_norm, k_norm;  // [dim], or undefined
  std::int64_t heads, kv_heads;
  double eps;
};
// Applies norm and rotation to queries and keys, and copies values: qkv [tokens, (heads + 2 kv_heads) * dim] ->
// [tokens, heads + 2 kv_heads, dim].
torch::Tensor rotate(const torch::Tensor& qkv, const Rotation& rotation);

// silu(gate) * up
torch::Tensor gated(const torch::Tensor& gate, const torch::Tensor& up);

// Implementations of attention.
enum class AttentionMethod {
  kKernels,   // model/training_kernels, on a CPU
  kFused,     // scaled_dot_product_attention() of libtorch 2.2 and newer
  kProducts,  // libtorch's products, a block of queries at a time
};
// kKernels on a CPU, elsewhere kFused if libtorch has it.
AttentionMethod fastest_attention(const torch::Device& device);

// Attention over packed tokens: qkv [tokens, heads + 2 kv_heads, dim], with the scale of the scores in queries and keys
// -> [tokens, heads * dim]. Memory is linear in tokens, also in the backward pass, because scores are computed by
// blocks.
torch::Tensor attend_packed(const torch::Tensor& qkv, std::int64_t heads, std::int64_t kv_heads,
                            const torch::Tensor& segments, AttentionMethod method);

// log softmax(hidden weight^T / temperature) at the targets, and the entropy, without gradient. Logits are computed for
// a bounded number of rows at a time, also in the backward pass.
struct LinearScores {
  torch::Tensor logprobs, entropy;  // fp32 [rows]
};
LinearScores linear_scores(const torch::Tensor& hidden, const torch::Tensor& weight, const torch::Tensor& targets,
                           double temperature);

}  // namespace echoline::model
