// Settings of the loss and the optimizer; their meaning is in loss.hpp and optimizer.hpp. Free of libtorch, so that
// reading a run file does not need it.
#pragma once
#include <cstdint>

#include "base/result.hpp"

namespace echoline::learner {

enum class AdvantageScale { kStd, kNone };  // divide by the group's standard deviation, or only centre
enum class Aggregation { kTokenMean, kSequenceMean };
// What becomes of responses that the length limit cut: train on them like on others, leave their tokens out of the loss
// (their reward still counts in the group's mean), or subtract a penalty from their reward.
enum class Truncated { kKeep, kMask, kPenalty };

struct LossConfig {
  AdvantageScale advantage_scale = AdvantageScale::kStd;
  double advantage_epsilon = 1e-6;
  double clip_low = 0.2;        // in [0, 1)
  double clip_high = 0.28;      // >= 0
  double importance_cap = 2.0;  // C, >= 1
  double kl_coefficient = 0.0;  // β; 0 needs no reference policy
  Aggregation aggregation = Aggregation::kTokenMean;
};

// kInvalid with the name and the value of the first setting out of range.
Status validate(const LossConfig& config);

struct OptimizerConfig {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
  double gradient_norm_max = 1.0;
  std::int64_t warmup_updates = 0;  // update n of the first `warmup_updates` runs at n/warmup_updates of the rate
};

// kInvalid with the name and the value of the first setting out of range.
Status validate(const OptimizerConfig& config);

}  // namespace echoline::learner
