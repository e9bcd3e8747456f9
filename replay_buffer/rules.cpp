// The rules of pacing and leases, for LeaseCore and JobLedger.
#include "replay_buffer/rules.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::replay_buffer {

namespace {

// Learner steps, including the current one, whose batches may contain work of a version, by each bound: S, L and the
// end of the run.
struct StepsAllowed {
  std::uint64_t by_budget, by_lookahead, by_run;
};

StepsAllowed steps_allowed(const Pacing& pacing, std::uint64_t step, Version version) {
  // So that the product in room() does not overflow.
  constexpr std::uint64_t kStepsNewerMax = 1u << 30, kStepsMax = UINT32_MAX;
  StepsAllowed allowed{.by_budget = 0,
                       .by_lookahead = std::uint64_t{pacing.staleness.lookahead_steps()} + 1,
                       .by_run = kStepsMax};  // no limit
  if (version.value >= step)
    allowed.by_budget = std::min<std::uint64_t>(version.value - step, kStepsNewerMax) + pacing.staleness.budget + 1;
  else if (admissible(step, version, pacing.staleness.budget))
    allowed.by_budget = pacing.staleness.budget + 1 - (step - version.value);
  if (pacing.steps_total) allowed.by_run = *pacing.steps_total > step ? *pacing.steps_total - step : 0;
  return allowed;
}

}  // namespace

bool admissible(std::uint64_t step, Version version, std::uint32_t staleness_budget) {
  return step <= version.value || step - version.value <= staleness_budget;
}

Version oldest_admissible(std::uint64_t step, std::uint32_t staleness_budget) {
  return Version{step - std::min<std::uint64_t>(step, staleness_budget)};
}

std::uint64_t room(const Pacing& pacing, std::uint64_t step, Version version, std::uint64_t ahead) {
  const StepsAllowed allowed = steps_allowed(pacing, step, version);
  const std::uint64_t ahead_max =
      std::min({allowed.by_budget, allowed.by_lookahead, allowed.by_run}) * pacing.trajectories_per_step;
  return ahead_max > ahead ? ahead_max - ahead : 0;
}

std::optional<Bound> limiting_bound(const Pacing& pacing, std::uint64_t step, Version version) {
  const StepsAllowed allowed = steps_allowed(pacing, step, version);
  if (allowed.by_run < std::min(allowed.by_budget, allowed.by_lookahead)) return std::nullopt;
  return allowed.by_budget <= allowed.by_lookahead ? Bound::kBudget : Bound::kLookahead;
}

void LimitedStepCounter::record(Bound bound, std::uint64_t step) {
  LimitedSteps& limited = by_bound_[static_cast<std::size_t>(bound)];
  if (limited.newest_step != step) ++limited.count;
  limited.newest_step = step;
}

std::uint64_t stranded(const Pacing& pacing, std::uint64_t step, std::span<const VersionStock> stock) {
  std::uint64_t step_needs = pacing.trajectories_per_step;  // trajectories that the step still takes
  std::uint64_t remaining = 0, live = 0;  // sums over versions <= the entry's: what the step leaves, and the live part
  std::uint64_t stranded_max = 0;
  for (const VersionStock& entry : stock) {
    const std::uint64_t trained_on = std::min(step_needs, entry.waiting);
    step_needs -= trained_on;
    live += entry.live;
    remaining += entry.waiting - trained_on + entry.live;
    const std::uint64_t last_step = entry.version.value + pacing.staleness.budget;
    const std::uint64_t usable = last_step > step ? (last_step - step) * pacing.trajectories_per_step : 0;
    // Only live trajectories can be stranded, so the excess counts up to their number.
    if (remaining > usable) stranded_max = std::max(stranded_max, std::min(remaining - usable, live));
  }
  return stranded_max;
}

std::uint32_t staleness_worst(std::uint32_t staleness_budget, std::uint32_t publish_every,
                              std::uint32_t lookahead_steps, std::uint32_t lag_steps) {
  const std::uint64_t worst = std::uint64_t{publish_every} - 1 + lag_steps + lookahead_steps;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(staleness_budget, worst));
}

std::uint32_t staleness_budget_min(std::uint32_t publish_every) { return publish_every - std::min(publish_every, 1u); }

double lease_seconds(const LeaseLength& length, std::optional<double> seconds_per_token,
                     std::optional<double> median_seconds_per_token) {
  constexpr double kResponses = 2;            // times of a longest response in a lease
  constexpr double kResponsesUnmeasured = 8;  // the same for a worker that may be slower than the median
  if (seconds_per_token)
    return std::clamp(kResponses * *seconds_per_token * length.tokens_max, seconds(length.limits.min),
                      seconds(length.limits.max));
  if (!median_seconds_per_token) return seconds(length.limits.first);
  return std::clamp(kResponsesUnmeasured * *median_seconds_per_token * length.tokens_max, seconds(length.limits.min),
                    seconds(length.limits.first));
}

