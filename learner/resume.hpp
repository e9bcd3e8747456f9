// A run that goes on: what must be there, which settings it keeps, and which of the others are new.
#pragma once
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "learner/policy_source.hpp"
#include "learner/run_config.hpp"
#include "learner/run_record.hpp"
#include "model/config.hpp"
#include "replay_buffer/buffer.hpp"

namespace echoline::learner {

// A value of config.yaml that the run file gives another value now.
struct SettingChange {
  std::string key;
  std::optional<std::string> before, now;  // absent: the key was, or is, not there
};

// By key. Empty when the run's folder has no config.yaml; kCorrupt when it is no YAML.
Result<std::vector<SettingChange>> changed_settings(const RunConfig& config);

// Whether the run in the folder of `config` can go on with these settings. Only reads. Errors: kNotFound without a run
// or a checkpoint, kInvalid when a setting differs that a run keeps.
Status check_resume(const RunConfig& config, const model::ModelConfig& model, const BuiltIn& built_in);

// Puts the changed settings into the run's events and metrics, before config.yaml is replaced.
Status note_changed_settings(RunRecord& record, const RunConfig& config, std::uint64_t step);

// Step `step`, counted from 0, was trained on these groups, and the replay buffer could not mark them as consumed: the
// file consumed.json in the run's folder says so until the run is resumed.
Status note_unmarked(const std::filesystem::path& folder, std::uint64_t step, const std::vector<GroupId>& groups);
// Has `consume` mark them, if the run is resumed at the step after, and removes the file. A failure is logged.
void mark_consumed(const std::filesystem::path& folder, std::uint64_t resume_step,
                   const std::function<Status(std::uint64_t step, const replay_buffer::Batch&)>& consume);

}  // namespace echoline::learner
