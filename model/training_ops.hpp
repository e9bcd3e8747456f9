// Parts of a pass with gradients written by hand: less memory between forward and backward, and on a CPU fewer passes
// over it. In fp32 on a CPU by model/training_kernels, otherwise by libtorch's functions. Private to model/.
#pragma once
#include "model/packed.hpp"

namespace echoline::model {

// x / rms(x) * weight over the last dimension, computed in fp32.
torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight, double eps);

// x weight^T for the weight of queries, keys and values together: `whole` holds the values, and its rows q, k and v are
// the parameters that get the gradient.
torch::Tensor joint_product(const torch::Tensor& x, const torch::Tensor& whole, const torch::Tensor& q,
                            const torch::Tensor& k, const torch::Tensor& v);

struct Rotation {
  torch::Tensor cos, sin;  // fp32 [positions, dim]; sin with the sign of the rotation. Row t has position t % positions
  torch::Tensor q_norm, k_norm;  // [dim], or undefined
  std::int64_t heads, kv_heads;
  double eps;
};
// Applies norm and rotation to queries and keys, and leaves values as they are: qkv [tokens, (heads + 2 kv_heads) *
// dim]
// -> [tokens, heads + 2 kv_heads, dim].
torch::Tensor rotate(const torch::Tensor& qkv, const Rotation& rotation);

// silu(gate) * up
torch::Tensor gated(const torch::Tensor& gate, const torch::Tensor& up);

enum class AttentionWay {
  kKernels,   // model/training_kernels, on a CPU
  kFused,     // scaled_dot_product_attention() of libtorch 2.2 and newer
  kProducts,  // libtorch's products, a block of queries at a time
};
// The fastest way there is: kKernels on a CPU, elsewhere kFused where libtorch has it.
AttentionWay attention_way(const torch::Device& device);

// Attention over packed tokens: qkv [tokens, heads + 2 kv_heads, dim], the scale of the scores in queries and keys
// -> [tokens, heads * dim]. Memory is linear in tokens, in the backward pass too: scores exist for a block at a time.
torch::Tensor attend_packed(const torch::Tensor& qkv, std::int64_t heads, std::int64_t kv_heads,
                            const torch::Tensor& segments, AttentionWay way);

// log softmax(hidden weight^T / temperature) at the targets, and the entropy, without gradient. Logits exist for a
// bounded number of rows at a time, in the backward pass too.
struct LinearScores {
  torch::Tensor logprobs, entropy;  // fp32 [rows]
};
LinearScores linear_scores(const torch::Tensor& hidden, const torch::Tensor& weight, const torch::Tensor& targets,
                           double temperature);

}  // namespace echoline::model
