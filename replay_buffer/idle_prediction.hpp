// Predicts the share of its time that a learner waits for rollouts, from the speeds and the broadcast times of a fleet.
#pragma once
#include <cstdint>
#include <vector>

#include "replay_buffer/rules.hpp"

namespace echoline::replay_buffer {

// Times are seconds.
struct PredictedWorker {
  double group_s = 0;                // time to generate one group
  double policy_s = 0;               // time from the end of a step until the worker has received the policy
  std::uint32_t groups_at_once = 2;  // groups that the worker holds; 2: the current one and the next
};

// Treatment of groups in progress when a policy arrives: the worker goes on under the new policy, finishes them first,
// or gives them back.
enum class GroupsInProgress : std::uint8_t { kContinue, kFinish, kAbort };

struct IdleQuestion {
  Pacing pacing;  // R, G, S, L and kappa; steps_total does not count
  LeaseLength lease;
  std::vector<PredictedWorker> workers;  // at least one
  double step_s = 0;                     // T
  double install_s = 0;                  // pause of a worker for each policy
  double link_s = 0;  // time for which one publication occupies the learner's links, so that the next waits
  bool stops_during_broadcast = false;  // after a publication, workers generate nothing until they have installed it
  GroupsInProgress groups_in_progress = GroupsInProgress::kContinue;
};

struct IdlePrediction {
  double idle_fraction = 0;   // share of the time that the learner waits
  double step_s = 0;          // mean time from step to step
  double staleness_mean = 0;  // of the rollouts trained on, in steps
};

// Simulates some steps of a fleet without losses, with the lease core of real runs. Leaves out the first steps, in
// which the stock fills. Deterministic; takes 10 to 50 ms. Aborts if a time is negative or R, G or T is not positive.
IdlePrediction predict_idle(const IdleQuestion& question);

}  // namespace echoline::replay_buffer
