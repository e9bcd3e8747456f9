// Resuming a run: its preconditions, the settings that it must keep, and the changed ones.
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

// A setting whose value in config.yaml differs from the run file's.
struct SettingChange {
  std::string key;
  std::optional<std::string> before, now;  // absent: the key was or is missing
};

// The changed settings, sorted by key. Empty if the run's folder has no config.yaml; kCorrupt if it is not YAML.
Result<std::vector<SettingChange>> changed_settings(const RunConfig& config);

// Whether the run in the folder of `config` can resume with these settings. Only reads. kNotFound: no run or no
// checkpoint. kInvalid: a setting that a run must keep is different.
Status check_resume(const RunConfig& config, const model::ModelConfig& model, const BuiltIn& built_in);

// Writes the changed settings to the run's events and metrics, before config.yaml is replaced.
Status record_changed_settings(RunRecord& record, const RunConfig& config, std::uint64_t step);

// Stores in consumed.json, in the run's folder, that step `step` (counted from 0) was trained on these groups. Call it
// if the replay buffer could not mark them as consumed; mark_consumed() does so when the run is resumed.
Status store_unmarked_batch(const std::filesystem::path& folder, std::uint64_t step,
                            const std::vector<GroupId>& groups);
// Calls `consume` for these groups if the run resumes at the next step, and removes the file. Logs a failure.
void mark_consumed(const std::filesystem::path& folder, std::uint64_t resume_step,
                   const std::function<Status(std::uint64_t step, const replay_buffer::Batch&)>& consume);

}  // namespace echoline::learner
