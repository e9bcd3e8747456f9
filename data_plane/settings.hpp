// Keys of a run file: what the model learns (sections `task` and `tasks`), and how responses are generated (section
// `rollout`).
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
  std::string adapter;              // kSeveral where the run has several
  std::string options_json = "{}";  // the adapter's own configuration
  bool scored_by_workers = true;
  std::vector<TaskOfSeveral> several;
  // Whether workers hand in text only, which the learner scores; by a problem's id.
  bool scored_by_learner(std::string_view problem_id) const;
  // Whether workers score anything.
  bool any_scored_by_workers() const;
};

struct RolloutSettings {
  std::uint32_t prompts_per_step = 32;
  std::uint32_t group_size = 8;  // G; R = prompts_per_step * group_size trajectories per step
  double temperature = 1.0;
  double top_p = 1.0;
  std::uint32_t top_k = 0;  // 0: all
  double min_p = 0;
  std::uint32_t response_tokens_max = 64;
  std::optional<std::uint32_t> turn_tokens_max;
  schema::OnNewPolicy on_new_policy = schema::ON_NEW_POLICY_CONTINUE;
  Bytes metadata_max = kMetadataMax;  // of a trajectory
  std::uint64_t trajectories_per_step() const { return std::uint64_t{prompts_per_step} * group_size; }
  // Tokens are drawn from a part of the distribution.
  bool truncates() const { return top_p < 1 || top_k > 0 || min_p > 0; }
  // Writes the part that the run specification of the workers has of it.
  void describe(schema::RunSpec& spec) const;
};

// Each reads its keys; mistakes are noted in the section. `has_list`: the run has the list `tasks`, which read_list()
// reads from the root of the file.
void read(ConfigSection task, TaskSettings& settings, bool has_list);
void read_list(ConfigSection root, TaskSettings& settings);
void read(ConfigSection rollout, RolloutSettings& settings);

}  // namespace echoline::data_plane
