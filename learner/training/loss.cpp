// The policy loss. Trainer calls it for every micro-batch.
#include "learner/training/loss.hpp"

#include <cmath>

namespace echoline::learner {
namespace {

constexpr double kLogRatioMax = 20;  // larger log-ratios only mean "very large"; exp() stays finite

// k3 estimate of KL(p ‖ q) from samples of p, given log q − log p.
torch::Tensor k3(const torch::Tensor& difference) { return difference.exp() - difference - 1.0; }

// Tokens that the second-moment region leaves out. In each response, these are the tokens with the largest squared
// log-ratio, until the mean of the rest is at most `second_moment_max`. Only tokens that the update would move further
// away are left out.
torch::Tensor outside_second_moment(const torch::Tensor& log_ratio, const torch::Tensor& advantages,
                                    const torch::Tensor& mask, double second_moment_max) {
  const torch::Tensor squared_log_ratio = log_ratio.square() * mask;
  const torch::Tensor widens = (log_ratio * advantages > 0) & (mask > 0);
  // -1 marks tokens that must stay, so they come last.
  const auto [largest, order] =
      torch::where(widens, squared_log_ratio, -torch::ones_like(squared_log_ratio)).sort(1, /*descending=*/true);
  // Column i decides on the token with the i-th largest term, when the i larger ones are removed. It is removed if the
  // mean of the tokens left still exceeds the limit.
  const torch::Tensor sum_removed_before = largest.clamp_min(0).cumsum(1) - largest.clamp_min(0);
  const torch::Tensor tokens_left = mask.sum(1, /*keepdim=*/true) - torch::arange(mask.size(1), mask.options());
  const torch::Tensor is_removed = (largest >= 0) & (squared_log_ratio.sum(1, /*keepdim=*/true) - sum_removed_before >
                                                     second_moment_max * tokens_left.clamp_min(1.0));
  // cumprod: removal ends at the first token that stays.
  return torch::zeros_like(mask).scatter(1, order, is_removed.to(mask.dtype()).cumprod(1)) > 0;
}

}  // namespace

Result<std::vector<double>> group_advantages(const std::vector<double>& rewards, std::size_t group_size,
                                             const LossConfig& config, const std::vector<double>& lengths) {
  constexpr auto kOperation = "group advantages";
  if (group_size < 2)
    return fail(Code::kInvalid, kOperation, "a group needs at least 2 responses to compare, found {}", group_size);
  if (rewards.size() % group_size != 0)
    return fail(Code::kInvalid, kOperation, "{} rewards are not whole groups of {}", rewards.size(), group_size);
  const bool by_length = config.baseline == Baseline::kLengthWeighted;
  if (by_length && lengths.size() != rewards.size())
    return fail(Code::kInvalid, kOperation, "{} lengths for {} rewards", lengths.size(), rewards.size());
  std::vector<double> advantages(rewards.size(), 0.0);
  const auto size = static_cast<double>(group_size);
  for (std::size_t first = 0; first < rewards.size(); first += group_size) {
    double mean = 0, variance = 0, length_weighted_sum = 0, tokens = 0;
    bool all_equal = true;
    for (std::size_t i = first; i < first + group_size; ++i) {
      if (!std::isfinite(rewards[i]))
        return fail(Code::kInvalid, kOperation, "reward {} is {}, expected a finite number", i, rewards[i]);
      mean += rewards[i] / size;
      if (by_length) {
        length_weighted_sum += rewards[i] * lengths[i];
        tokens += lengths[i];
      }
      all_equal = all_equal && rewards[i] == rewards[first];
    }
    if (all_equal) continue;  // exactly zero, not rounding noise divided by a tiny deviation
    for (std::size_t i = first; i < first + group_size; ++i)
      variance += (rewards[i] - mean) * (rewards[i] - mean) / size;
    const double scale =
        config.advantage_scale == AdvantageScale::kStd ? std::sqrt(variance) + config.advantage_epsilon : 1.0;
    const double baseline = by_length && tokens > 0 ? length_weighted_sum / tokens : mean;
    // R_i minus the mean of the others is G/(G-1) times R_i minus the mean of all.
    const double leave_one_out_factor = config.baseline == Baseline::kLeaveOneOut ? size / (size - 1) : 1.0;
    for (std::size_t i = first; i < first + group_size; ++i)
      advantages[i] = leave_one_out_factor * (rewards[i] - baseline) / scale;
  }
  return advantages;
}

LossStatistics& LossStatistics::operator+=(const LossStatistics& other) {
  tokens += other.tokens;
  clipped += other.clipped;
  capped += other.capped;
  ratio_sum += other.ratio_sum;
  ratio_square_sum += other.ratio_square_sum;
  behaviour_kl_sum += other.behaviour_kl_sum;
  reference_kl_sum += other.reference_kl_sum;
  entropy_sum += other.entropy_sum;
  return *this;
}

LossResult policy_loss(const LossInputs& inputs, MinibatchSize minibatch, const LossConfig& config) {
  ECHO_CHECK(minibatch.sequences > 0 && minibatch.tokens > 0, "an empty minibatch has no loss");
  const torch::Tensor is_counted = inputs.mask > 0;
  // Padding may hold any value; zeros there keep exp() and its gradient finite.
  const auto zero_padding = [&](const torch::Tensor& values) {
    return torch::where(is_counted, values, torch::zeros_like(values));
  };
  const torch::Tensor current = zero_padding(inputs.log_probs);
  const torch::Tensor detached = current.detach();
  const torch::Tensor proximal =
      inputs.proximal_log_probs.defined() ? zero_padding(inputs.proximal_log_probs) : detached;
  const torch::Tensor behaviour = zero_padding(inputs.behaviour_log_probs);
  const torch::Tensor mask = is_counted.to(current.dtype());
  const torch::Tensor response_tokens = mask.sum(1, /*keepdim=*/true).clamp_min(1.0);
  const auto sum_over_response = [&](const torch::Tensor& values) {
    return (values * mask).sum(1, /*keepdim=*/true).expand_as(mask);
  };

  // In the formulas of loss.hpp, `weight` is w, `ratio` is r, `objective` is J, and `scale` is m·a.
  torch::Tensor log_importance = (needs_proximal(config) ? proximal : detached) - behaviour;
  if (config.importance_level == Level::kSequence) log_importance = sum_over_response(log_importance);
  const torch::Tensor importance = log_importance.clamp_max(kLogRatioMax).exp();
  const torch::Tensor weight = importance.clamp_max(config.importance_cap);
  torch::Tensor log_ratio = current - proximal;
  if (config.ratio_level == Level::kSequence) log_ratio = sum_over_response(log_ratio) / response_tokens;
  const torch::Tensor ratio = log_ratio.exp();

  torch::Tensor advantages = inputs.advantages.to(current.dtype()).unsqueeze(1);
  torch::Tensor reference_kl, penalty;
  if (config.kl_coefficient > 0) {
    ECHO_CHECK(inputs.reference_log_probs.defined(), "kl_coefficient > 0 needs reference log-probabilities");
    const torch::Tensor difference = zero_padding(inputs.reference_log_probs) - current;
    reference_kl = k3(difference);
    if (config.kl_form == KlForm::kK1) advantages = advantages + config.kl_coefficient * difference.detach();
    if (config.kl_form == KlForm::kK2) penalty = difference.square() / 2;
    if (config.kl_form == KlForm::kK3) penalty = reference_kl;
  }
  const torch::Tensor clipped_ratio = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high);
  torch::Tensor objective, outside_region;  // outside_region: tokens that the trust region holds back
  {
    torch::NoGradGuard no_gradient;
    if (config.trust_region == TrustRegion::kClip)
      outside_region =
          ((advantages > 0) & (ratio > 1.0 + config.clip_high)) | ((advantages < 0) & (ratio < 1.0 - config.clip_low));
    else if (config.trust_region == TrustRegion::kDetachedClip)
      outside_region = ratio != clipped_ratio;
    else if (config.trust_region == TrustRegion::kSecondMoment)
      outside_region = outside_second_moment(detached - behaviour, advantages, mask, config.second_moment_max);
    else
      outside_region = torch::zeros_like(is_counted);
  }
  switch (config.trust_region) {
    case TrustRegion::kClip:
      objective = weight * torch::minimum(ratio * advantages, clipped_ratio * advantages);
      break;
    case TrustRegion::kDetachedClip:
      objective = weight * clipped_ratio.detach() * advantages * current;
      break;
    case TrustRegion::kSecondMoment:
      objective = weight * outside_region.logical_not().to(mask.dtype()) * advantages * current;
      break;
    case TrustRegion::kNone:
      objective = weight * advantages * current;
      break;
  }
  if (penalty.defined()) objective = objective - config.kl_coefficient * penalty;
  const auto sequences = static_cast<double>(minibatch.sequences);
  torch::Tensor scale;
  switch (config.aggregation) {
    case Aggregation::kTokenMean:
      scale = mask / static_cast<double>(minibatch.tokens);
      break;
    case Aggregation::kSequenceMean:
      scale = mask / (response_tokens * sequences);
      break;
    case Aggregation::kSequenceSum:
      scale = mask / sequences;
      break;
    case Aggregation::kFixedLength:
      scale = mask / (sequences * static_cast<double>(config.fixed_length));
      break;
  }

