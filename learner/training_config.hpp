// Settings of the loss and the optimizer; their meaning is in loss.hpp and optimizer.hpp. Free of libtorch, so that
// reading a run file does not need it.
#pragma once
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace echoline::learner {

// What a response's reward is compared with: the mean of its group, the mean of the others in it, or the mean weighted
// by length, which has the least variance where every token adds to the gradient.
enum class Baseline { kMean, kLeaveOneOut, kLengthWeighted };
enum class AdvantageScale { kStd, kNone };  // divide by the group's standard deviation, or only centre
enum class Level { kToken, kSequence };     // a ratio of each token, or one of the whole response
enum class TrustRegion { kClip, kDetachedClip, kSecondMoment, kNone };
enum class Aggregation { kTokenMean, kSequenceMean, kSequenceSum, kFixedLength };
enum class KlForm { kK1, kK2, kK3 };
// What becomes of responses that the length limit cut: train on them like on others, leave their tokens out of the loss
// (their reward still counts in the group's mean), or subtract a penalty from their reward.
enum class Truncated { kKeep, kMask, kPenalty };

struct LossConfig {
  Baseline baseline = Baseline::kMean;
  AdvantageScale advantage_scale = AdvantageScale::kStd;
  double advantage_epsilon = 1e-6;
  Level ratio_level = Level::kToken;
  TrustRegion trust_region = TrustRegion::kClip;
  double clip_low = 0.2;            // in [0, 1]
  double clip_high = 0.28;          // >= 0
  double second_moment_max = 0.04;  // of TrustRegion::kSecondMoment, > 0
  Level importance_level = Level::kToken;
  double importance_cap = 2.0;  // C, >= 1
  double kl_coefficient = 0.0;  // β; 0 needs no reference policy
  KlForm kl_form = KlForm::kK3;
  Aggregation aggregation = Aggregation::kTokenMean;
  std::int64_t fixed_length = 1;  // tokens, of Aggregation::kFixedLength
};

// kInvalid with the name and the value of the first setting out of range.
Status validate(const LossConfig& config);

// Whether the loss asks what the policy was when the learner step began.
inline bool needs_proximal(const LossConfig& config) {
  return config.trust_region == TrustRegion::kClip || config.trust_region == TrustRegion::kDetachedClip;
}

// The loss that goes by `name` (docs/losses.md); absent where none does. The first of the names is LossConfig{}.
std::optional<LossConfig> loss_named(std::string_view name);
const std::vector<std::string_view>& loss_names();

enum class Schedule { kConstant, kLinear, kCosine };  // of the learning rate, after the warm-up
enum class Moments { kFp32, kInt8 };                  // what the moments of AdamW are kept in

// Defaults of learner.learning_rate. The rate that a new model needs destroys a pretrained one.
inline constexpr double kLearningRateOfNewModel = 1e-3;
inline constexpr double kLearningRateOfLoadedModel = 1e-6;
inline constexpr double kLearningRateFactorUsual = 30;  // a rate this many times away from its default is warned of

struct OptimizerConfig {
  double learning_rate = kLearningRateOfNewModel;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
  double gradient_norm_max = 1.0;
  std::int64_t warmup_updates = 0;  // update n of the first `warmup_updates` runs at n/warmup_updates of the rate
  Schedule schedule = Schedule::kConstant;
  std::int64_t updates_expected = 0;  // at which the decay ends, at `final_share` of the rate
  double final_share = 0.0;           // in [0, 1]
  Moments moments = Moments::kFp32;
  bool on_host = false;  // masters and moments in the host's memory, where the parameters are on a device
};

enum class Compute { kFp32, kBf16 };  // weights and activations in training

// What the built-in trainer does in a learner step, as the run file's section `learner` says it.
struct TrainingSettings {
  LossConfig loss;
  OptimizerConfig optimizer;
  std::uint32_t minibatches = 1;           // optimizer updates per pass over the batch; groups stay whole
  std::int64_t microbatch_tokens = 8192;   // tokens in one forward and backward pass; bounds memory
  Truncated truncated = Truncated::kKeep;  // responses cut by the length limit
  double truncated_penalty = 1.0;          // subtracted from their reward by Truncated::kPenalty
};

// kInvalid with the name and the value of the first setting out of range.
Status validate(const OptimizerConfig& config);

}  // namespace echoline::learner
