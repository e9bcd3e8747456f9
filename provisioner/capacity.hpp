// How much rollout capacity keeps the learner busy, and how stale a rollout can get.
#pragma once
#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline::provisioner {

// One learner's steady state.
struct LearnerPace {
  double rollouts_per_step = 0;  // R
  int publish_every = 1;         // kappa, steps between publications
  Duration step_time{};          // T
};

struct CapacityTarget {
  double required_rollouts_per_s = 0;     // M*
  double provisioned_rollouts_per_s = 0;  // (1 + headroom) * M*
};

// M* = kappa*R / (kappa*T - T_b): the least capacity for which one publication period holds the rollouts and the
// broadcast. kInfeasible when T_b >= kappa*T, naming the smallest kappa and the T_b to stay below. kInvalid for R or T
// that is not positive, kappa < 1, T_b or headroom negative. (ECHO-2 sec. 3.3)
Result<CapacityTarget> capacity_target(const LearnerPace& pace, Duration broadcast_time, double headroom = 0.10);

// Least staleness budget under which the learner never waits, with fleet capacity M: a batch under a new policy can
// exist k = ceil((R/M + T_b)/T) steps after it, and until then only older ones: kappa - 1 + k. (ECHO-2 App. B)
int needed_staleness(const LearnerPace& pace, Duration broadcast_time, double rollouts_per_s);

// For how many steps a rollout can be older than the pacing of the work makes it (replay_buffer/rules,
// staleness_worst): until the last worker generates with a version that was published, and while a group of the slowest
// worker lets batches through that were asked for later and came earlier. `overtaken_by`: how much longer it takes than
// the fastest.
int staleness_lag(Duration step_time, Duration arrival, Duration overtaken_by);

// kInvalid unless S >= kappa - 1: with a smaller budget, the newest published policy is too old before the next one
// appears, and the learner waits for ever. S = kappa - 1 is strictly on-policy within a period: the learner waits after
// each publication until a batch under it is there.
Status check_staleness_budget(int staleness_budget, int publish_every);

}  // namespace echoline::provisioner