  LossResult result;
  result.loss = -(objective * scale).sum();

  torch::NoGradGuard no_gradient;
  const torch::Tensor behaviour_log_ratio = (detached - behaviour).clamp(-kLogRatioMax, kLogRatioMax);
  const torch::Tensor zero = torch::zeros({}, mask.options());
  // statistics_of() reads the sums in this order.
  result.sums = torch::stack({mask.sum(), (outside_region.to(mask.dtype()) * mask).sum(),
                              ((importance > config.importance_cap).to(mask.dtype()) * mask).sum(),
                              (behaviour_log_ratio.exp() * mask).sum(), ((2 * behaviour_log_ratio).exp() * mask).sum(),
                              (k3(behaviour_log_ratio) * mask).sum(),
                              reference_kl.defined() ? (reference_kl.detach() * mask).sum() : zero});
  return result;
}

// The order is that in which policy_loss() makes LossResult::sums.
LossStatistics statistics_of(const double* sums) {
  LossStatistics statistics;
  statistics.tokens = sums[0];
  statistics.clipped = sums[1];
  statistics.capped = sums[2];
  statistics.ratio_sum = sums[3];
  statistics.ratio_square_sum = sums[4];
  statistics.behaviour_kl_sum = sums[5];
  statistics.reference_kl_sum = sums[6];
  return statistics;
}

LossStatistics LossResult::statistics() const {
  const torch::Tensor cpu_sums = sums.to(torch::kCPU, torch::kDouble);
  return statistics_of(cpu_sums.data_ptr<double>());
}

}  // namespace echoline::learner
