// The parts of a training pass on a GPU, with their gradients, that have kernels of their own
// (model/cuda/training_device) or use libtorch's flash attention. Private to model/.
#pragma once
#include "model/packed.hpp"
#include "model/training_ops.hpp"

namespace echoline::model {

// As in model/training_ops, for tensors x for which training::kernels_support(x) holds.
torch::Tensor rms_norm_on_device(const torch::Tensor& x, const torch::Tensor& weight, double eps);
torch::Tensor gated_on_device(const torch::Tensor& gate, const torch::Tensor& up);

// Returns the norm of the sum x + addend (of x if `addend` is undefined), and the sum itself. On a GPU, that is one
// kernel, and one for the gradients; elsewhere rms_norm() of model/training_ops and an addition.
std::pair<torch::Tensor, torch::Tensor> norm_and_sum(const torch::Tensor& x, const torch::Tensor& addend,
                                                     const torch::Tensor& weight, double eps);
// silu(x gate^T) * x up^T. `gate` and `up` are views of `joint_weight` and the parameters that receive the gradient.
torch::Tensor joint_gated(const torch::Tensor& x, const torch::Tensor& joint_weight, const torch::Tensor& gate,
                          const torch::Tensor& up);
bool supports_joint_gated(const torch::Tensor& x, const torch::Tensor& joint_weight);

bool supports_rotate_on_device(const torch::Tensor& qkv, const Rotation& rotation);
torch::Tensor rotate_on_device(const torch::Tensor& qkv, const Rotation& rotation);

// x[rows]; rows: int64 without repetition.
torch::Tensor select_rows(const torch::Tensor& x, const torch::Tensor& rows);

// The keys that each segment sees, for attention over all segments in one call. A segment's keys are those of its
// prefix followed by its own. Its last query sees all of them, the query before it all but the last, and so on.
struct AttentionPlan {
  torch::Tensor queries_first, keys_first;  // int32 [segments + 1]: each segment's first query and key; then the end
  std::int64_t queries_max = 0, keys_max = 0;
  torch::Tensor rows;                  // int32 [keys]: the token of each key; undefined if the keys are the tokens
  torch::Tensor copies_first, copies;  // int32 [tokens + 1], [keys]: the keys of each token; undefined like `rows`
};
// With `gathers`, `rows` is defined even if every segment's keys are its own tokens.
AttentionPlan attention_plan(const torch::Tensor& segments, bool gathers, const torch::Device& device);

// Requires bf16, and a libtorch with flash attention.
bool supports_attend_on_device(const torch::Tensor& qkv, const Rotation& rotation);
// Rotation and attention: qkv [tokens, (heads + 2 kv_heads) * dim] -> [tokens, heads * dim].
torch::Tensor attend_on_device(const torch::Tensor& qkv, const Rotation& rotation, const AttentionPlan& plan);

// Like linear_scores() of model/training_ops.
bool supports_scores_on_device(const torch::Tensor& hidden, const torch::Tensor& weight);
LinearScores linear_scores_on_device(const torch::Tensor& hidden, const torch::Tensor& weight,
                                     const torch::Tensor& targets, double temperature);

}  // namespace echoline::model
