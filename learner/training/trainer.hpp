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
#include "learner/credibility.hpp"
#include "learner/task_figures.hpp"
#include "learner/training/loss.hpp"
#include "learner/training/optimizer.hpp"
#include "model/phrasing.hpp"
#include "model/transformer.hpp"

namespace echoline::learner {

struct TrainerConfig : TrainingSettings {
  double temperature = 1.0;  // of generation; with any other, the importance ratios would be wrong
  std::int64_t passes = 1;   // over the batch, each in a new random order
  std::uint64_t seed = 0;
  std::uint64_t scrutiny_seed = 0;  // chooses the responses to scrutinise; workers must not know it
};

// kInvalid with the name and the value of the first setting out of range, those of loss and optimizer included.
Status validate(const TrainerConfig& config);

struct StepReport {
  std::int64_t step = 0;  // counted from 1
  std::int64_t trajectories = 0;
  std::int64_t groups = 0;
  std::int64_t informative_groups = 0;  // groups with a non-zero advantage: their rewards differ
  std::int64_t response_tokens = 0;     // tokens that count in the loss
  double reward_mean = 0;               // from the adapter, without penalties
  double accuracy = 0;                  // fraction of trajectories that the adapter calls correct
  double truncated_fraction = 0;        // share of trajectories that the length limit cut
  std::int64_t updates = 0;             // optimizer updates applied
  std::int64_t updates_skipped = 0;     // because a gradient was not finite
  double gradient_norm = 0;             // mean over updates, before clipping
  double learning_rate = 0;             // of the last update
  // Means over the trained tokens of all updates; 0 without updates. Trained tokens are those of informative groups or,
  // with a reference policy, of all groups. π_θ is the policy in training, π_μ the one that generated the token, and
  // π_ref the reference (loss.hpp).
  double loss = 0;                        // mean over updates
  double ratio_mean = 0;                  // π_θ/π_μ
  double effective_sample_fraction = 0;   // (Σ π_θ/π_μ)² / (tokens · Σ (π_θ/π_μ)²); 1: equal weights
  double clip_fraction = 0;               // share of tokens that the trust region bounds
  double capped_fraction = 0;             // share of tokens whose importance weight is capped
  double behaviour_kl = 0;                // KL(π_μ ‖ π_θ), nats per token
  double reference_kl = 0;                // KL(π_θ ‖ π_ref), nats per token
  double entropy = 0;                     // of π_θ, nats per token
  std::map<WorkerId, Scrutiny> scrutiny;  // of some responses of each worker, under the policy before this step
};

struct TrainingRow;  // one trajectory, laid out for training

// Owns the optimizer and the step counter, and shares the model. For one thread.
class Trainer {
 public:
  // `reference` is frozen and needed only when loss.kl_coefficient > 0. kInvalid for settings out of range.
  static Result<std::unique_ptr<Trainer>> create(std::shared_ptr<model::Transformer> model, const TrainerConfig& config,
                                                 std::shared_ptr<model::Transformer> reference = nullptr);

  // Trains on checked trajectories (data_plane::check). The members of a group may be anywhere in the batch; every
  // group needs at least two. Nothing changes on error. kInvalid for an empty batch, a group of one, a token outside
  // the vocabulary, or a sequence longer than the model's positions.
  Result<StepReport> step(const std::vector<schema::Trajectory>& batch);

  // The current policy in bf16, with Hugging Face's names.
  Result<delta::OwnedState> policy() const;

  std::int64_t steps() const { return steps_; }
  model::Transformer& model() { return *model_; }
  AdamW& optimizer() { return optimizer_; }
  const AdamW& optimizer() const { return optimizer_; }
  const TrainerConfig& config() const { return config_; }

  // For trainer_checkpoint.hpp. The order of minibatches depends only on the seed and the step.
  void set_steps(std::int64_t steps) { steps_ = steps; }

 private:
  Trainer(std::shared_ptr<model::Transformer> model, const TrainerConfig& config,
          std::shared_ptr<model::Transformer> reference);
  // Computes log-probabilities of some rows of each worker, to judge the workers (credibility.hpp).
  std::map<WorkerId, Scrutiny> scrutinise(std::vector<std::vector<TrainingRow>>& groups, std::int64_t step,
                                          const std::vector<TrainingRow*>& trained);
  // Stores the rows' log-probabilities under the policy at the start of the step.
  void record_proximal(const std::vector<TrainingRow*>& rows);
  // Makes one optimizer update on `rows`, which are of a minibatch of this size. Adds to `statistics`, `loss` and,
  // unless it is null, `scrutiny`.
  UpdateReport update(const std::vector<TrainingRow*>& rows, MinibatchSize minibatch, LossStatistics& statistics,
                      double& loss, std::map<WorkerId, Scrutiny>* scrutiny);

  TrainerConfig config_;
  std::shared_ptr<model::Transformer> model_;
  std::shared_ptr<model::Transformer> reference_;
  AdamW optimizer_;
  std::int64_t steps_ = 0;
};

// The adapter's grades of the model's responses to a set of problems.
struct Evaluation {
  std::int64_t problems = 0;
  std::int64_t correct = 0;
  double reward_mean = 0;
  std::map<std::string, double> components;  // means of the reward's components
  TaskFigures by_task;                       // empty for a single task
  double accuracy() const { return problems == 0 ? 0.0 : static_cast<double>(correct) / static_cast<double>(problems); }
};

struct EvaluationOptions {
  std::int64_t response_tokens_max = 64;
  std::int64_t turn_tokens_max = 0;  // of one turn; 0: the rest of response_tokens_max
  double temperature = 0;            // 0: greedy
  std::uint64_t seed = 0;            // for temperatures above 0
  std::int64_t batch_rows = 256;     // problems generated together, fewer for long prompts; bounds memory
  std::function<bool()> interrupted = {};
};

// One attempt per problem. A problem counts as wrong if the tokenizer refuses it or it leaves no room for a response.
// kInvalid if this holds for all problems; kCancelled when interrupted; errors of generate().
Result<Evaluation> evaluate(model::Transformer& model, const model::Phrasing& phrasing,
                            const data_plane::Adapter& adapter, const std::vector<schema::Problem>& problems,
                            const EvaluationOptions& options);

// The model's parameters that are trained, tied ones once, in a fixed order.
NamedParameters named_parameters(model::Transformer& model);

}  // namespace echoline::learner
