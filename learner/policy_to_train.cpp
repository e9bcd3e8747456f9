#include "learner/policy_to_train.hpp"

#include <xxhash.h>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "learner/planning.hpp"
#include "learner/trainer_checkpoint.hpp"
#include "learner/warm_start.hpp"
#include "model/runtime.hpp"
#include "model/torch.hpp"
#include "model/weights.hpp"

namespace echoline::learner {
namespace {

// What a checkpoint must agree with: the model and the task, not how long or with whom the run goes on.
std::string config_digest(const RunConfig& config, const model::ModelConfig& model) {
  const std::string text =
      fmt::format("{}|{}|{}|{}", model.to_json(), config.task.adapter, config.task.options_json, config.run.seed);
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace

Result<std::unique_ptr<PolicyToTrain>> PolicyToTrain::load(const RunConfig& config, RunRecord& record, bool resume,
                                                           Phase phase, const std::atomic<bool>& stop) {
  std::unique_ptr<PolicyToTrain> policy(new PolicyToTrain(config, record, std::move(phase), stop));
  ECHO_TRY(policy->load_model());
  if (!resume) return policy;
  ECHO_TRY(policy->create_trainer());
  ECHO_TRY(load_checkpoint(record.folder() / "checkpoints", *policy->trainer_,
                           config_digest(config, policy->model_config_)));
  log::info("resuming from the checkpoint of step {}", policy->steps());
  record.event("resumed", {{"step", policy->steps()}});
  return policy;
}

Status PolicyToTrain::load_model() {
  phase_("loading the model");
  model::use_threads(config_.learner.threads);
  model::keep_freed_memory();
  torch::manual_seed(static_cast<std::uint64_t>(config_.run.seed));
  ECHO_ASSIGN(model_config_, run_model_config(config_));
  if (config_.model.path) {
    ECHO_ASSIGN(model::LoadedModel loaded, model::load_model(*config_.model.path));
    model_ = loaded.transformer;
    tokenizer_.emplace(std::move(loaded.tokenizer));
  } else {
    ECHO_ASSIGN(model_, model::init(model_config_, config_.run.seed));
    ECHO_ASSIGN(tokenizer_, model::Tokenizer::characters(model::kCharacterAlphabet));
  }
  ECHO_ASSIGN(adapter_, data_plane::make_adapter(config_.task.adapter, config_.task.options_json, config_.run.seed));
  evaluation_ = adapter_->evaluation();
  return ok();
}

Status PolicyToTrain::create_trainer() {
  TrainerConfig trainer;
  trainer.loss = config_.learner.loss;
  trainer.optimizer = config_.learner.optimizer;
  trainer.temperature = config_.rollout.temperature;
  trainer.minibatches = config_.learner.minibatches;
  trainer.seed = config_.run.seed;
  std::shared_ptr<model::Transformer> reference;
  if (config_.learner.loss.kl_coefficient > 0) {
    ECHO_ASSIGN(reference, model::init(model_config_, config_.run.seed));
    ECHO_ASSIGN(const delta::OwnedState frozen, model::export_policy(*model_));
    ECHO_TRY(model::load_policy(*reference, frozen.view()));
  }
  ECHO_ASSIGN(trainer_, Trainer::create(model_, trainer, reference));
  return ok();
}

Status PolicyToTrain::begin() {
  if (config_.learner.warm_start.enabled) ECHO_TRY(warm_start());
  if (stop_) return ok();
  ECHO_TRY(create_trainer());
  record_.event("started", {{"step", steps()}});
  ECHO_TRY(evaluate("before"));
  return checkpoint();
}

Status PolicyToTrain::warm_start() {
  const SystemClock clock;
  phase_("warm start");
  const WarmStartSection& section = config_.learner.warm_start;
  WarmStartConfig warm;
  warm.optimizer = config_.learner.optimizer;
  warm.optimizer.learning_rate = section.learning_rate;
  warm.steps_max = section.steps_max;
  warm.batch_problems = section.batch;
  warm.target_accuracy = section.target_accuracy;
  warm.response_tokens_max = config_.rollout.response_tokens_max;
  const TimePoint start = clock.now();
  const auto report = learner::warm_start(*model_, *tokenizer_, *adapter_, warm, [&](const WarmStartProgress& p) {
    phase_(fmt::format("warm start: step {}, loss {:.3f}, accuracy {:.3f} of {:.2f}", p.steps, p.loss, p.accuracy,
                       warm.target_accuracy));
    return !stop_;
  });
  if (!report && report.error().code == Code::kCancelled && stop_) return ok();
  if (!report) return report.error();
  record_.metric("warm_start", {{"steps", report->steps},
                                {"accuracy", report->accuracy},
                                {"reached", report->reached},
                                {"seconds", seconds(clock.now() - start)}});
  return ok();
}

Status PolicyToTrain::evaluate(const char* when) {
  phase_(fmt::format("evaluating {} training", when));
  EvaluationOptions options;
  options.response_tokens_max = config_.rollout.response_tokens_max;
  ECHO_ASSIGN(const Evaluation result, learner::evaluate(*model_, *tokenizer_, *adapter_, evaluation_, options));
  record_.metric("evaluation",
                 {{"when", when}, {"step", steps()}, {"accuracy", result.accuracy()}, {"problems", result.problems}});
  accuracy_[when] = result.accuracy();
  log::info("accuracy {} training: {:.3f} on {} held-out problems", when, result.accuracy(), result.problems);
  return ok();
}

Status PolicyToTrain::checkpoint() {
  if (!trainer_) return ok();
  ECHO_TRY(save_checkpoint(record_.folder() / "checkpoints", *trainer_, config_digest(config_, model_config_),
                           config_.learner.checkpoints_kept));
  return ok();
}

Door PolicyToTrain::door() const {
  DoorOptions options;
  options.vocab_size = model_config_.vocab_size;
  options.positions_max = model_config_.positions_max;
  options.response_tokens_max = config_.rollout.response_tokens_max;
  if (const auto end = tokenizer_->end_of_text()) options.eos = {*end};
  options.trainable = [shape = model_config_](const schema::Trajectory& t) { return check_trainable(t, shape); };
  return Door(std::move(options), *adapter_, *tokenizer_);
}

void PolicyToTrain::describe(schema::RunSpec& spec) const {
  spec.set_seed(config_.run.seed);
  spec.set_model_config_json(model_config_.to_json());
  spec.set_tokenizer_json(tokenizer_->to_json());
  spec.set_adapter_name(config_.task.adapter);
  spec.set_adapter_config_json(config_.task.options_json);
}

}  // namespace echoline::learner
