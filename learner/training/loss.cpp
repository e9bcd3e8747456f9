#include "learner/training/loss.hpp"

#include <cmath>

namespace echoline::learner {
namespace {

constexpr double kLogRatioMax = 20;  // log-ratios beyond it only matter as "very large"; exp() stays finite

// k3 estimate of KL(p ‖ q) from samples of p, given log q − log p.
torch::Tensor k3(const torch::Tensor& difference) { return difference.exp() - difference - 1.0; }

double sum_of(const torch::Tensor& values) { return values.sum().item<double>(); }

}  // namespace

Status validate(const LossConfig& config) {
  const auto bad = [](const char* name, const char* expected, double found) {
    return fail(Code::kInvalid, "loss settings", "{} must be {}, found {}", name, expected, found);
  };
  if (!(config.clip_low >= 0 && config.clip_low < 1)) return bad("clip_low", "in [0, 1)", config.clip_low);
  if (!(config.clip_high >= 0)) return bad("clip_high", "at least 0", config.clip_high);
  if (!(config.importance_cap >= 1)) return bad("importance_cap", "at least 1", config.importance_cap);
  if (!(config.kl_coefficient >= 0)) return bad("kl_coefficient", "at least 0", config.kl_coefficient);
  if (!(config.advantage_epsilon > 0)) return bad("advantage_epsilon", "above 0", config.advantage_epsilon);
  return ok();
}

Result<std::vector<double>> group_advantages(const std::vector<double>& rewards, std::size_t group_size,
                                             const LossConfig& config) {
  constexpr auto kOperation = "group advantages";
  if (group_size < 2)
    return fail(Code::kInvalid, kOperation, "a group needs at least 2 responses to compare, found {}", group_size);
  if (rewards.size() % group_size != 0)
    return fail(Code::kInvalid, kOperation, "{} rewards are not whole groups of {}", rewards.size(), group_size);
  std::vector<double> advantages(rewards.size(), 0.0);
  const auto size = static_cast<double>(group_size);
  for (std::size_t first = 0; first < rewards.size(); first += group_size) {
    double mean = 0, variance = 0;
    bool equal = true;
    for (std::size_t i = first; i < first + group_size; ++i) {
      if (!std::isfinite(rewards[i]))
        return fail(Code::kInvalid, kOperation, "reward {} is {}, expected a finite number", i, rewards[i]);
      mean += rewards[i] / size;
      equal = equal && rewards[i] == rewards[first];
    }
    if (equal) continue;  // exactly zero, not rounding noise divided by a tiny deviation
    for (std::size_t i = first; i < first + group_size; ++i)
      variance += (rewards[i] - mean) * (rewards[i] - mean) / size;
    const double scale =
        config.advantage_scale == AdvantageScale::kStd ? std::sqrt(variance) + config.advantage_epsilon : 1.0;
    for (std::size_t i = first; i < first + group_size; ++i) advantages[i] = (rewards[i] - mean) / scale;
  }
  return advantages;
}

LossStatistics& LossStatistics::operator+=(const LossStatistics& other) {
  tokens += other.tokens;
  clipped += other.clipped;
  capped += other.capped;
  ratio_sum += other.ratio_sum;
  behaviour_kl_sum += other.behaviour_kl_sum;
  reference_kl_sum += other.reference_kl_sum;
  entropy_sum += other.entropy_sum;
  return *this;
}

LossResult policy_loss(const LossInputs& inputs, MinibatchSize minibatch, const LossConfig& config) {
  ECHO_CHECK(minibatch.sequences > 0 && minibatch.tokens > 0, "an empty minibatch has no loss");
  const torch::Tensor counted = inputs.mask > 0;
  // Padding may hold anything; zeros there keep exp() and its gradient finite.
  const auto padded = [&](const torch::Tensor& t) { return torch::where(counted, t, torch::zeros_like(t)); };
  const torch::Tensor current = padded(inputs.log_probs);
  const torch::Tensor detached = current.detach();
  const torch::Tensor proximal = inputs.proximal_log_probs.defined() ? padded(inputs.proximal_log_probs) : detached;
  const torch::Tensor behaviour = padded(inputs.behaviour_log_probs);
  const torch::Tensor mask = counted.to(current.dtype());
  const torch::Tensor advantages = inputs.advantages.to(current.dtype()).unsqueeze(1);

  const torch::Tensor importance = (proximal - behaviour).clamp_max(kLogRatioMax).exp();
  const torch::Tensor weight = importance.clamp_max(config.importance_cap);
  const torch::Tensor ratio = (current - proximal).exp();
  const torch::Tensor bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high);
  torch::Tensor objective = weight * torch::minimum(ratio * advantages, bounded * advantages);
  torch::Tensor reference_kl;
  if (config.kl_coefficient > 0) {
    ECHO_CHECK(inputs.reference_log_probs.defined(), "kl_coefficient > 0 needs reference log-probabilities");
    reference_kl = k3(padded(inputs.reference_log_probs) - current);
    objective = objective - config.kl_coefficient * reference_kl;
  }
  torch::Tensor scale = mask / static_cast<double>(minibatch.tokens);
  if (config.aggregation == Aggregation::kSequenceMean)
    scale = mask / (mask.sum(1, true).clamp_min(1.0) * static_cast<double>(minibatch.sequences));

  LossResult result;
  result.loss = -(objective * scale).sum();

  torch::NoGradGuard no_gradient;
  const torch::Tensor r = ratio.detach();
  const torch::Tensor drift = (detached - behaviour).clamp(-kLogRatioMax, kLogRatioMax);
  const torch::Tensor cut =
      ((advantages > 0) & (r > 1.0 + config.clip_high)) | ((advantages < 0) & (r < 1.0 - config.clip_low));
  result.statistics.tokens = sum_of(mask);
  result.statistics.clipped = sum_of(cut.to(mask.dtype()) * mask);
  result.statistics.capped = sum_of((importance > config.importance_cap).to(mask.dtype()) * mask);
  result.statistics.ratio_sum = sum_of(drift.exp() * mask);
  result.statistics.behaviour_kl_sum = sum_of(k3(drift) * mask);
  if (reference_kl.defined()) result.statistics.reference_kl_sum = sum_of(reference_kl.detach() * mask);
  return result;
}

}  // namespace echoline::learner
