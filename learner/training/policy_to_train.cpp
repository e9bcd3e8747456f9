// The policy source of a run with the built-in trainer. The service calls it.
#include "learner/training/policy_to_train.hpp"

#include <xxhash.h>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/random_bits.hpp"
#include "learner/training/built_in.hpp"
#include "learner/training/datum_loss.hpp"
#include "learner/training/warm_start.hpp"
#include "model/finite.hpp"
#include "model/probe.hpp"
#include "model/runtime.hpp"
#include "model/torch.hpp"
#include "model/weights.hpp"

namespace echoline::learner {
namespace {

// Digest of the settings that a checkpoint must agree with: the model and the task, not the run's length or fleet.
std::string config_digest(const RunConfig& config, const model::ModelConfig& model) {
  std::string text =
      fmt::format("{}|{}|{}|{}", model.to_json(), config.task.adapter, config.task.options_json, config.run.seed);
  // Settings at their defaults add nothing, so that the digests of runs without them stay the same.
  const model::PromptStyle& style = config.prompts;
  if (style.text != model::kPromptPlace || style.chat)
    text += fmt::format("|{}|{}|{}|{}", style.text, style.chat, style.system, style.chat_options_json);
  if (const model::AdapterConfig& adapter = config.learner.adapter; adapter.rank > 0)
    text += fmt::format("|{}|{}|{}", adapter.rank, adapter.alpha, fmt::join(adapter.targets, ","));
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::filesystem::path checkpoints(const RunRecord& record) { return record.folder() / "checkpoints"; }

}  // namespace

BuiltIn built_in() {
  const auto load = [](const SourceHost& host, bool resume) -> Result<std::unique_ptr<PolicySource>> {
    ECHO_ASSIGN(std::unique_ptr<PolicySource> loaded, PolicyToTrain::load(host, resume));
    return loaded;
  };
  const auto can_compute_on = [](const std::string& name) -> Status {
    ECHO_TRY(model::device_named(name));
    return ok();
  };
  return {.load = load,
          .can_compute_on = can_compute_on,
          .settings_digest = config_digest,
          .probe = model::probe_policy,
          .device_memory = model::device_memory,
          .has_cuda = model::has_cuda};
}

Result<std::unique_ptr<PolicyToTrain>> PolicyToTrain::load(const SourceHost& host, bool resume) {
  std::unique_ptr<PolicyToTrain> policy(new PolicyToTrain(host));
  ECHO_TRY(policy->load_model());
  if (resume) ECHO_TRY(policy->resume());
  return policy;
}

Status PolicyToTrain::load_model() {
  host_.report_phase("loading the model");
  model::use_threads(host_.config.learner.threads);
  model::keep_freed_memory();
  torch::manual_seed(static_cast<std::uint64_t>(host_.config.run.seed));
  const LearnerSection& learner = host_.config.learner;
  ECHO_ASSIGN(const torch::Device device, model::device_named(learner.device));
  const auto type = learner.compute == Compute::kBf16 ? torch::kBFloat16 : torch::kFloat;
  if (host_.config.model.path) {
    ECHO_ASSIGN(model::LoadedModel loaded, model::load_model(*host_.config.model.path, device, type));
    model_ = loaded.transformer;
  } else {
    model::ModelConfig base = host_.task.files.config;
    base.adapter.reset();  // create_trainer() adds it
    ECHO_ASSIGN(model_, model::init(base, host_.config.run.seed, device, type));
  }
  model_->recompute_layers(learner.recompute);
  checkpoint_digests_.config_digest = config_digest(host_.config, host_.task.files.config);
  return ok();
}

Status PolicyToTrain::create_trainer(bool resumed) {
  TrainerConfig trainer_config;
  static_cast<TrainingSettings&>(trainer_config) = host_.config.learner;  // the settings that both structs have
  trainer_config.temperature = host_.config.rollout.temperature;
  trainer_config.seed = host_.config.run.seed;
  trainer_config.scrutiny_seed = random_bits64();
  // The adapter is added after a warm start, which trains the model itself.
  if (const std::optional<model::AdapterConfig>& adapter = host_.task.files.config.adapter) {
    if (!model_->config().adapter) {
      ECHO_TRY(model_->add_adapter(*adapter));
      ECHO_TRY(model::init_adapter(*model_, host_.config.run.seed));
    }
    model_->freeze_base();
  }
  std::shared_ptr<model::Transformer> reference;
  if (host_.config.learner.loss.kl_coefficient > 0) {
    // Frozen once, at the start of training, and kept with the run, because the model changes afterwards.
    if (!resumed) {
      ECHO_ASSIGN(const delta::OwnedState policy, model::export_policy(*model_));
      ECHO_TRY(freeze_reference(checkpoints(host_.record), policy));
    }
    reference = std::make_shared<model::Transformer>(host_.task.files.config, model_->device(), model_->dtype());
    ECHO_ASSIGN(checkpoint_digests_.reference_digest, load_reference(checkpoints(host_.record), *reference));
  }
  ECHO_ASSIGN(trainer_, Trainer::create(model_, trainer_config, reference));
  if (!model_->config().adapter) on_device_ = model::DeviceWeights::of(model_);
  return ok();
}

Status PolicyToTrain::resume() {
  const auto with_hint = [&](const Error& error) {
    return fail(error.code, error.operation, "{}{}", error.detail, earlier_runs_hint(host_.record.folder()));
  };
  // Checked first, because create_trainer() would report a missing reference policy instead of a missing checkpoint.
  if (const auto stored = find_policy(checkpoints(host_.record), {}); !stored && stored.error().code == Code::kNotFound)
    return with_hint(stored.error());
  ECHO_TRY(create_trainer(/*resumed=*/true));
  const auto loaded = load_checkpoint(checkpoints(host_.record), *trainer_, checkpoint_digests_);
  if (!loaded) return with_hint(loaded.error());
  for (const ResumeReport::Damaged& damaged : loaded->damaged) {
    log::warn("checkpoint {} is damaged and was left aside as damaged-{}: {}", damaged.name, damaged.name,
              damaged.reason);
    host_.record.append_event("checkpoint_damaged", {{"checkpoint", damaged.name}, {"reason", damaged.reason}});
  }
  saved_step_ = loaded->step;
  log::info("resuming from the checkpoint of step {}", steps());
  host_.record.append_event("resumed", {{"step", steps()}});
  return ok();
}

Status PolicyToTrain::begin() {
  if (host_.config.learner.warm_start.enabled) ECHO_TRY(warm_start());
  if (host_.stop) return ok();
  ECHO_TRY(create_trainer(/*resumed=*/false));
  host_.record.append_event("started", {{"step", steps()}});
  ECHO_TRY(evaluate("before"));
  return checkpoint();
}

Status PolicyToTrain::warm_start() {
  const SystemClock clock;
  host_.report_phase("warm start");
  const WarmStartSection& section = host_.config.learner.warm_start;
  WarmStartConfig warm_config;
  warm_config.optimizer = host_.config.learner.optimizer;
  warm_config.optimizer.learning_rate = section.learning_rate;
  warm_config.optimizer.schedule = Schedule::kConstant;
  warm_config.steps_max = section.steps_max;
  warm_config.microbatch_tokens = host_.config.learner.microbatch_tokens;
  warm_config.batch_problems = section.batch;
  warm_config.target_accuracy = section.target_accuracy;
  warm_config.response_tokens_max = host_.config.rollout.response_tokens_max;
  const TimePoint began_at = clock.now();
  const auto report = learner::warm_start(
      *model_, host_.task.phrasing, *host_.task.adapter, warm_config, [&](const WarmStartProgress& progress) {
        host_.report_phase(fmt::format("warm start: step {}, loss {:.3f}, accuracy {:.3f} of {:.2f}", progress.steps,
                                       progress.loss, progress.accuracy, warm_config.target_accuracy));
        return !host_.stop;
      });
  if (!report && report.error().code == Code::kCancelled && host_.stop) return ok();
  if (!report) return report.error();
  host_.record.append_metric("warm_start", {{"steps", report->steps},
                                            {"accuracy", report->accuracy},
                                            {"reached", report->reached_target},
                                            {"seconds", seconds(clock.now() - began_at)}});
  return ok();
}

Status PolicyToTrain::evaluate(const char* when) {
  host_.report_phase(fmt::format("evaluating {} training", when));
  EvaluationOptions options;
  options.response_tokens_max = host_.config.rollout.response_tokens_max;
  options.turn_tokens_max = host_.config.rollout.turn_tokens_max.value_or(0);
  options.interrupted = [this] { return host_.stop.load(); };
  const auto result =
      learner::evaluate(*model_, host_.task.phrasing, *host_.task.adapter, host_.task.evaluation, options);
  if (!result && result.error().code == Code::kCancelled) return ok();
  if (!result) return result.error();
  nlohmann::json row = {{"when", when},
                        {"step", steps()},
                        {"accuracy", result->accuracy()},
                        {"reward_mean", result->reward_mean},
                        {"problems", result->problems}};
  if (!result->components.empty()) row["components"] = result->components;
  if (!result->by_task.empty()) row["by_task"] = result->by_task.figures("problems");
  host_.record.append_metric("evaluation", std::move(row));
  accuracy_[when] = result->accuracy();
  log::info("accuracy {} training, step {}: {:.3f} on {} held-out problems", when, steps(), result->accuracy(),
            result->problems);
  return ok();
}

Result<std::optional<TrainedStep>> PolicyToTrain::step(const std::vector<schema::Trajectory>& batch) {
  ECHO_ASSIGN(StepReport report, trainer_->step(batch));
  TrainedStep trained;
  trained.figures = {{"loss", report.loss},
                     {"gradient_norm", report.gradient_norm},
                     {"entropy", report.entropy},
                     {"ratio_mean", report.ratio_mean},
                     {"clip_fraction", report.clip_fraction},
                     {"capped_fraction", report.capped_fraction},
                     {"behaviour_kl", report.behaviour_kl},
                     {"reference_kl", report.reference_kl},
                     {"effective_sample_fraction", report.effective_sample_fraction},
                     {"learning_rate", report.learning_rate},
                     {"updates_skipped", report.updates_skipped},
                     {"informative_groups", report.informative_groups},  // by rewards with penalties
                     {"zero_advantage_fraction",
                      1 - static_cast<double>(report.informative_groups) / static_cast<double>(report.groups)},
                     {"response_tokens", report.response_tokens}};  // without masked tokens
  trained.scrutiny = std::move(report.scrutiny);
  return std::optional(std::move(trained));
}

Result<DatumResult> PolicyToTrain::forward_backward(const DatumBatch& batch) {
  return compute_datum_loss(*model_, trainer_->optimizer(), batch, host_.config.learner.microbatch_tokens);
}

Result<AdamReport> PolicyToTrain::optim_step(const AdamSettings& settings) {
  ECHO_ASSIGN(const OptimizerConfig config, optimizer_config(settings, host_.config.learner.optimizer));
  trainer_->optimizer().set_config(config);
  const UpdateReport report = trainer_->optimizer().step();
  if (report.applied) trainer_->set_steps(trainer_->steps() + 1);
  return AdamReport{.gradient_norm = report.gradient_norm, .applied = report.applied};
}

Status PolicyToTrain::begin_adapter(std::optional<std::uint64_t> seed) {
  ECHO_TRY(model::init_adapter(*model_, seed.value_or(host_.config.run.seed)));
  trainer_->optimizer().clear_gradients();
  trainer_->optimizer().reset(host_.config.learner.optimizer);
  trainer_->set_steps(trainer_->steps() + 1);
  return ok();
}

// Written beside the folder first, so that an end of the process leaves the earlier state or the new one.
Status PolicyToTrain::save_state(const std::filesystem::path& folder) {
  const std::filesystem::path next = folder.string() + ".next";
  std::error_code error;
  std::filesystem::remove_all(next, error);
  ECHO_TRY(save_checkpoint(next, *trainer_, host_.task.files, checkpoint_digests_, /*keep_last=*/1));
  std::filesystem::remove_all(folder, error);
  std::filesystem::rename(next, folder, error);
  if (error) return fail(Code::kIo, "save weights", "{}: {}", folder.string(), error.message());
  return ok();
}

Status PolicyToTrain::load_state(const std::filesystem::path& folder, bool optimizer) {
  const std::int64_t steps = trainer_->steps();
  ECHO_TRY(load_checkpoint(folder, *trainer_, checkpoint_digests_));
  trainer_->optimizer().clear_gradients();
  if (!optimizer) trainer_->optimizer().reset(host_.config.learner.optimizer);
  trainer_->set_steps(steps + 1);
  return ok();
}

Result<delta::SharedState> PolicyToTrain::policy(Version version) {
  ECHO_ASSIGN(delta::SharedState policy, make_policy());
  if (on_device_ && on_device_->all_finite()) return policy;
  const auto threads = static_cast<unsigned>(host_.config.learner.threads);
  if (const Status finite = model::check_finite(policy->view(), threads); !finite)
    return fail(Code::kCorrupt, "train",
                "version {} is not published, because {}. The run stands at the newest checkpoint: go on from there "
                "with --resume, and a lower learner.learning_rate",
                version.value, finite.error().message());
  return policy;
}

Result<delta::SharedState> PolicyToTrain::make_policy() {
  if (on_device_) return on_device_->policy();
  if (!model_->config().adapter) {
    ECHO_ASSIGN(delta::OwnedState policy, trainer_->policy());
    return delta::share(std::move(policy));
  }
  if (!base_) {
    ECHO_ASSIGN(base_, model::export_base(model_));
  }
  ECHO_ASSIGN(delta::OwnedState policy, model::export_policy(*model_, base_));
  return delta::share(std::move(policy));
}

Status PolicyToTrain::on_step_end() {
  const bool is_due = host_.config.evaluation.every > 0 && steps() % host_.config.evaluation.every == 0;
  return is_due && steps() < host_.config.run.steps ? evaluate("during") : ok();
}

Status PolicyToTrain::checkpoint() {
  if (!trainer_) return ok();
  if (saved_step_ != trainer_->steps()) {
    ECHO_ASSIGN(checkpoint_to_place_, save_checkpoint(checkpoints(host_.record), *trainer_, host_.task.files,
                                                      checkpoint_digests_, host_.config.learner.checkpoints_kept));
    saved_step_ = trainer_->steps();
  }
  if (checkpoint_to_place_.empty()) return ok();
  ECHO_TRY(
      model::place_directory(checkpoint_to_place_ / kCheckpointModel, host_.record.folder() / "model", /*link=*/true));
  checkpoint_to_place_.clear();
  return ok();
}

}  // namespace echoline::learner
