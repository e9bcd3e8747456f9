#include "learner/training/policy_to_train.hpp"

#include <xxhash.h>

#include <random>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "learner/planning.hpp"
#include "learner/training/warm_start.hpp"
#include "model/runtime.hpp"
#include "model/torch.hpp"
#include "model/weights.hpp"

namespace echoline::learner {
namespace {

// What a checkpoint must agree with: the model and the task, not how long or with whom the run goes on.
std::string config_digest(const RunConfig& config, const model::ModelConfig& model) {
  std::string text =
      fmt::format("{}|{}|{}|{}", model.to_json(), config.task.adapter, config.task.options_json, config.run.seed);
  const TaskSection plain;
  if (config.task.prompt != plain.prompt || config.task.chat)
    text += fmt::format("|{}|{}|{}|{}", config.task.prompt, config.task.chat, config.task.system,
                        config.task.chat_options_json);
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::filesystem::path checkpoints(const RunRecord& record) { return record.folder() / "checkpoints"; }

}  // namespace

Result<std::unique_ptr<PolicyToTrain>> PolicyToTrain::load(const RunConfig& config, RunRecord& record, bool resume,
                                                           Phase phase, const std::atomic<bool>& stop) {
  std::unique_ptr<PolicyToTrain> policy(new PolicyToTrain(config, record, std::move(phase), stop));
  ECHO_TRY(policy->load_model());
  if (resume) ECHO_TRY(policy->resume());
  return policy;
}

Status PolicyToTrain::load_model() {
  phase_("loading the model");
  model::use_threads(config_.learner.threads);
  model::keep_freed_memory();
  torch::manual_seed(static_cast<std::uint64_t>(config_.run.seed));
  if (config_.model.path) {
    ECHO_ASSIGN(model::LoadedModel loaded, model::load_model(*config_.model.path));
    model_ = loaded.transformer;
    files_.emplace(std::move(loaded.files));
  } else {
    ECHO_ASSIGN(files_, model::ModelFiles::of_preset(*config_.model.preset));
    ECHO_ASSIGN(model_, model::init(files_->config, config_.run.seed));
  }
  ECHO_ASSIGN(phrasing_, run_phrasing(config_.task, *files_));
  ECHO_ASSIGN(adapter_, data_plane::make_adapter(config_.task.adapter, config_.task.options_json, config_.run.seed));
  evaluation_ = adapter_->evaluation();
  if (config_.evaluation.problems && *config_.evaluation.problems < evaluation_.size())
    evaluation_.resize(*config_.evaluation.problems);
  checkpoint_of_.config_digest = config_digest(config_, files_->config);
  return ok();
}

Status PolicyToTrain::create_trainer(bool resumed) {
  TrainerConfig trainer;
  trainer.loss = config_.learner.loss;
  trainer.optimizer = config_.learner.optimizer;
  trainer.temperature = config_.rollout.temperature;
  trainer.minibatches = config_.learner.minibatches;
  trainer.truncated = config_.learner.truncated;
  trainer.truncated_penalty = config_.learner.truncated_penalty;
  trainer.seed = config_.run.seed;
  std::random_device unforeseeable;
  trainer.scrutiny_seed = std::uint64_t{unforeseeable()} << 32 | unforeseeable();
  std::shared_ptr<model::Transformer> reference;
  if (config_.learner.loss.kl_coefficient > 0) {
    // Frozen once, when training begins, and kept with the run: after a resume the model is another one.
    if (!resumed) {
      ECHO_ASSIGN(const delta::OwnedState policy, model::export_policy(*model_));
      ECHO_TRY(freeze_reference(checkpoints(record_), policy));
    }
    reference = std::make_shared<model::Transformer>(files_->config, model_->device(), model_->dtype());
    ECHO_ASSIGN(checkpoint_of_.reference_digest, load_reference(checkpoints(record_), *reference));
  }
  ECHO_ASSIGN(trainer_, Trainer::create(model_, trainer, reference));
  return ok();
}

Status PolicyToTrain::resume() {
  const auto nothing = [&](const Error& error) {
    return fail(error.code, error.operation, "{}{}", error.detail, earlier_hint(record_.folder()));
  };
  if (const auto found = find_policy(checkpoints(record_), {}); !found && found.error().code == Code::kNotFound)
    return nothing(found.error());
  ECHO_TRY(create_trainer(/*resumed=*/true));
  const auto loaded = load_checkpoint(checkpoints(record_), *trainer_, checkpoint_of_);
  if (!loaded) return nothing(loaded.error());
  for (const Resumed::Damaged& damaged : loaded->damaged) {
    log::warn("checkpoint {} is damaged and was left aside as damaged-{}: {}", damaged.name, damaged.name,
              damaged.reason);
    record_.event("checkpoint_damaged", {{"checkpoint", damaged.name}, {"reason", damaged.reason}});
  }
  saved_step_ = loaded->step;
  log::info("resuming from the checkpoint of step {}", steps());
  record_.event("resumed", {{"step", steps()}});
  return ok();
}

Status PolicyToTrain::begin() {
  if (config_.learner.warm_start.enabled) ECHO_TRY(warm_start());
  if (stop_) return ok();
  ECHO_TRY(create_trainer(/*resumed=*/false));
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
  const auto report = learner::warm_start(*model_, *phrasing_, *adapter_, warm, [&](const WarmStartProgress& p) {
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
  options.interrupted = [this] { return stop_.load(); };
  const auto result = learner::evaluate(*model_, *phrasing_, *adapter_, evaluation_, options);
  if (!result && result.error().code == Code::kCancelled) return ok();
  if (!result) return result.error();
  record_.metric("evaluation", {{"when", when},
                                {"step", steps()},
                                {"accuracy", result->accuracy()},
                                {"reward_mean", result->reward_mean},
                                {"problems", result->problems}});
  accuracy_[when] = result->accuracy();
  log::info("accuracy {} training, step {}: {:.3f} on {} held-out problems", when, steps(), result->accuracy(),
            result->problems);
  return ok();
}

Status PolicyToTrain::step_done() {
  const bool due = config_.evaluation.every > 0 && steps() % config_.evaluation.every == 0;
  return due && steps() < config_.run.steps ? evaluate("during") : ok();
}

Status PolicyToTrain::checkpoint() {
  if (!trainer_ || saved_step_ == trainer_->steps()) return ok();
  ECHO_ASSIGN(const std::filesystem::path saved, save_checkpoint(checkpoints(record_), *trainer_, *files_, checkpoint_of_,
                                                                 config_.learner.checkpoints_kept));
  saved_step_ = trainer_->steps();
  return model::place_directory(saved / "model", record_.folder() / "model", /*link=*/true);
}

Door PolicyToTrain::door() const {
  DoorOptions options;
  options.vocab_size = files_->config.vocab_size;
  options.positions_max = files_->config.positions_max;
  options.response_tokens_max = config_.rollout.response_tokens_max;
  options.trainable = [shape = files_->config](const schema::Trajectory& t) { return check_trainable(t, shape); };
  return Door(std::move(options), *adapter_, *phrasing_);
}

void PolicyToTrain::describe(schema::RunSpec& spec) const {
  spec.set_seed(config_.run.seed);
  spec.set_model_config_json(files_->config.to_json());
  spec.set_tokenizer_json(phrasing_->tokenizer().to_json());
  for (const model::Token token : phrasing_->eos()) spec.add_eos(static_cast<std::uint32_t>(token));
  spec.set_prompt_json(phrasing_->prompt_json());
  spec.set_adapter_name(config_.task.adapter);
  spec.set_adapter_config_json(config_.task.options_json);
}

}  // namespace echoline::learner
