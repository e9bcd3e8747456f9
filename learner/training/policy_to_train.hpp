// The policy source of the built-in trainer: model, warm start, learner steps, evaluation and checkpoints.
// Private to learner/.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "learner/policy_source.hpp"
#include "learner/training/trainer.hpp"
#include "learner/training/trainer_checkpoint.hpp"
#include "model/device_weights.hpp"
#include "model/transformer.hpp"

namespace echoline::learner {

class PolicyToTrain final : public PolicySource, public DatumTrainer {
 public:
  // Loads or initialises the model; with `resume`, also loads the run's newest checkpoint.
  static Result<std::unique_ptr<PolicyToTrain>> load(const SourceHost& host, bool resume);

  std::uint64_t steps() const override { return trainer_ ? static_cast<std::uint64_t>(trainer_->steps()) : 0; }
  Status begin() override;
  Result<std::optional<TrainedStep>> step(const std::vector<schema::Trajectory>& batch) override;
  Result<delta::SharedState> policy(Version version) override;
  Status on_step_end() override;
  Status evaluate(const char* when) override;
  Status checkpoint() override;
  const std::map<std::string, double>& accuracy() const override { return accuracy_; }
  DatumTrainer* datum_trainer() override { return trainer_ ? this : nullptr; }

  Result<DatumResult> forward_backward(const DatumBatch& batch) override;
  Result<AdamReport> optim_step(const AdamSettings& settings) override;
  Status begin_adapter(std::optional<std::uint64_t> seed) override;
  Status save_state(const std::filesystem::path& folder) override;
  Status load_state(const std::filesystem::path& folder, bool optimizer) override;

 private:
  explicit PolicyToTrain(const SourceHost& host) : host_(host) {}
  Status load_model();
  Status create_trainer(bool resumed);
  Status resume();
  Status warm_start();
  Result<delta::SharedState> make_policy();

  const SourceHost host_;
  std::shared_ptr<model::Transformer> model_;
  std::unique_ptr<Trainer> trainer_;
  std::optional<model::DeviceWeights> on_device_;  // the model's weights, if it is on a GPU and has no adapter
  delta::SharedState base_;  // with an adapter: the part of all policies that does not change; null before the first
  CheckpointDigests checkpoint_digests_;
  std::optional<std::int64_t> saved_step_;     // of the newest checkpoint
  std::filesystem::path checkpoint_to_place_;  // the newest checkpoint, until the run's folder `model` holds its policy
  std::map<std::string, double> accuracy_;
};

}  // namespace echoline::learner
