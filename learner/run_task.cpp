// Reads a run's task and tokenizer, for the service and the preflight.
#include "learner/run_task.hpp"

#include "learner/batch.hpp"
#include "learner/planning.hpp"

namespace echoline::learner {

Result<std::unique_ptr<data_plane::Adapter>> make_task_adapter(const RunConfig& config) {
  ECHO_ASSIGN(auto adapter, data_plane::make_adapter(config.task.adapter, config.task.options_json, config.run.seed));
  if (!config.task.scored_by_workers) ECHO_TRY(data_plane::can_be_scored_later(*adapter));
  return adapter;
}

Result<RunTask> RunTask::read(const RunConfig& config) {
  ECHO_ASSIGN(model::ModelFiles files, config.model.path
                                           ? model::ModelFiles::read(*config.model.path, model_use(config))
                                           : model::ModelFiles::of_preset(*config.model.preset));
  ECHO_TRY(set_low_rank_adapter(config, files.config));
  ECHO_ASSIGN(model::Phrasing phrasing, model::Phrasing::make(files, config.prompts));
  ECHO_ASSIGN(auto adapter, make_task_adapter(config));
  std::vector<schema::Problem> evaluation = adapter->evaluation();
  if (config.evaluation.problems && *config.evaluation.problems < evaluation.size())
    evaluation.resize(*config.evaluation.problems);
  return RunTask{std::move(files), std::move(phrasing), std::move(adapter), std::move(evaluation)};
}

SubmissionChecker RunTask::make_submission_checker(const RunConfig& config) const {
  SubmissionCheckerOptions options;
  options.vocab_size = files.config.vocab_size;
  options.positions_max = files.config.positions_max;
  options.response_tokens_max = config.rollout.response_tokens_max;
  options.turn_tokens_max = config.rollout.turn_tokens_max.value_or(0);
  options.seed = config.run.seed;
  options.metadata_max = config.rollout.metadata_max;
  options.expert_choices = expert_choices_max(config, files.config);
  options.unscored = [task = config.task](const schema::Problem& problem) {
    return task.scored_by_learner(problem.id());
  };
  options.trainable = [shape = files.config](const schema::Trajectory& trajectory) {
    return check_trainable(trajectory, shape);
  };
  return SubmissionChecker(std::move(options), *adapter, phrasing);
}

void RunTask::describe(const RunConfig& config, schema::RunSpec& spec) const {
  spec.set_seed(config.run.seed);
  spec.set_model_config_json(files.config.to_json());
  spec.set_records_experts(expert_choices_max(config, files.config) > 0);
  // This adapter is part of the policy's weights (LoRA); the member `adapter` belongs to the task.
  if (files.config.adapter) {
    model::AdapterConfig adapter = *files.config.adapter;
    adapter.base_model.clear();  // a folder of this machine
    spec.set_policy_adapter_json(adapter.to_json());
  }
  spec.set_tokenizer_json(phrasing.tokenizer().to_json());
  for (const model::Token token : phrasing.eos()) spec.add_eos(static_cast<std::uint32_t>(token));
  spec.set_prompt_json(phrasing.prompt_json());
  // A kCarried model can only be computed by a server. It reads a model folder, which needs the model's own config and
  // tokenizer files.
  if (files.config.family == model::Family::kCarried)
    for (const auto& [name, text] : files.side_files()) (*spec.mutable_model_files())[name] = text;
  // The task's options may contain secrets, so they stay here unless workers need them for scoring.
  if (!config.task.any_scored_by_workers()) return;
  spec.set_adapter_name(config.task.adapter);
  spec.set_adapter_config_json(adapter->options_for_workers(config.task.options_json));
}

}  // namespace echoline::learner
