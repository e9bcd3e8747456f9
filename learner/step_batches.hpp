// The learner step for which the RolloutDesk collects a batch, the groups in training, and the measured time of steps.
// Private to learner/.
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
  // `step`: the next learner step, counted from 0.
  StepBatches(DeskContext& desk, std::uint64_t step) : desk_(desk), step_(step) {}

  std::uint64_t step() const { return step_; }
  std::optional<double> step_seconds() const { return pace_.seconds(); }
  void exclude_pause(Duration pause) { pace_.exclude_pause(seconds(pause)); }  // not part of a step

  // If the training thread waits for a batch, passes the batch once it is whole. Passes an error that ends the run
  // instead: of the database, of `can_generate`, or of `check_completable`, which is called if the batch is not whole.
  void hand_over_batch(const Status& can_generate, const std::function<Status()>& check_completable);
  // See RolloutDesk.
  Status consume(std::uint64_t step, const replay_buffer::Batch& batch);
  Status prune(std::uint64_t step);
  Status discard_groups_of(WorkerId worker);
  // Discards the waiting groups of a worker. Groups in training cannot be taken back.
  Status discard_waiting_of(WorkerId worker, std::string_view reason);

  void check() const;  // aborts if its parts disagree

 private:
  Result<std::optional<replay_buffer::Batch>> trainable_batch(std::uint64_t step);
  // The time that leases are compared with. It stands still while the database cannot store.
  double lease_time() const;

  DeskContext& desk_;
  std::uint64_t step_;                // the next learner step
  replay_buffer::StepPace pace_;      // measures the time of steps
  std::vector<GroupId> in_training_;  // passed to training and not consumed
};

}  // namespace echoline::learner
