// Computes the rollout capacity that keeps the learner busy, and the staleness of rollouts. The only owner of both
// formulas; plans, FleetCore and the simulators call it.
#pragma once
#include <optional>
#include <string_view>

#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline::provisioner {

// One learner's steady state. The letters are those of the formulas below.
struct LearnerPace {
  double rollouts_per_step = 0;  // R
  int publish_every = 1;         // kappa, steps between publications
  Duration step_time{};          // T
};

// The workers' behaviour during a broadcast (docs/decisions/0043-workers-generate-during-broadcasts.md).
enum class CapacityRule {
  kOverlap,  // they generate, except while they install the policy
  kEcho2,    // they generate nothing until they have installed it
};
std::string_view to_string(CapacityRule rule);

// The times of one publication.
struct PublicationTimes {
  Duration broadcast{};  // T_b, which includes the installation
  Duration install{};    // how long a worker pauses to install it
};

struct CapacityTerms {
  CapacityRule rule = CapacityRule::kOverlap;
  std::optional<int> staleness_budget = {};  // S; absent: any age is allowed
  double headroom = 0.10;
};

struct CapacityTarget {
  double required_rollouts_per_s = 0;     // M*, with which the learner never waits
  double provisioned_rollouts_per_s = 0;  // (1 + headroom) * M*
};

// M*, by the rule:
// - overlap: the greater of kappa*R / (kappa*T - install) and R / ((S - kappa + 1)*T - T_b). By the first, one
//   publication period has time for the rollouts and one installation. By the second, needed_staleness() is at most S:
//   workers whose policy is older get no work, so the last steps before a policy arrives have less time. It does not
//   count without S, nor for S < kappa, with which the learner waits for each policy's rollouts by choice.
// - echo2: kappa*R / (kappa*T - T_b), because one period has time for the rollouts and the broadcast. (ECHO-2 sec. 3.3)
// kInfeasible if a denominator is not positive, with what would make it so. kInvalid if R or T is not positive, kappa <
// 1, or a time or headroom is negative.
Result<CapacityTarget> capacity_target(const LearnerPace& pace, const PublicationTimes& times,
                                       const CapacityTerms& terms = {});

// Half of the times with which no capacity suffices. With them M* is at most 2R/T. Longer broadcasts are a bottleneck
// that more workers hardly help.
PublicationTimes half_of_longest_times(const LearnerPace& pace, const CapacityTerms& terms);

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
