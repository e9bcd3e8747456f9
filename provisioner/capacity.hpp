// Computes the rollout capacity that keeps the learner busy, and the staleness of rollouts.
#pragma once
#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline::provisioner {

// One learner's steady state. The letters are those of the formulas below.
struct LearnerPace {
  double rollouts_per_step = 0;  // R
  int publish_every = 1;         // kappa, steps between publications
  Duration step_time{};          // T
};

struct CapacityTarget {
  double required_rollouts_per_s = 0;     // M*, with which the learner never waits
  double provisioned_rollouts_per_s = 0;  // (1 + headroom) * M*
};

// M* = kappa*R / (kappa*T - T_b): the least capacity for which one publication period has time for the rollouts and the
// broadcast. T_b is the time of a broadcast. kInfeasible if T_b >= kappa*T, naming the smallest kappa and the limit of
// T_b. kInvalid if R or T is not positive, kappa < 1, or T_b or headroom is negative. (ECHO-2 sec. 3.3)
Result<CapacityTarget> capacity_target(const LearnerPace& pace, Duration broadcast_time, double headroom = 0.10);

// The least staleness budget with which the learner never waits, at fleet capacity M. Staleness is the age of a
// rollout's policy in training, in learner steps. The first batch under a new policy exists k = ceil((R/M + T_b)/T)
// steps after its publication. Until then the learner trains on older batches, so the budget must be kappa - 1 + k.
// (ECHO-2 App. B)
int needed_staleness(const LearnerPace& pace, Duration broadcast_time, double rollouts_per_s);

// Steps by which a rollout can exceed the staleness that the pacing of work allows (replay_buffer/rules,
// staleness_worst). Some steps pass until the last worker has a published version (`arrival`). Others pass while faster
// workers return batches that were requested after the slowest worker's group (`overtaken_by`: how much longer that
// group takes than the fastest worker's).
int staleness_lag(Duration step_time, Duration arrival, Duration overtaken_by);

// kInvalid unless S >= kappa - 1. With a smaller budget the newest published policy is too old before the next one
// appears, so the learner waits forever. S = kappa - 1 is strictly on-policy within a period: after each publication
// the learner waits for a batch of the new policy.
Status check_staleness_budget(int staleness_budget, int publish_every);

}  // namespace echoline::provisioner