double patience_seconds(const LeaseLength& length, std::optional<double> batch_seconds,
                        std::optional<double> median_batch_seconds, std::optional<double> usable_s) {
  constexpr double kPatienceMinS = 1;      // margin for a busy machine or network
  constexpr double kMeasuredFactor = 2.5;  // times the worker's own time from grant to result
  constexpr double kUnmeasuredFactor = 4;  // times the measured workers' median: this one may be slower than they are
  const double max_s = seconds(length.limits.max);
  double patience_s = std::min(seconds(length.limits.first), max_s);
  if (batch_seconds)
    patience_s = std::min(kMeasuredFactor * *batch_seconds, max_s);
  else if (median_batch_seconds)
    patience_s = std::min(kUnmeasuredFactor * *median_batch_seconds, patience_s);
  if (usable_s) patience_s = std::min(patience_s, *usable_s);
  return std::max(patience_s, std::min(kPatienceMinS, max_s));
}

double renewed_expiry(const LeaseLength& length, double granted_unix_s, double now_unix_s, double lease_s) {
  return std::min(granted_unix_s + seconds(length.limits.max), now_unix_s + lease_s);
}

bool can_finish_in_time(const Pacing& pacing, std::uint64_t step, Version version, double batch_seconds,
                        double step_seconds) {
  const double age = version.value >= step ? 0 : static_cast<double>(step - version.value);
  return batch_seconds <= (pacing.staleness.budget + 1.0 - age) * step_seconds;
}

std::uint64_t groups_held_max(std::uint64_t stock_groups, double groups_per_s, double fleet_groups_per_s) {
  // No rate is known: the worker may hold the whole stock.
  if (!(fleet_groups_per_s > 0)) return std::max<std::uint64_t>(1, stock_groups);
  const double share = std::clamp(groups_per_s / fleet_groups_per_s, 0.0, 1.0);
  const double twice_share_groups = std::ceil(2 * share * static_cast<double>(stock_groups));
  return std::max<std::uint64_t>(1, static_cast<std::uint64_t>(twice_share_groups));
}

std::uint64_t initial_group_allowance(const LeaseLength& length, const Pacing& pacing) {
  constexpr std::uint32_t kStepDivisor = 8;  // an eighth of a step's groups
  return length.initial_groups.value_or(std::max<std::uint32_t>(1, pacing.groups_per_step() / kStepDivisor));
}

std::uint64_t group_allowance_after_results(std::uint64_t allowance, std::uint64_t results) {
  constexpr std::uint64_t kAllowanceMax = 1u << 30;  // groups; far below an overflow
  return std::min(allowance + results, kAllowanceMax);
}

std::uint64_t group_allowance_after_lapse(std::uint64_t allowance) { return std::max<std::uint64_t>(1, allowance / 2); }

std::optional<double> median(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double capped_rate(double rate, std::optional<double> median_rate) {
  constexpr double kMediansMax = 4;
  return median_rate && *median_rate > 0 ? std::min(rate, kMediansMax * *median_rate) : rate;
}

double counted_work_seconds(double reported_s, double leased_s) {
  // A worker that reports too little work looks fast. Half of its time with leases limits that to a factor of two.
  return std::max(reported_s, leased_s / 2);
}

std::uint32_t weight_after_lapse(std::uint32_t weight, LapseKind kind) {
  // A lost worker counts half, because honest workers are lost too.
  constexpr std::uint32_t kExpiredWeight = 4, kLostWeight = 2;
  return weight + (kind == LapseKind::kExpired ? kExpiredWeight : kLostWeight);
}

bool must_set_aside(std::uint32_t failures, std::uint32_t workers_lost) {
  return failures >= kFailuresMax || workers_lost >= kLossesMax;
}

std::optional<std::string_view> refusal(const std::optional<LeaseRecord>& lease, const Claim& claim,
                                        double now_unix_s) {
  if (!lease) return "unknown lease";
  if (lease->worker != claim.worker) return "lease of another worker";
  switch (lease->state) {
    case LeaseState::kSettled:
      return "lease already settled";
    case LeaseState::kReleased:
      return "lease released";
    case LeaseState::kExpired:
      return "lease expired";
    case LeaseState::kLive:
      break;
  }
  if (!(now_unix_s <= lease->expires_unix_s)) return "lease expired";
  if (claim.version < lease->version) return "wrong version";
  if (lease->policy_digest != claim.policy_digest) return "wrong digest";
  return std::nullopt;
}

}  // namespace echoline::replay_buffer
