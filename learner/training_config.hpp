// Settings of the loss and the optimizer; their meaning is in loss.hpp and optimizer.hpp. Free of libtorch, so that
// reading a run file does not need it.
#pragma once
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace echoline::learner {

// The baseline that is subtracted from a response's reward. It is the mean of its group, the mean of the others in the
// group, or the mean weighted by length. The last has the least variance if every token adds to the gradient.
enum class Baseline { kMean, kLeaveOneOut, kLengthWeighted };
enum class AdvantageScale { kStd, kNone };  // divide by the group's standard deviation, or only centre
enum class Level { kToken, kSequence };     // one ratio per token, or per response
enum class TrustRegion { kClip, kDetachedClip, kSecondMoment, kNone };
enum class Aggregation { kTokenMean, kSequenceMean, kSequenceSum, kFixedLength };
enum class KlForm { kK1, kK2, kK3 };
// The treatment of responses cut by the length limit. kKeep: they are trained on like others. kMask: their tokens are
// left out of the loss, but their reward counts in the group's mean. kPenalty: a penalty is subtracted from their
// reward.
enum class Truncated { kKeep, kMask, kPenalty };

struct LossConfig {
  Baseline baseline = Baseline::kMean;
  AdvantageScale advantage_scale = AdvantageScale::kStd;
  double advantage_epsilon = 1e-6;  // added to the standard deviation, which may be 0
  Level ratio_level = Level::kToken;
  TrustRegion trust_region = TrustRegion::kClip;
  double clip_low = 0.2;            // in [0, 1]
  double clip_high = 0.28;          // >= 0
  double second_moment_max = 0.04;  // for TrustRegion::kSecondMoment, > 0
  Level importance_level = Level::kToken;
  double importance_cap = 2.0;  // C, >= 1
  double kl_coefficient = 0.0;  // β; 0 needs no reference policy
  KlForm kl_form = KlForm::kK3;
  Aggregation aggregation = Aggregation::kTokenMean;
  std::int64_t fixed_length = 1;  // tokens, for Aggregation::kFixedLength
};

// kInvalid with the name and the value of the first setting out of range.
Status validate(const LossConfig& config);

// Whether the loss needs the policy at the start of the learner step.
inline bool needs_proximal(const LossConfig& config) {
  return config.trust_region == TrustRegion::kClip || config.trust_region == TrustRegion::kDetachedClip;
}

// The loss with this name (docs/losses.md); absent for an unknown name. The first of loss_names() is LossConfig{}.
std::optional<LossConfig> loss_named(std::string_view name);
const std::vector<std::string_view>& loss_names();

enum class Schedule { kConstant, kLinear, kCosine };  // of the learning rate, after the warm-up
enum class Moments { kFp32, kInt8 };                  // storage of AdamW's moments

// Defaults of learner.learning_rate. The rate for a new model would destroy a pretrained one.
inline constexpr double kLearningRateOfNewModel = 1e-3;
inline constexpr double kLearningRateOfLoadedModel = 1e-6;
inline constexpr double kLearningRateFactorUsual = 30;  // rates further from the default cause a warning

struct OptimizerConfig {
  double learning_rate = kLearningRateOfNewModel;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;  // of AdamW, in the denominator
  double weight_decay = 0.0;
  double gradient_norm_max = 1.0;
  std::int64_t warmup_updates = 0;  // update n of the warm-up, counted from 1, has n/warmup_updates of the rate
  Schedule schedule = Schedule::kConstant;
  std::int64_t updates_expected = 0;  // after so many updates, the rate is `final_share` of learning_rate
  double final_share = 0.0;           // in [0, 1]
  Moments moments = Moments::kFp32;
  bool on_host = false;  // masters and moments in host memory, if the parameters are on a device
};

enum class Compute { kFp32, kBf16 };  // type of weights and activations in training

// Settings of the built-in trainer's learner step, from the run file's section `learner`.
struct TrainingSettings {
  LossConfig loss;
  OptimizerConfig optimizer;
  std::uint32_t minibatches = 1;           // optimizer updates per pass over the batch; groups stay whole
  std::int64_t microbatch_tokens = 8192;   // tokens in one forward and backward pass; bounds memory
  Truncated truncated = Truncated::kKeep;  // responses cut by the length limit
  double truncated_penalty = 1.0;          // subtracted from their reward with Truncated::kPenalty
  bool router_replay = true;               // in a mixture of experts, train with the experts that the engine used
};

// kInvalid with the name and the value of the first setting out of range.
Status validate(const OptimizerConfig& config);

}  // namespace echoline::learner
