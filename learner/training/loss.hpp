// Token-level policy losses, built from four parts. docs/losses.md has the formulas of the named losses. Pure tensor
// functions.
//
// A batch holds whole groups; group g has G responses to one prompt with rewards R_1..R_G. The tokens t of response i
// have log-probabilities under three policies: the current θ (differentiated), the proximal "old" (θ at the start of
// the learner step), and the behaviour policy μ. Policy μ generated the token, possibly several versions ago. In the
// formulas, r is the probability ratio, w an importance weight, C its cap, and [x] is held constant. Settings choose
// each of the four parts:
//
//   advantage    A_i = (R_i − b_i) / s         b: mean of the group, of the others in it, or weighted by length;
//                                              s: std R + ε, or 1. Zero for a group of equal rewards
//
//   level        r = π_θ/π_old; w = min(π_old/π_μ, C) with either clip, and min(π_θ/π_μ, C) otherwise. C bounds the
//                variance of w. Each is per token or per response: then r is the geometric mean over the response's
//                tokens, and w the product
//
//   trust region:
//                clip           J = [w]·min(r·A, clip(r, 1−clip_low, 1+clip_high)·A)
//                detached clip  J = [w·clip(r, 1−clip_low, 1+clip_high)]·A·log π_θ
//                second moment  J = [w·k]·A·log π_θ
//                none           J = [w]·A·log π_θ
//
//                If a response's mean of (log π_θ/π_μ)² exceeds the bound, its tokens with the largest terms get k = 0
//                until the mean of the others is within the bound. Only tokens that the update would move further from
//                π_μ are chosen. All other tokens have k = 1.
//
//   aggregation  loss = −Σ m·a·J   a: 1/(tokens of the minibatch), 1/(sequences · tokens of i), 1/sequences,
//                1/(sequences · fixed length); m is the loss mask
//
// The divergence from a reference policy uses d = log π_ref − log π_θ. k2 = d²/2 and k3 = e^d − d − 1 are subtracted
// from J with weight β. k1 = −d is held constant and subtracted from A, like a part of the reward.
#pragma once
#include <cstdint>
#include <vector>

#include "base/result.hpp"
#include "learner/training_config.hpp"
#include "model/torch.hpp"

namespace echoline::learner {

// Advantages of `rewards` in group order, `group_size` per group (population standard deviation). `lengths`: tokens of
// the same responses; only Baseline::kLengthWeighted needs them. Equal rewards give exactly zero. kInvalid for an
// incomplete group, a group of fewer than two, or a reward that is not finite.
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

// Sums over counted tokens, so that micro-batches can be added; means are taken at the end.
struct LossStatistics {
  double tokens = 0;
  double clipped = 0;           // tokens whose gradient the trust region removes or bounds
  double capped = 0;            // tokens whose importance weight was truncated
  double ratio_sum = 0;         // Σ π_θ/π_μ; log-ratios are clamped to ±20 here and below
  double ratio_square_sum = 0;  // Σ (π_θ/π_μ)²
  double behaviour_kl_sum = 0;  // Σ k3 estimate of KL(π_μ ‖ π_θ)
  double reference_kl_sum = 0;  // Σ k3 estimate of KL(π_θ ‖ π_ref)
  double entropy_sum = 0;       // Σ entropy of π_θ at the token, filled in by the caller
  LossStatistics& operator+=(const LossStatistics& other);
};

struct LossResult {
  torch::Tensor loss;  // scalar, differentiable
  torch::Tensor sums;  // [kLossSums], on the inputs' device; statistics() reads them
  // If the inputs are on a device, waits for it.
  LossStatistics statistics() const;
};
constexpr std::int64_t kLossSums = 7;  // the fields of LossStatistics in order, without entropy_sum
// Statistics from LossResult::sums in fp64 on the CPU.
LossStatistics statistics_of(const double* sums);

// The counts of a whole minibatch. With them, the losses of its micro-batches add up to the minibatch's loss.
struct MinibatchSize {
  std::int64_t sequences = 0;
  std::int64_t tokens = 0;
};

// Accepts any floating dtype. Values where the mask is zero are ignored, even if they are not finite.
LossResult policy_loss(const LossInputs& inputs, MinibatchSize minibatch, const LossConfig& config);

}  // namespace echoline::learner
