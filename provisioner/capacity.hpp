// Computes the rollout capacity that keeps the learner busy, and the staleness of rollouts. No other file has these
// formulas; plans, FleetCore and the simulators call this one.
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
  double headroom = 0.10;                    // capacity above M*, as a share of M*
};

struct CapacityTarget {
  double required_rollouts_per_s = 0;     // M*, with which the learner never waits
  double provisioned_rollouts_per_s = 0;  // (1 + headroom) * M*
};

// M*, by the rule:
// - overlap: the greater of kappa*R / (kappa*T - install) and R / ((S - kappa + 1)*T - T_b). With the first, one
//   publication period has time for its rollouts and one installation. With the second, needed_staleness() is at most
//   S: workers with an older policy get no work, so less time is left for the last steps before a policy arrives. The
//   second does not count without S, nor for S < kappa, because the learner then waits for each policy by choice.
// - echo2: kappa*R / (kappa*T - T_b), because one period has time for the rollouts and the broadcast. (ECHO-2 sec. 3.3)
// kInfeasible if a denominator is not positive; the message says which changes would make it positive. kInvalid if R or
// T is not positive, kappa < 1, or a time or headroom is negative.
Result<CapacityTarget> capacity_target(const LearnerPace& pace, const PublicationTimes& times,
                                       const CapacityTerms& terms = {});

// Half of the shortest times for which no capacity suffices. For these halves, M* is at most 2R/T. If publications take
// longer, they are the bottleneck, and more workers hardly help.
PublicationTimes half_of_longest_publication_times(const LearnerPace& pace, const CapacityTerms& terms);

// The least staleness budget with which the learner never waits, for a fleet of M rollouts/s. Staleness is the age of a
// rollout's policy in training, in learner steps. The first batch under a new policy exists k = ceil((R/M + T_b)/T)
// steps after the publication. Until then the learner trains on older batches, so the budget must be kappa - 1 + k.
// (ECHO-2 App. B)
int needed_staleness(const LearnerPace& pace, Duration broadcast_time, double rollouts_per_s);

// Steps by which a rollout can exceed the staleness that the pacing of work allows (replay_buffer/rules,
// staleness_worst). `arrival`: the time until the last worker has a published version. `overtaken_by`: how much longer
// a group takes on the slowest worker than on the fastest one, so that groups requested later are trained first.
int staleness_lag(Duration step_time, Duration arrival, Duration overtaken_by);

// kInvalid unless S >= kappa - 1. With a smaller budget, the newest published policy is too old before the next one
// appears, so the learner waits forever. With S = kappa - 1, each period trains only on its own policy: after each
// publication the learner waits for a batch of the new policy.
Status check_staleness_budget(int staleness_budget, int publish_every);

}  // namespace echoline::provisioner
