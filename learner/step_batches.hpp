// The learner step that the rollout desk serves: its batch, the groups in training, its pace. Private to learner/.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "learner/desk_context.hpp"
#include "replay_buffer/step_pace.hpp"

namespace echoline::learner {

// One thread, the desk's.
class StepBatches {
 public:
  // Later steps of an earlier process than `step` count as not trained: their groups are available again.
  StepBatches(DeskContext& desk, std::uint64_t step) : desk_(desk), step_(step) {}

  std::uint64_t step() const { return step_; }
  std::optional<double> step_seconds() const { return pace_.seconds(); }
  void paused(Duration lasted) { pace_.paused(seconds(lasted)); }  // not part of a step

  // Hands the batch over if training waits for one and it is whole, or the error that ends the run: of the database,
  // `can_generate`, or of `can_complete`, which is asked about a batch that is not whole.
  void hand_over_batch(const Status& can_generate, const std::function<Status()>& can_complete);
  // RolloutDesk has these three.
  Status consume(std::uint64_t step, const replay_buffer::Batch& batch);
  Status prune(std::uint64_t step);
  Status disown(WorkerId worker);
  // Discards the waiting groups of a worker. Groups in training cannot be taken back.
  Status discard_waiting_of(WorkerId worker, std::string_view reason);

  void check() const;  // aborts if its parts disagree

 private:
  Result<std::optional<replay_buffer::Batch>> whole_batch(std::uint64_t step);
  // Leases are compared with this time. It stands still while the database cannot store.
  double lease_time() const;

  DeskContext& desk_;
  std::uint64_t step_;
  replay_buffer::StepPace pace_;
  std::vector<GroupId> in_training_;  // handed over and not consumed
};

}  // namespace echoline::learner
