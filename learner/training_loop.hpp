// The steps of a running learner: waits for a batch, trains on it, publishes the policy, writes checkpoints. Private to
// learner/.
#pragma once
#include <functional>
#include <optional>
#include <string>

#include "learner/credibility.hpp"
#include "learner/publisher.hpp"
#include "learner/rollout_desk.hpp"
#include "learner/run_fleet.hpp"
#include "learner/run_workers.hpp"

namespace echoline::learner {

// One thread, the main one.
class TrainingLoop {
 public:
  // The parts that the loop drives; they outlive it.
  struct Parts {
    RunJournal& journal;
    PolicySource& policy_source;
    RunWorkers& workers;
    RunFleet& fleet;
    RolloutDesk& rollout_desk;
    Publisher& publisher;
    overlay::LearnerNode& node;
    std::function<void(const std::string& phase)> write_status;
  };
  TrainingLoop(const RunHost& run, const Parts& parts) : run_(run), parts_(parts) {}

  // Publishes the current policy, trains the steps that are left, and publishes their policies. False when the run was
  // asked to stop before the last policy was published. A checkpoint is written in either case, and before most errors.
  Result<bool> run();

 private:
  // These return false or an absent value if the run was asked to stop first, otherwise true or a value.
  Result<std::optional<replay_buffer::Batch>> wait_for_batch();
  Result<bool> train_one_step();
  // First waits until the previous policy is published: memory has room for that one and the next only.
  Result<bool> publish(Version version);
  Result<bool> wait_until_published();
  Status checkpoint();
  Status expel_implausible_workers(const TrainedStep& trained);
  // Writes a checkpoint and adds the outcome to the error that ends the run.
  Error end_with_checkpoint(Error why);
  // Also stores the ids of a batch that was trained on but could not be marked as consumed.
  Error end_with_unmarked_batch(const replay_buffer::Batch& batch, Error why);

  const RunHost run_;
  const Parts parts_;
  Credibility credibility_;
};

}  // namespace echoline::learner
