#include "replay_buffer/rules.hpp"

#include <algorithm>
#include <cmath>

#include "base/result.hpp"

namespace echoline::replay_buffer {

bool admissible(std::uint64_t step, Version version, std::uint32_t staleness_budget) {
  return step <= version.value || step - version.value <= staleness_budget;
}

std::uint64_t room(const Pacing& pacing, std::uint64_t step, Version version, std::uint64_t ahead) {
  if (!admissible(step, version, pacing.staleness_budget)) return 0;
  // Steps, the current one included, whose batches may hold this version; saturates far below overflow.
  const std::uint64_t fresh_steps =
      version.value >= step ? std::min<std::uint64_t>(version.value - step, 1u << 30) + pacing.staleness_budget + 1
                            : pacing.staleness_budget + 1 - (step - version.value);
  std::uint64_t steps = std::min<std::uint64_t>(fresh_steps, std::uint64_t{pacing.lookahead_steps} + 1);
  if (pacing.steps_total) steps = std::min(steps, *pacing.steps_total > step ? *pacing.steps_total - step : 0);
  const std::uint64_t bound = steps * pacing.trajectories_per_step;
  return bound > ahead ? bound - ahead : 0;
}

std::uint64_t stranded(const Pacing& pacing, std::uint64_t step, std::span<const VersionStock> stock) {
  std::uint64_t batch = pacing.trajectories_per_step;  // what the step still takes
  std::uint64_t remaining = 0, live = 0, lost = 0;     // of versions up to this one
  for (const VersionStock& entry : stock) {
    const std::uint64_t taken = std::min(batch, entry.waiting);
    batch -= taken;
    live += entry.live;
    remaining += entry.waiting - taken + entry.live;
    const std::uint64_t last_step = entry.version.value + pacing.staleness_budget;
    const std::uint64_t usable = last_step > step ? (last_step - step) * pacing.trajectories_per_step : 0;
    if (remaining > usable) lost = std::max(lost, std::min(remaining - usable, live));
  }
  return lost;
}

double lease_seconds(const LeaseLength& length, std::span<double> completion_s) {
  if (completion_s.empty()) return length.lease_s_max;
  const auto middle = completion_s.begin() + static_cast<std::ptrdiff_t>(completion_s.size() / 2);
  std::nth_element(completion_s.begin(), middle, completion_s.end());
  return std::clamp(2.5 * *middle, length.lease_s_min, length.lease_s_max);
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
  if (lease->version != claim.version) return "wrong version";
  if (lease->policy_digest != claim.policy_digest) return "wrong digest";
  return std::nullopt;
}

void allocate(std::uint64_t total, std::span<WorkerShare> workers) {
  double sum = 0;
  std::uint64_t eligible = 0;
  WorkerShare* fastest = nullptr;
  for (WorkerShare& w : workers) {
    w.groups = 0;
    ECHO_CHECK(std::isfinite(w.tokens_per_s) && w.tokens_per_s >= 0, "worker {}: {} tokens/s", w.worker,
               w.tokens_per_s);
    if (!w.eligible) {
      w.tokens_per_s *= kIneligibleDecay;
      continue;
    }
    ++eligible;
    sum += w.tokens_per_s;
    if (fastest == nullptr || w.tokens_per_s > fastest->tokens_per_s ||
        (w.tokens_per_s == fastest->tokens_per_s && w.worker < fastest->worker))
      fastest = &w;
  }
  if (fastest == nullptr) return;
  std::uint64_t given = 0;
  for (WorkerShare& w : workers) {
    if (!w.eligible) continue;
    // Rounding of the quotient must not give out more than there is.
    w.groups =
        sum > 0 ? static_cast<std::uint64_t>(static_cast<double>(total) * w.tokens_per_s / sum) : total / eligible;
    w.groups = std::min(w.groups, total - given);
    given += w.groups;
  }
  fastest->groups += total - given;
}

double updated_throughput(std::optional<double> tokens_per_s, std::uint64_t tokens, double elapsed_s) {
  ECHO_CHECK(elapsed_s > 0, "elapsed {} s", elapsed_s);
  const double measured = static_cast<double>(tokens) / elapsed_s;
  return tokens_per_s ? kThroughputKeep * *tokens_per_s + (1 - kThroughputKeep) * measured : measured;
}

}  // namespace echoline::replay_buffer
