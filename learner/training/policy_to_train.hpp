// The policy a run trains: the model and its tokenizer, the task's problems, warm start, evaluation and checkpoints.
// Private to learner/.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data_plane/adapters/adapter.hpp"
#include "learner/door.hpp"
#include "learner/run_config.hpp"
#include "learner/run_record.hpp"
#include "learner/training/trainer.hpp"
#include "learner/training/trainer_checkpoint.hpp"
#include "model/phrasing.hpp"
#include "model/transformer.hpp"

namespace echoline::learner {

// One thread. What it is made from must outlive it.
class PolicyToTrain {
 public:
  using Phase = std::function<void(const std::string&)>;  // hears what is being done right now

  // Loads or initialises the model; with `resume` also the newest checkpoint of the run.
  static Result<std::unique_ptr<PolicyToTrain>> load(const RunConfig& config, RunRecord& record, bool resume,
                                                     Phase phase, const std::atomic<bool>& stop);

  // A run that is not resumed: warm start, first evaluation, first checkpoint. Asked to stop, it returns early.
  Status begin();
  // Greedy accuracy on the held-out problems, into the metrics. Asked to stop, it returns early.
  Status evaluate(const char* when);
  // After a learner step: evaluates where the run wants it.
  Status step_done();
  // Writes a checkpoint and makes the run's folder `model` its policy; nothing when the newest checkpoint is of this
  // step, or before there is a trainer.
  Status checkpoint();

  Trainer& trainer() { return *trainer_; }
  std::uint64_t steps() const { return trainer_ ? static_cast<std::uint64_t>(trainer_->steps()) : 0; }
  const data_plane::Adapter& adapter() const { return *adapter_; }
  const std::map<std::string, double>& accuracy() const { return accuracy_; }  // by `when`
  // What workers hand in is looked at with the model's and the task's own eyes. It refers to the adapter.
  Door door() const;
  // The part of the run's specification that is about the model and the task.
  void describe(schema::RunSpec& spec) const;

 private:
  PolicyToTrain(const RunConfig& config, RunRecord& record, Phase phase, const std::atomic<bool>& stop)
      : config_(config), record_(record), phase_(std::move(phase)), stop_(stop) {}
  Status load_model();
  Status create_trainer(bool resumed);
  Status resume();
  Status warm_start();

  const RunConfig& config_;
  RunRecord& record_;
  Phase phase_;
  const std::atomic<bool>& stop_;
  std::optional<model::ModelFiles> files_;
  std::optional<model::Phrasing> phrasing_;
  std::shared_ptr<model::Transformer> model_;
  std::unique_ptr<data_plane::Adapter> adapter_;
  std::vector<schema::Problem> evaluation_;
  std::unique_ptr<Trainer> trainer_;
  CheckpointOf checkpoint_of_;
  std::optional<std::int64_t> saved_step_;  // of the newest checkpoint
  std::map<std::string, double> accuracy_;
};

}  // namespace echoline::learner
