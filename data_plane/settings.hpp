// Keys of the run file's sections `task` and `tasks` (what the model learns) and `rollout` (how workers generate
// responses).
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/units.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/schema.pb.h"
#include "data_plane/trajectory.hpp"

namespace echoline {
class ConfigSection;
}

namespace echoline::data_plane {

struct TaskSettings {
  std::string adapter;              // the task's; kSeveralTasksAdapter if the run file lists `tasks`
  std::string options_json = "{}";  // the adapter's own configuration
  bool scored_by_workers = true;
  std::vector<WeightedTask> listed_tasks;
  // Whether the learner scores this problem's responses; workers then return only their text.
  bool scored_by_learner(std::string_view problem_id) const;
  // Whether workers score the responses of any task.
  bool any_scored_by_workers() const;
};

struct RolloutSettings {
  std::uint32_t prompts_per_step = 32;  // problems in a learner step
  std::uint32_t group_size = 8;         // G; R = prompts_per_step * group_size trajectories per step
  double temperature = 1.0;
  double top_p = 1.0;
  std::uint32_t top_k = 0;  // 0: all
  double min_p = 0;
  std::uint32_t response_tokens_max = 64;
  std::optional<std::uint32_t> turn_tokens_max;  // absent: a turn is limited by response_tokens_max only
  schema::OnNewPolicy on_new_policy = schema::ON_NEW_POLICY_CONTINUE;  // for a worker's unfinished responses
  Bytes metadata_max = kMetadataLimitDefault;                          // limit of a trajectory's metadata
  std::uint64_t trajectories_per_step() const { return std::uint64_t{prompts_per_step} * group_size; }
  // Whether sampling leaves out part of the distribution.
  bool truncates() const { return top_p < 1 || top_k > 0 || min_p > 0; }
  // Writes these settings into the run specification for workers.
  void write_to(schema::RunSpec& spec) const;
};

// Each function reads its keys and records mistakes in the section. `lists_tasks`: the run file has the list `tasks`,
// which read_list() reads from the file's root.
void read(ConfigSection task, TaskSettings& settings, bool lists_tasks);
void read_list(ConfigSection root, TaskSettings& settings);
void read(ConfigSection rollout, RolloutSettings& settings);

}  // namespace echoline::data_plane
