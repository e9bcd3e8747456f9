// Operations of a pass, with hand-written gradients. They keep less memory between the forward and the backward pass
// than libtorch's, and on a CPU read and write it less often. They use model/training_kernels in fp32 on a CPU,
// device_ops for values on a GPU that its kernels support, otherwise libtorch's functions. Private to model/.
#pragma once
#include "model/packed.hpp"

namespace echoline::model {

// x / rms(x) * weight over the last dimension, computed in fp32. The result has the type of x, and is rounded before
// the product if the weight has this type, too.
torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight, double eps);

// x joint_weight^T. `joint_weight` consists of the rows of q, k and v, the weights of queries, keys and values. Its
// gradient goes to these three parameters.
torch::Tensor joint_product(const torch::Tensor& x, const torch::Tensor& joint_weight, const torch::Tensor& q,
                            const torch::Tensor& k, const torch::Tensor& v);

struct Rotation {
  // fp32 [positions, dim]. Token t uses row t % positions, so that sequences of `positions` tokens can be concatenated.
  // The first half of each row of sin is negated: the rotation is x * cos + (halves of x swapped) * sin. The model's
  // cos and sin contain the root of the scale of the scores.
  torch::Tensor cos, sin;
  torch::Tensor q_norm, k_norm;  // [dim], or undefined
  std::int64_t heads, kv_heads;
  double eps;
};
// Applies norm and rotation to queries and keys, and copies values: qkv [tokens, (heads + 2 kv_heads) * dim] ->
// [tokens, heads + 2 kv_heads, dim].
torch::Tensor rotate(const torch::Tensor& qkv, const Rotation& rotation);

// silu(gate) * up
torch::Tensor gated(const torch::Tensor& gate, const torch::Tensor& up);
// gelu(gate) * up, with the approximation of GELU by tanh.
torch::Tensor gelu_gated(const torch::Tensor& gate, const torch::Tensor& up);

// Implementations of attention.
enum class AttentionMethod {
  kKernels,   // model/training_kernels, on a CPU
  kFused,     // scaled_dot_product_attention() of libtorch 2.2 and newer
  kProducts,  // libtorch's products, a block of queries at a time
};
// kKernels on a CPU, elsewhere kFused if libtorch has it and there is no window.
AttentionMethod fastest_attention(const torch::Device& device, bool has_window = false);

// Attention over packed tokens by `segments` (model/packed): qkv [tokens, heads + 2 kv_heads, dim] -> [tokens, heads *
// dim]. Does not scale the scores: queries and keys have got the root of the scale each by their rotation.
// With a `window`, a token attends to the last `window` tokens that it would attend to without; kFused has none. Memory
// is linear in the number of tokens, also in the backward pass, because scores are computed in blocks.
torch::Tensor attend_packed(const torch::Tensor& qkv, std::int64_t heads, std::int64_t kv_heads,
                            const torch::Tensor& segments, AttentionMethod method, std::int64_t window = 0);

// log softmax(hidden weight^T / temperature) at the targets, and the entropy of the distribution, which has no
// gradient. Logits are computed for a bounded number of rows at a time, also in the backward pass.
struct LinearScores {
  torch::Tensor logprobs, entropy;  // fp32 [rows]
};
LinearScores linear_scores(const torch::Tensor& hidden, const torch::Tensor& weight, const torch::Tensor& targets,
                           double temperature);

}  // namespace echoline::model
