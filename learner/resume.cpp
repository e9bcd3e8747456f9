// Checks and prepares the resumption of a run, for the preflight and the service.
#include "learner/resume.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/config_flat.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "learner/checkpoint_folder.hpp"
#include "learner/run_record.hpp"

namespace echoline::learner {
namespace {

constexpr std::string_view kOperation = "resume", kConsumedFile = "consumed.json";
constexpr std::size_t kConsumedBytesMax = 64 << 20;

std::string list_changes(const std::vector<SettingChange>& changes,
                         const std::function<bool(const std::string&)>& is_listed) {
  std::string text;
  for (const SettingChange& change : changes)
    if (is_listed(change.key))
      text += fmt::format("{}{} was {} and is {}", text.empty() ? "" : ", ", change.key,
                          change.before.value_or("not given"), change.now.value_or("not given"));
  return text;
}

}  // namespace

Result<std::vector<SettingChange>> changed_settings(const RunConfig& config) {
  const std::filesystem::path file = config.run_folder() / "config.yaml";
  const auto text = read_file(file);
  if (!text && text.error().code == Code::kNotFound) return std::vector<SettingChange>();
  if (!text) return text.error();
  const auto stored_settings = flat_config(*text);
  if (!stored_settings)
    return fail(Code::kCorrupt, kOperation, "{}: {}; put the settings of the run's start into it, or remove it",
                file.string(), stored_settings.error().detail);
  ECHO_ASSIGN(const auto current_settings, flat_config(config.resolved_yaml));
  std::vector<SettingChange> changes;
  for (const auto& [key, value] : *stored_settings) {
    const auto current = current_settings.find(key);
    if (current == current_settings.end())
      changes.push_back({.key = key, .before = value, .now = {}});
    else if (current->second != value)
      changes.push_back({.key = key, .before = value, .now = current->second});
  }
  for (const auto& [key, value] : current_settings)
    if (!stored_settings->contains(key)) changes.push_back({.key = key, .before = {}, .now = value});
  std::ranges::sort(changes, {}, &SettingChange::key);
  return changes;
}

Status record_changed_settings(RunRecord& record, const RunConfig& config, std::uint64_t step) {
  ECHO_ASSIGN(const std::vector<SettingChange> changes, changed_settings(config));
  const auto text_or_null = [](const std::optional<std::string>& value) {
    return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
  };
  for (const SettingChange& change : changes) {
    log::info("from step {} on {} is {} (before: {})", step, change.key, change.now.value_or("not given"),
              change.before.value_or("not given"));
    const nlohmann::json fields = {
        {"key", change.key}, {"old", text_or_null(change.before)}, {"new", text_or_null(change.now)}, {"step", step}};
    record.append_event("setting_changed", fields);
    record.append_metric("setting_changed", fields);  // the report reads it
  }
  return record.write_pending_rows();
}

Status store_unmarked_batch(const std::filesystem::path& folder, std::uint64_t step,
                            const std::vector<GroupId>& groups) {
  nlohmann::json ids = nlohmann::json::array();
  for (const GroupId id : groups) ids.push_back(id.value);
  return write_file_atomic(folder / kConsumedFile, json_text({{"step", step}, {"groups", ids}}) + "\n");
}

void mark_consumed(const std::filesystem::path& folder, std::uint64_t resume_step,
                   const std::function<Status(std::uint64_t step, const replay_buffer::Batch&)>& consume) {
  const std::filesystem::path file = folder / kConsumedFile;
  const auto text = read_file(file, kConsumedBytesMax);
  if (!text && text.error().code == Code::kNotFound) return;
  const auto stored = text ? nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false) : nlohmann::json();
  const bool is_valid =
      stored.is_object() && stored.contains("step") && stored["step"].is_number_unsigned() && stored.contains("groups");
  // If the run resumes from an older checkpoint, the step is done again.
  if (is_valid && stored["step"].get<std::uint64_t>() + 1 == resume_step) {
    replay_buffer::Batch batch{.step = resume_step - 1, .groups = {}};
    for (const nlohmann::json& id : stored["groups"])
      if (id.is_number_unsigned())
        batch.groups.push_back({.id = GroupId{id.get<std::uint64_t>()}, .version = {}, .trajectories = {}});
    if (const Status marked = consume(batch.step, batch); !marked)
      log::warn("{}: {}; groups may be trained on a second time", file.string(), marked.error().message());
  }
  std::error_code ignored;
  std::filesystem::remove(file, ignored);
}

Status check_resume(const RunConfig& config, const model::ModelConfig& model, const BuiltIn& built_in) {
  const std::filesystem::path folder = config.run_folder(), checkpoints = folder / "checkpoints";
  if (!std::filesystem::exists(folder / "metrics.jsonl"))
    return fail(Code::kNotFound, kOperation, "{} holds no run; start it without --resume{}", folder.string(),
                earlier_runs_hint(folder));
  if (const auto policy = find_policy(checkpoints); !policy && policy.error().code == Code::kNotFound)
    return fail(Code::kNotFound, kOperation, "{} holds no checkpoint; start the run without --resume{}",
                checkpoints.string(), earlier_runs_hint(folder));
  ECHO_ASSIGN(const std::vector<SettingChange> changes, changed_settings(config));
  const std::string group_size_change =
      list_changes(changes, [](const std::string& key) { return key == "rollout.group_size"; });
  if (!group_size_change.empty())
    return fail(Code::kInvalid, kOperation,
                "{}: {}; a run keeps its group size, because its replay buffer holds groups of it", folder.string(),
                group_size_change);
  // All that follows concerns checkpoints of the built-in trainer.
  if (config.learner.trainer == TrainerKind::kExternal || !built_in.settings_digest) return ok();
  if (config.learner.loss.kl_coefficient > 0 && !std::filesystem::exists(checkpoints / kReferencePolicyFile))
    return fail(Code::kInvalid, kOperation,
                "{} does not exist: the run began with learner.kl_coefficient 0, so it has no reference policy. "
                "Resume it with kl_coefficient 0, or start a new run",
                (checkpoints / kReferencePolicyFile).string());
  // An unreadable checkpoint does not prevent resuming: loading falls back to an older one.
  const auto newest = find_policy(checkpoints);
  const auto state =
      newest ? read_checkpoint_state(newest->model.parent_path()) : Result<nlohmann::json>(newest.error());
  if (!state || !state->contains("config_digest") ||
      (*state)["config_digest"] == built_in.settings_digest(config, model))
    return ok();
  const std::string changed_keys = list_changes(changes, [](const std::string& key) {
    return key.starts_with("model.") || key.starts_with("task.") || key.starts_with("tasks") || key == "run.seed" ||
           key.starts_with("learner.adapter.");
  });
  return fail(
      Code::kInvalid, kOperation,
      "{} belongs to a run with another model, adapter, task or seed ({}): resume with the settings that the run was "
      "started with, or start another run",
      newest->model.parent_path().string(),
      changed_keys.empty() ? "the files that they name have changed" : changed_keys);
}

}  // namespace echoline::learner
