// Policy losses on token level, put together from parts; docs/losses.md has the formulas of those with a name. Pure
// tensor functions.
//
// A batch holds whole groups; group g has G responses to one prompt with rewards R_1..R_G. Response i has tokens t with
// log-probabilities under three policies: the current one θ (differentiated), the proximal one "old" (θ when the
// learner step began), and the behaviour policy μ that generated the token, possibly several versions ago. Four parts,
// each chosen by a setting; [x] is held constant:
//
//   advantage    A_i = (R_i − b_i) / s         b: mean of the group, of the others in it, or weighted by length;
//                                              s: std R + ε, or 1. Zero for a group of equal rewards
//   trust        clip           J = [w]·min(r·A, clip(r, 1−clip_low, 1+clip_high)·A)
//   region       detached clip  J = [w·clip(r, 1−clip_low, 1+clip_high)]·A·log π_θ
//                second moment  J = [w·k]·A·log π_θ     k: 0 for the tokens that carry a response's mean of
//                                              (log π_θ/π_μ)² above the bound, largest first, where A would widen it
//                none           J = [w]·A·log π_θ
//   level        r = π_θ/π_old, and w = min(π_old/π_μ, C), without clip min(π_θ/π_μ, C): truncated so that variance
//                stays bounded. Of each token, or for the whole response: r the geometric mean over its tokens, w the
//                product
//   aggregation  loss = −Σ m·a·J   a: 1/(tokens of the minibatch), 1/(sequences · tokens of i), 1/sequences,
//                1/(sequences · fixed length); m is the loss mask
//
// The divergence from a reference policy, with d = log π_ref − log π_θ: k2 = d²/2 and k3 = e^d − d − 1 are subtracted
// from J with weight β; k1 = −d is held constant and subtracted from A, as a part of the reward would be.
#pragma once
#include <cstdint>
#include <vector>

#include "base/result.hpp"
#include "learner/training_config.hpp"
#include "model/torch.hpp"

namespace echoline::learner {

// Advantages of `rewards` laid out group after group, `group_size` each (population standard deviation). `lengths`, in
// tokens, are of the same responses; only Baseline::kLengthWeighted asks for them. All equal rewards give exactly zero.
// kInvalid for an incomplete group, groups of fewer than two, or a reward that is not finite.
Result<std::vector<double>> group_advantages(const std::vector<double>& rewards, std::size_t group_size,
                                             const LossConfig& config, const std::vector<double>& lengths = {});

struct LossInputs {
  torch::Tensor log_probs;            // [batch, tokens], differentiable: log π_θ
  torch::Tensor proximal_log_probs;   // [batch, tokens], or undefined: log_probs detached (r = 1)
  torch::Tensor behaviour_log_probs;  // [batch, tokens]: log π_μ as the worker recorded it
  torch::Tensor reference_log_probs;  // [batch, tokens], needed only when kl_coefficient > 0
  torch::Tensor advantages;           // [batch]
  torch::Tensor mask;                 // [batch, tokens], 1 for tokens that count
};

// Sums over counted tokens, so that micro-batches add up; means are taken at the end.
struct LossStatistics {
  double tokens = 0;
  double clipped = 0;           // tokens whose gradient the trust region cuts, or bounds
  double capped = 0;            // tokens whose importance weight was truncated
  double ratio_sum = 0;         // Σ π_θ/π_μ, log-ratios held to ±20 here and below
  double ratio_square_sum = 0;  // Σ (π_θ/π_μ)²
  double behaviour_kl_sum = 0;  // Σ k3 estimate of KL(π_μ ‖ π_θ)
  double reference_kl_sum = 0;  // Σ k3 of the reference policy
  double entropy_sum = 0;       // Σ entropy of π_θ at the token, filled in by the caller
  LossStatistics& operator+=(const LossStatistics& other);
};

struct LossResult {
  torch::Tensor loss;  // scalar, differentiable
  torch::Tensor sums;  // [kLossSums], where the inputs are: what statistics() reads
  // Waits for the device where the inputs are on one.
  LossStatistics statistics() const;
};
constexpr std::int64_t kLossSums = 7;
// Of LossResult::sums in fp64 on the CPU.
LossStatistics statistics_of(const double* sums);

// What the whole minibatch counts, so that the losses of its micro-batches sum to the minibatch's loss.
struct MinibatchSize {
  std::int64_t sequences = 0;
  std::int64_t tokens = 0;
};

// Any floating dtype. Values under the mask's zeros are ignored, even when they are not finite.
LossResult policy_loss(const LossInputs& inputs, MinibatchSize minibatch, const LossConfig& config);

}  // namespace echoline::learner
