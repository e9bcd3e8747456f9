// The GRPO policy loss on token level, with truncated importance weights for off-policy tokens. Pure tensor functions.
//
// A batch holds whole groups; group g has G responses to one prompt with rewards R_1..R_G. Response i has tokens t with
// log-probabilities under three policies: the current one θ (differentiated), the proximal one "old" (θ when the
// learner step began), and the behaviour policy μ that generated the token, possibly several versions ago.
//
//   A_i    = (R_i − mean R) / (std R + ε)          or  R_i − mean R; every token of response i shares A_i
//   r_it   = π_θ / π_old                           trust region of this learner step; 1 on its first update
//   w_it   = min(π_old / π_μ, C), detached         corrects for staleness, truncated at C so that variance stays
//   bounded J_it   = w_it · min(r_it·A_i, clip(r_it, 1−clip_low, 1+clip_high)·A_i) K_it   = exp(d) − d − 1,  d = log
//   π_ref − log π_θ        ("k3" estimate of KL(π_θ ‖ π_ref), never negative) loss   = − Σ_it m_it·a_it·(J_it − β·K_it)
//
// m is the loss mask; a is 1/(tokens of the whole minibatch) for token mean, 1/(sequences · tokens of response i) for
// sequence mean. With one update per step r = 1, and the gradient is the truncated-importance-sampling policy gradient
// −a·w·A·∇log π_θ. Sources: GRPO (Shao et al. 2024), asymmetric clipping and token mean (DAPO, Yu et al. 2025),
// decoupled proximal policy (Hilton et al. 2022), truncated importance sampling (Ionides 2008; ECHO-2 for stale
// rollouts).
#pragma once
#include <cstdint>
#include <vector>

#include "base/result.hpp"
#include "learner/training_config.hpp"
#include "model/torch.hpp"

namespace echoline::learner {

// Advantages of `rewards` laid out group after group, `group_size` each (population standard deviation). All equal
// rewards give exactly zero. kInvalid for an incomplete group, groups of fewer than two, or a reward that is not
// finite.
Result<std::vector<double>> group_advantages(const std::vector<double>& rewards, std::size_t group_size,
                                             const LossConfig& config);

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
  double clipped = 0;           // tokens whose ratio left the trust region on the side that the clip cuts
  double capped = 0;            // tokens whose importance weight was truncated
  double ratio_sum = 0;         // Σ π_θ/π_μ, log-ratios held to ±20 here and below
  double behaviour_kl_sum = 0;  // Σ k3 estimate of KL(π_μ ‖ π_θ)
  double reference_kl_sum = 0;  // Σ K_it
  double entropy_sum = 0;       // Σ entropy of π_θ at the token, filled in by the caller
  LossStatistics& operator+=(const LossStatistics& other);
};

struct LossResult {
  torch::Tensor loss;  // scalar, differentiable
  LossStatistics statistics;
};

// What the whole minibatch counts, so that the losses of its micro-batches sum to the minibatch's loss.
struct MinibatchSize {
  std::int64_t sequences = 0;
  std::int64_t tokens = 0;
};

// Any floating dtype. Values under the mask's zeros are ignored, even when they are not finite.
LossResult policy_loss(const LossInputs& inputs, MinibatchSize minibatch, const LossConfig& config);

}  // namespace echoline::learner
