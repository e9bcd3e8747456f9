// The formulas for M* and staleness.
#include "provisioner/capacity.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "capacity target";

// Rounds up, unless the fraction is so small that it is only a rounding error. At most kStepsMax, so that sums fit an
// int.
int ceil_steps(double steps) {
  constexpr double kStepsMax = 1e6;
  steps = std::min(kStepsMax, steps);
  const double rounding_error = 1e-9 * std::max(1.0, steps);
  return static_cast<int>(std::ceil(steps - rounding_error));
}

Status check(const LearnerPace& pace, const PublicationTimes& times, const CapacityTerms& terms) {
  if (!(std::isfinite(pace.rollouts_per_step) && pace.rollouts_per_step > 0))
    return fail(Code::kInvalid, kOperation, "R must be positive, found {} rollouts per step", pace.rollouts_per_step);
  if (pace.publish_every < 1)
    return fail(Code::kInvalid, kOperation, "kappa must be at least 1 step, found {}", pace.publish_every);
  if (pace.step_time <= Duration{})
    return fail(Code::kInvalid, kOperation, "T must be positive, found {}", to_text(pace.step_time));
  if (times.broadcast < Duration{})
    return fail(Code::kInvalid, kOperation, "T_b must not be negative, found {}", to_text(times.broadcast));
  if (times.install < Duration{})
    return fail(Code::kInvalid, kOperation, "the install time must not be negative, found {}", to_text(times.install));
  if (!(std::isfinite(terms.headroom) && terms.headroom >= 0))
    return fail(Code::kInvalid, kOperation, "the headroom must not be negative, found {}", terms.headroom);
  return ok();
}

// The time of a publication period in which no worker generates.
Duration pause_of(const PublicationTimes& times, CapacityRule rule) {
  return rule == CapacityRule::kEcho2 ? times.broadcast : times.install;
}

// The learner steps that have time for one broadcast and the next batch, by S. Absent if S does not limit M*.
std::optional<int> steps_by_budget(const LearnerPace& pace, const CapacityTerms& terms) {
  if (terms.rule == CapacityRule::kEcho2 || !terms.staleness_budget || *terms.staleness_budget < pace.publish_every)
    return std::nullopt;
  return *terms.staleness_budget - pace.publish_every + 1;
}

}  // namespace

std::string_view to_string(CapacityRule rule) { return rule == CapacityRule::kEcho2 ? "echo2" : "overlap"; }

Result<CapacityTarget> capacity_target(const LearnerPace& pace, const PublicationTimes& times,
                                       const CapacityTerms& terms) {
  ECHO_TRY(check(pace, times, terms));
  const Duration period = pace.publish_every * pace.step_time, pause = pause_of(times, terms.rule);
  if (pause >= period) {
    const bool is_broadcast = terms.rule == CapacityRule::kEcho2;
    const auto publish_every_min = pause / pace.step_time + 1;
    return fail(Code::kInfeasible, kOperation,
                "{} takes {} and a publication period only kappa*T = {} x {} = {}. No time is left to generate; "
                "publish every {} steps or more, or bring it below {}{}",
                is_broadcast ? "a broadcast, in which engines stop (fleet.capacity_rule: echo2),"
                             : "the installation of a policy (fleet.install_time_expected)",
                to_text(pause), pace.publish_every, to_text(pace.step_time), to_text(period), publish_every_min,
                to_text(period), is_broadcast ? " (smaller delta, faster links, shorter chains)" : "");
  }
  double required = pace.publish_every * pace.rollouts_per_step / seconds(period - pause);
  if (const auto steps = steps_by_budget(pace, terms)) {
    const Duration usable_time = *steps * pace.step_time;
    if (times.broadcast >= usable_time)
      return fail(Code::kInfeasible, kOperation,
                  "a broadcast takes T_b = {}. S = {} with kappa = {} leaves it and the next batch only {} x T = {}. "
                  "Allow S = {} or more, publish more often, or shorten the broadcast (smaller delta, faster links, "
                  "another topology)",
                  to_text(times.broadcast), *terms.staleness_budget, pace.publish_every, *steps, to_text(usable_time),
                  pace.publish_every + times.broadcast / pace.step_time);
    required = std::max(required, pace.rollouts_per_step / seconds(usable_time - times.broadcast));
  }
  return CapacityTarget{.required_rollouts_per_s = required,
                        .provisioned_rollouts_per_s = (1 + terms.headroom) * required};
}

PublicationTimes half_of_longest_publication_times(const LearnerPace& pace, const CapacityTerms& terms) {
  const Duration period = pace.publish_every * pace.step_time;
  PublicationTimes times{.broadcast = period / 2, .install = period / 2};
  if (const auto steps = steps_by_budget(pace, terms)) times.broadcast = *steps * pace.step_time / 2;
  return times;
}

int needed_staleness(const LearnerPace& pace, Duration broadcast_time, double rollouts_per_s) {
  ECHO_CHECK(rollouts_per_s > 0 && pace.step_time > Duration{});
  const double steps = (pace.rollouts_per_step / rollouts_per_s + seconds(broadcast_time)) / seconds(pace.step_time);
  return pace.publish_every - 1 + ceil_steps(steps);
}

int staleness_lag(Duration step_time, Duration arrival, Duration overtaken_by) {
  ECHO_CHECK(step_time > Duration{});
  const auto steps_in = [&](Duration time) { return ceil_steps(seconds(time) / seconds(step_time)); };
  return steps_in(arrival) + steps_in(overtaken_by);
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
