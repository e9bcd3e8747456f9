// The formulas for M* and staleness; plans and FleetCore call them.
#include "provisioner/capacity.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "capacity target";

// Rounds up, unless the fraction is so small that it is only rounding error.
int ceil_steps(double steps) { return static_cast<int>(std::ceil(steps - 1e-9 * std::max(1.0, steps))); }

}  // namespace

Result<CapacityTarget> capacity_target(const LearnerPace& pace, Duration broadcast_time, double headroom) {
  if (!(std::isfinite(pace.rollouts_per_step) && pace.rollouts_per_step > 0))
    return fail(Code::kInvalid, kOperation, "R must be positive, found {} rollouts per step", pace.rollouts_per_step);
  if (pace.publish_every < 1)
    return fail(Code::kInvalid, kOperation, "kappa must be at least 1 step, found {}", pace.publish_every);
  if (pace.step_time <= Duration{})
    return fail(Code::kInvalid, kOperation, "T must be positive, found {}", to_text(pace.step_time));
  if (broadcast_time < Duration{})
    return fail(Code::kInvalid, kOperation, "T_b must not be negative, found {}", to_text(broadcast_time));
  if (!(std::isfinite(headroom) && headroom >= 0))
    return fail(Code::kInvalid, kOperation, "the headroom must not be negative, found {}", headroom);

  const double period_s = pace.publish_every * seconds(pace.step_time);
  const double generating_s = period_s - seconds(broadcast_time);
  if (generating_s <= 0) {
    const auto kappa_min = broadcast_time / pace.step_time + 1;
    return fail(Code::kInfeasible, kOperation,
                "a broadcast takes T_b = {} and a publication period only kappa*T = {} x {} = {}. No time is left to "
                "generate; publish every {} steps or more, or bring T_b below {} (smaller delta, faster links, shorter "
                "chains)",
                to_text(broadcast_time), pace.publish_every, to_text(pace.step_time),
                to_text(pace.publish_every * pace.step_time), kappa_min, to_text(pace.publish_every * pace.step_time));
  }
  CapacityTarget target;
  target.required_rollouts_per_s = pace.publish_every * pace.rollouts_per_step / generating_s;
  target.provisioned_rollouts_per_s = (1 + headroom) * target.required_rollouts_per_s;
  return target;
}

int needed_staleness(const LearnerPace& pace, Duration broadcast_time, double rollouts_per_s) {
  ECHO_CHECK(rollouts_per_s > 0 && pace.step_time > Duration{});
  const double steps = (pace.rollouts_per_step / rollouts_per_s + seconds(broadcast_time)) / seconds(pace.step_time);
  return pace.publish_every - 1 + ceil_steps(steps);
}

int staleness_lag(Duration step_time, Duration arrival, Duration overtaken_by) {
  ECHO_CHECK(step_time > Duration{});
  constexpr double kStepsMax = 1e6;  // so that the result fits an int
  const auto steps = [&](Duration d) { return ceil_steps(std::min(kStepsMax, seconds(d) / seconds(step_time))); };
  return steps(arrival) + steps(overtaken_by);
}

Status check_staleness_budget(int staleness_budget, int publish_every) {
  if (staleness_budget >= publish_every - 1) return ok();
  return fail(
      Code::kInvalid, "staleness budget",
      "S = {} is too small for kappa = {}: rollouts of the newest policy would be too old before the next one is "
      "published; set S to {} or more, or publish at least every {} steps",
      staleness_budget, publish_every, publish_every, staleness_budget + 1);
}

}  // namespace echoline::provisioner
