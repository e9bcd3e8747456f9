// Operations of a training pass on a GPU, with their gradients. They use our kernels (model/cuda/training_device) or
// libtorch's flash attention. Private to model/.
#pragma once
#include "model/packed.hpp"
#include "model/training_ops.hpp"

namespace echoline::model {

// As rms_norm() and gated() of model/training_ops, for tensors for which training::kernels_support() holds.
torch::Tensor rms_norm_on_device(const torch::Tensor& x, const torch::Tensor& weight, double eps);
torch::Tensor gated_on_device(const torch::Tensor& gate, const torch::Tensor& up);

// Returns the normalised sum x + addend, and the sum itself; if `addend` is undefined, the sum is x. On a GPU, this
// takes one kernel, and one for the gradients; elsewhere an addition and rms_norm() of model/training_ops.
std::pair<torch::Tensor, torch::Tensor> norm_and_sum(const torch::Tensor& x, const torch::Tensor& addend,
                                                     const torch::Tensor& weight, double eps);
// silu(x gate^T) * x up^T, computed with one product. `gate` and `up` are views of `joint_weight`, whose gradient goes
// to these two parameters.
torch::Tensor joint_gated(const torch::Tensor& x, const torch::Tensor& joint_weight, const torch::Tensor& gate,
                          const torch::Tensor& up);
bool supports_joint_gated(const torch::Tensor& x, const torch::Tensor& joint_weight);

bool supports_rotate_on_device(const torch::Tensor& qkv, const Rotation& rotation);
torch::Tensor rotate_on_device(const torch::Tensor& qkv, const Rotation& rotation);

// x[rows], for `rows` int64 without repetition.
torch::Tensor select_rows(const torch::Tensor& x, const torch::Tensor& rows);

// The keys that each segment (model/segment.hpp) attends to, for attention over all segments in one call. A segment's
// keys are those of its prefix followed by its own. Its last query sees all of them, the query before it all but the
// last, and so on.
struct AttentionPlan {
  torch::Tensor queries_first, keys_first;     // int32 [segments + 1]: index of each segment's first query and key; the
                                               // last entry is the number of all
  std::int64_t queries_max = 0, keys_max = 0;  // most of one segment
  // int32 [keys]: the token of each key. A token of a prefix has a key in each segment that begins with it. Undefined
  // if key i is that of token i for every i.
  torch::Tensor rows;
  // The keys of each token, whose gradients the backward pass adds up: those of token t are copies[copies_first[t]] to
  // copies[copies_first[t + 1] - 1]. int32 [tokens + 1], [keys]; undefined like `rows`.
  torch::Tensor copies_first, copies;
};
// Makes the plan for segments as in pack(). With `gathers`, `rows` and `copies` are defined even if no segment has a
// prefix.
AttentionPlan attention_plan(const torch::Tensor& segments, bool gathers, const torch::Device& device);

// Whether attend_on_device() can be used, which requires bf16 and a libtorch with flash attention.
bool supports_attend_on_device(const torch::Tensor& qkv, const Rotation& rotation);
// Applies norm, rotation and attention: qkv [tokens, (heads + 2 kv_heads) * dim] -> [tokens, heads * dim].
torch::Tensor attend_on_device(const torch::Tensor& qkv, const Rotation& rotation, const AttentionPlan& plan);

// linear_scores_on_device() has the result of linear_scores() of model/training_ops.
bool supports_scores_on_device(const torch::Tensor& hidden, const torch::Tensor& weight);
LinearScores linear_scores_on_device(const torch::Tensor& hidden, const torch::Tensor& weight,
                                     const torch::Tensor& targets, double temperature);

}  // namespace echoline::model
