// A run file (configs/*.yaml) as typed values: every section, its defaults and its cross-field rules.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"
#include "chains/topology.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/schema.pb.h"
#include "data_plane/trajectory.hpp"
#include "learner/training_config.hpp"
#include "overlay/settings.hpp"
#include "provisioner/settings.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline {
struct ConfigKey;
class ConfigSection;
}  // namespace echoline

namespace echoline::learner {

struct RunSection {
  std::string name;  // the run's folder under `folder`; letters, digits, '-', '_' and '.'
  std::uint64_t seed = 1;
  std::uint64_t steps = 100;              // learner steps in the whole run
  std::filesystem::path folder = "runs";  // once read, absolute like every path of the run file
};

struct ModelSection {
  // Exactly one of the two: a preset initialised from the seed, or a Hugging Face directory.
  std::optional<std::string> preset;
  std::optional<std::filesystem::path> path;
  double default_learning_rate() const { return path ? kLearningRateOfLoadedModel : kLearningRateOfNewModel; }
};

struct TaskSection {
  std::string adapter;              // data_plane::kSeveral where the run has several
  std::string options_json = "{}";  // the adapter's own configuration
  bool scored_by_workers = true;
  std::vector<data_plane::TaskOfSeveral> several;
  // Whether workers hand in text only, which the learner scores; by a problem's id.
  bool scored_by_learner(std::string_view problem_id) const;
  // How a problem is put to the model (model/phrasing.hpp).
  std::string prompt = "{prompt}";         // the problem goes where {prompt} stands
  std::string turn = "\n{observation}\n";  // without `chat`: between a turn and the next
  bool chat = false;                       // in the model's chat template, as the message of a user
  std::string system;                      // the message before it; needs `chat`
  std::string chat_options_json = "{}";    // more names for the template, such as enable_thinking
};

// Greedy answers to held-out problems: before the first step, after the last, and in between.
struct EvaluationSection {
  std::uint32_t every = 0;                // steps; 0: only before and after
  std::optional<std::uint32_t> problems;  // the first so many; absent: all
};

struct RolloutSection {
  std::uint32_t prompts_per_step = 32;
  std::uint32_t group_size = 8;  // G; R = prompts_per_step * group_size trajectories per step
  double temperature = 1.0;
  double top_p = 1.0;
  std::uint32_t top_k = 0;  // 0: all
  double min_p = 0;
  std::uint32_t response_tokens_max = 64;
  std::optional<std::uint32_t> turn_tokens_max;
  std::vector<std::string> stop;                  // strings that end a response
  Bytes metadata_max = data_plane::kMetadataMax;  // of a trajectory
  schema::OnNewPolicy on_new_policy = schema::ON_NEW_POLICY_CONTINUE;
  replay_buffer::LeaseSettings lease;
  std::uint64_t trajectories_per_step() const { return std::uint64_t{prompts_per_step} * group_size; }
  bool truncates() const {
    return top_p < 1 || top_k > 0 || min_p > 0;
  }  // tokens are drawn from a part of the distribution
};

struct WarmStartSection {
  bool enabled = false;
  double target_accuracy = 0.4;  // on training problems
  std::uint32_t steps_max = 1000;
  std::uint32_t batch = 128;
  double learning_rate = 1e-3;
};

enum class TrainerKind { kBuiltIn, kExternal };

struct LearnerSection : TrainingSettings {
  TrainerKind trainer = TrainerKind::kBuiltIn;
  std::string api = "socket";  // for an external one: "socket", or HOST:PORT of this machine
  int threads = 1;             // of libtorch
  std::string device = "cpu";  // cpu, cuda, cuda:N
  Compute compute = Compute::kFp32;
  bool recompute = false;
  std::uint32_t checkpoint_every = 10;  // steps
  std::uint32_t checkpoints_kept = 2;
  std::optional<double> usd_per_hour;  // the learner's own machine, part of plan and report; absent: not known
  WarmStartSection warm_start;
};

// What rented workers generate with.
struct WorkerSection {
  std::string engine = "builtin";  // "builtin", "sglang", "vllm"
  std::string device = "cpu";      // where the built-in engine computes: cpu, cuda, cuda:N
  std::string engine_command;      // starts the latter two
  Duration engine_patience = std::chrono::minutes(10);
  // Words that `echoline worker` takes for it.
  std::vector<std::string> arguments() const;
};

struct RunConfig {
  RunSection run;
  ModelSection model;
  TaskSection task;
  EvaluationSection evaluation;
  RolloutSection rollout;
  replay_buffer::StalenessSettings staleness;
  LearnerSection learner;
  overlay::NetworkSettings network;
  provisioner::PathSettings paths;  // of the section `network` too
  provisioner::FleetSettings fleet;
  WorkerSection worker;
  std::string resolved_yaml;  // what was read, defaults included
  replay_buffer::Pacing pacing() const;
  replay_buffer::LeaseLength lease_length() const { return {rollout.lease, rollout.response_tokens_max}; }
  std::filesystem::path run_folder() const { return run.folder / run.name; }
};

// Reads `path`, applies the `--set key=value` overrides, and reports every problem at once (kInvalid,
// `file:line:col: message` per line). Relative paths in the file refer to the file's folder, those in overrides to the
// working directory.
Result<RunConfig> load_run_config(const std::filesystem::path& path,
                                  const std::vector<std::pair<std::string, std::string>>& overrides = {});

// The sections of a run file that a simulated run has as well, from a file that the caller has opened. model, task,
// evaluation and worker may be absent; so may fleet.offers, where offers are made up elsewhere.
void read_simulated_run(ConfigSection root, RunConfig& config);

// Every key of a run file with its meaning, as the reader has it; those of the built-in adapters included.
std::vector<ConfigKey> run_file_keys();

}  // namespace echoline::learner
