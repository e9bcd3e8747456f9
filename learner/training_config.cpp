// Names and ranges of the loss and optimizer settings, for run files and the trainer.
#include "learner/training_config.hpp"

#include <cmath>
#include <utility>

namespace echoline::learner {
namespace {

// The published losses, each written as its differences from an earlier one; docs/losses.md names the papers.
const std::vector<std::pair<std::string_view, LossConfig>>& named_losses() {
  static const std::vector<std::pair<std::string_view, LossConfig>> losses = [] {
    const LossConfig dapo;  // the members' defaults
    LossConfig grpo = dapo;
    grpo.clip_high = 0.2;
    grpo.aggregation = Aggregation::kSequenceMean;
    LossConfig dr_grpo = grpo;
    dr_grpo.advantage_scale = AdvantageScale::kNone;
    dr_grpo.aggregation = Aggregation::kFixedLength;
    LossConfig rloo = dapo;
    rloo.baseline = Baseline::kLeaveOneOut;
    rloo.advantage_scale = AdvantageScale::kNone;
    rloo.trust_region = TrustRegion::kNone;
    rloo.aggregation = Aggregation::kSequenceSum;
    LossConfig opo = rloo;
    opo.baseline = Baseline::kLengthWeighted;
    LossConfig gspo = grpo;
    gspo.ratio_level = Level::kSequence;
    gspo.clip_low = 3e-4;  // narrow, because its ratio is a mean over the response's tokens, and stays close to 1
    gspo.clip_high = 4e-4;
    LossConfig cispo = dapo;
    cispo.trust_region = TrustRegion::kDetachedClip;
    cispo.clip_low = 1.0;  // no lower limit, because no ratio is below 0
    cispo.clip_high = 4.0;
    LossConfig tis = dapo;
    tis.trust_region = TrustRegion::kNone;
    LossConfig tis_sequence = tis;
    tis_sequence.importance_level = Level::kSequence;
    LossConfig m2po = dapo;
    m2po.trust_region = TrustRegion::kSecondMoment;
    return std::vector<std::pair<std::string_view, LossConfig>>{
        {"dapo", dapo},   {"grpo", grpo}, {"dr_grpo", dr_grpo},           {"rloo", rloo}, {"opo", opo}, {"gspo", gspo},
        {"cispo", cispo}, {"tis", tis},   {"tis_sequence", tis_sequence}, {"m2po", m2po}};
  }();
  return losses;
}

}  // namespace

std::optional<LossConfig> loss_named(std::string_view name) {
  for (const auto& [loss_name, config] : named_losses())
    if (loss_name == name) return config;
  return std::nullopt;
}

const std::vector<std::string_view>& loss_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> all;
    for (const auto& [name, config] : named_losses()) all.push_back(name);
    return all;
  }();
  return names;
}

Status validate(const LossConfig& config) {
  const auto out_of_range = [](const char* name, const char* expected, double value) {
    return fail(Code::kInvalid, "loss settings", "{} must be {}, found {}", name, expected, value);
  };
  if (!(config.clip_low >= 0 && config.clip_low <= 1)) return out_of_range("clip_low", "in [0, 1]", config.clip_low);
  if (!(config.clip_high >= 0)) return out_of_range("clip_high", "at least 0", config.clip_high);
  if (!(config.second_moment_max > 0)) return out_of_range("second_moment_max", "above 0", config.second_moment_max);
  if (!(config.importance_cap >= 1)) return out_of_range("importance_cap", "at least 1", config.importance_cap);
  if (!(config.kl_coefficient >= 0)) return out_of_range("kl_coefficient", "at least 0", config.kl_coefficient);
  if (!(config.advantage_epsilon > 0)) return out_of_range("advantage_epsilon", "above 0", config.advantage_epsilon);
  if (config.fixed_length < 1)
    return out_of_range("fixed_length", "at least 1", static_cast<double>(config.fixed_length));
  return ok();
}

Status validate(const OptimizerConfig& config) {
  const auto out_of_range = [](const char* name, const char* expected, double value) {
    return fail(Code::kInvalid, "optimizer settings", "{} must be {}, found {}", name, expected, value);
  };
  if (!(config.learning_rate > 0 && std::isfinite(config.learning_rate)))
    return out_of_range("learning_rate", "above 0", config.learning_rate);
  if (!(config.beta1 >= 0 && config.beta1 < 1)) return out_of_range("beta1", "in [0, 1)", config.beta1);
  if (!(config.beta2 >= 0 && config.beta2 < 1)) return out_of_range("beta2", "in [0, 1)", config.beta2);
  if (!(config.epsilon > 0)) return out_of_range("epsilon", "above 0", config.epsilon);
  if (!(config.weight_decay >= 0)) return out_of_range("weight_decay", "at least 0", config.weight_decay);
  if (!(config.gradient_norm_max > 0)) return out_of_range("gradient_norm_max", "above 0", config.gradient_norm_max);
  if (config.warmup_updates < 0)
    return out_of_range("warmup_updates", "at least 0", static_cast<double>(config.warmup_updates));
  if (!(config.final_share >= 0 && config.final_share <= 1))
    return out_of_range("final_share", "in [0, 1]", config.final_share);
  if (config.schedule != Schedule::kConstant && config.updates_expected <= config.warmup_updates)
    return out_of_range("updates_expected", "more than the warm-up's", static_cast<double>(config.updates_expected));
  return ok();
}

}  // namespace echoline::learner
