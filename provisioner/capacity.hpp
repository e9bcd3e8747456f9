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

// Least staleness budget under which the learner never waits, with fleet capacity M: a batch under a new policy can exist
// k = ceil((R/M + T_b)/T) steps after it, and until then only older ones: kappa - 1 + k. (ECHO-2 App. B)
int needed_staleness(const LearnerPace& pace, Duration broadcast_time, double rollouts_per_s);

// What decides how old a rollout can get.
struct StalenessTerms {
  int budget = 1;           // S
  int lookahead = 0;        // L, batches of work that are handed out beyond the one in training
  int publish_every = 1;    // kappa
  Duration step_time{};     // T
  Duration arrival{};       // from publishing a version until the last worker generates with it
  Duration overtaken_by{};  // how much longer the slowest worker takes for a group than the fastest
};

// Oldest a rollout can be when it is trained on, in steps.
//
// Derivation. Work is handed out while less than (L + 1) R trajectories are outstanding or wait, so what is handed out
// at step t is trained on at step t + L at the latest, as long as results come in the order they were asked for. Its
// version is up to kappa - 1 + ceil(arrival/T) steps old at that moment: the next one has not been published, or is
// still on its way. A group of a slow worker lets those through that were asked for later and came earlier, which are
// at most ceil(overtaken_by/T) batches. And the budget S holds whatever happens.
int worst_case_staleness(const StalenessTerms& terms);

// kInvalid unless S >= kappa - 1: with a smaller budget, the newest published policy is too old before the next one
// appears, and the learner waits for ever. S = kappa - 1 is strictly on-policy within a period: the learner waits after
// each publication until a batch under it is there.
Status check_staleness_budget(int staleness_budget, int publish_every);

}  // namespace echoline::provisioner
