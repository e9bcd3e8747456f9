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

// Oldest a rollout can be, in steps, with fleet capacity M: kappa - 1 + ceil((R/M + T_b)/T). (ECHO-2 App. B)
int worst_case_staleness(const LearnerPace& pace, Duration broadcast_time, double rollouts_per_s);

// The same for any fleet that meets M*: kappa + ceil((1 - 1/kappa) * T_b/T).
int worst_case_staleness_bound(const LearnerPace& pace, Duration broadcast_time);

// kInvalid unless S >= kappa: with a smaller budget, rollouts of the newest published version are already too old
// before the next one appears.
Status check_staleness_budget(int staleness_budget, int publish_every);

}  // namespace echoline::provisioner
