// One learner step: whole groups of trajectories in, a new bf16 policy out.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/result.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/trajectory.hpp"
#include "delta/tensor.hpp"
#include "learner/by_task.hpp"
#include "learner/credibility.hpp"
#include "learner/training/loss.hpp"
#include "learner/training/optimizer.hpp"
#include "model/phrasing.hpp"
#include "model/transformer.hpp"

namespace echoline::learner {

struct TrainerConfig : TrainingSettings {
  double temperature = 1.0;  // as in sampling, or the importance ratios are wrong
  std::int64_t passes = 1;   // over the batch, each in a fresh random order
  std::uint64_t seed = 0;
  std::uint64_t scrutiny_seed = 0;  // which responses are looked at closely: workers must not be able to tell
};

// kInvalid with the name and the value of the first setting out of range, those of loss and optimizer included.
Status validate(const TrainerConfig& config);

struct StepReport {
  std::int64_t step = 0;  // counted from 1
  std::int64_t trajectories = 0;
  std::int64_t groups = 0;
  std::int64_t informative_groups = 0;  // groups whose rewards differ; only these carry a gradient
  std::int64_t response_tokens = 0;     // that count in the loss
  double reward_mean = 0;               // as the adapter gave it, without penalties
  double accuracy = 0;                  // share of trajectories the adapter called correct
  double truncated_fraction = 0;        // of trajectories that were cut by the length limit
  std::int64_t updates = 0;             // optimizer updates applied
  std::int64_t updates_skipped = 0;     // because a gradient was not finite
  double gradient_norm = 0;             // mean over updates, before clipping
  double learning_rate = 0;             // of the last update
  // Means over the trained tokens (those of informative groups) of all updates; 0 when there were none.
  double loss = 0;                       // mean over updates
  double ratio_mean = 0;                 // π_θ/π_μ
  double effective_sample_fraction = 0;  // (Σ π_θ/π_μ)² / (tokens · Σ (π_θ/π_μ)²): 1 where all weigh the same
  double clip_fraction = 0;
  double capped_fraction = 0;
  double behaviour_kl = 0;                // nats per token
  double reference_kl = 0;                // nats per token
  double entropy = 0;                     // nats per token
  std::map<WorkerId, Scrutiny> scrutiny;  // some responses of each worker, by the policy before this step
};

struct TrainingRow;  // one trajectory, laid out for training

// Owns the optimizer and the step counter; shares the model. One thread.
class Trainer {
 public:
  // `reference` is frozen and needed only when loss.kl_coefficient > 0. kInvalid for settings out of range.
  static Result<std::unique_ptr<Trainer>> create(std::shared_ptr<model::Transformer> model, const TrainerConfig& config,
                                                 std::shared_ptr<model::Transformer> reference = nullptr);

  // Trains on checked trajectories (data_plane::check); those of one group may stand anywhere in the batch, and every
  // group needs at least two. Nothing changes on error: kInvalid for an empty batch, a lone trajectory of a group, a
  // token outside the vocabulary or a sequence the model has no positions for.
  Result<StepReport> step(const std::vector<schema::Trajectory>& batch);

  // The present policy in bf16, with Hugging Face's names.
  Result<delta::OwnedState> policy() const;

  std::int64_t steps() const { return steps_; }
  model::Transformer& model() { return *model_; }
  AdamW& optimizer() { return optimizer_; }
  const AdamW& optimizer() const { return optimizer_; }
  const TrainerConfig& config() const { return config_; }

  // For trainer_checkpoint.hpp. The order of minibatches depends on the seed and the step only.
  void set_steps(std::int64_t steps) { steps_ = steps; }

 private:
  Trainer(std::shared_ptr<model::Transformer> model, const TrainerConfig& config,
          std::shared_ptr<model::Transformer> reference);
  std::map<WorkerId, Scrutiny> scrutinise(std::vector<std::vector<TrainingRow>>& groups, std::int64_t step,
                                          const std::vector<TrainingRow*>& trained);
  void record_proximal(const std::vector<TrainingRow*>& rows);
  UpdateReport update(const std::vector<TrainingRow*>& rows, MinibatchSize minibatch, LossStatistics& statistics,
                      double& loss, std::map<WorkerId, Scrutiny>* scrutiny);

  TrainerConfig config_;
  std::shared_ptr<model::Transformer> model_;
  std::shared_ptr<model::Transformer> reference_;
  AdamW optimizer_;
  std::int64_t steps_ = 0;
};

// How often the adapter calls the model's response to a problem correct.
struct Evaluation {
  std::int64_t problems = 0;
  std::int64_t correct = 0;
  double reward_mean = 0;
  std::map<std::string, double> components;  // of the reward, their means
  ByTask by_task;                            // empty where there is one
  double accuracy() const { return problems == 0 ? 0.0 : static_cast<double>(correct) / static_cast<double>(problems); }
};

struct EvaluationOptions {
  std::int64_t response_tokens_max = 64;
  std::int64_t turn_tokens_max = 0;  // of one turn; 0: what is left
  double temperature = 0;            // 0: greedy
  std::uint64_t seed = 0;            // for temperatures above 0
  std::int64_t batch_rows = 256;     // problems generated at once, fewer where prompts are long; bounds memory
  std::function<bool()> interrupted = {};
};

// One try per problem; one that the tokenizer refuses or that leaves no room for a response counts as answered
// wrongly. kInvalid when that are all of them; errors of generate(); kCancelled when interrupted.
Result<Evaluation> evaluate(model::Transformer& model, const model::Phrasing& phrasing,
                            const data_plane::Adapter& adapter, const std::vector<schema::Problem>& problems,
                            const EvaluationOptions& options);

// The model's parameters, tied ones once, in a fixed order.
NamedParameters named_parameters(model::Transformer& model);

}  // namespace echoline::learner
