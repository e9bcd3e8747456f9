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
#include "data_plane/settings.hpp"
#include "learner/training_config.hpp"
#include "model/settings.hpp"
#include "overlay/settings.hpp"
#include "provisioner/settings.hpp"
#include "provisioner/worker_engines.hpp"
#include "replay_buffer/rules.hpp"
#include "store/settings.hpp"

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

inline double default_learning_rate(const model::ModelSettings& model) {
  return model.path ? kLearningRateOfLoadedModel : kLearningRateOfNewModel;
}

// Greedy evaluation on held-out problems: before the first step, after the last, and in between.
struct EvaluationSection {
  std::uint32_t every = 0;                // steps; 0: only before and after
  std::optional<std::uint32_t> problems;  // only the first ones; absent: all
};

struct WarmStartSection {
  bool enabled = false;
  double target_accuracy = 0.4;    // on training problems; reaching it ends the warm start
  std::uint32_t steps_max = 1000;  // updates
  std::uint32_t batch = 128;       // problems per update
  double learning_rate = 1e-3;
};

enum class TrainerKind {
  kBuiltIn,
  kExternal,
  kTinker,  // the built-in trainer's computations, in the order that a Tinker client asks for
};

struct LearnerSection : TrainingSettings {
  TrainerKind trainer = TrainerKind::kBuiltIn;
  std::string api = "socket";  // for an external trainer: "socket", or HOST:PORT of this machine; kTinker: HOST:PORT
  std::string device = "cpu";  // cpu, cuda, cuda:N
  int threads = 1;             // threads of libtorch, and threads that encode policies; default on a GPU: all
  Compute compute = Compute::kFp32;
  bool recompute = false;               // computes activations again in the backward pass, to save memory
  std::uint32_t checkpoint_every = 10;  // steps
  std::uint32_t checkpoints_kept = 2;
  std::optional<double> usd_per_hour;  // the learner's own machine, part of plan and report; absent: not known
  WarmStartSection warm_start;
  model::AdapterConfig adapter;  // low-rank (LoRA); rank 0: none
};

// The engine of rented workers.
struct WorkerSection {
  std::string engine = "builtin";  // "builtin", "sglang", "vllm"
  std::string device = "cpu";      // device of the built-in engine: cpu, cuda, cuda:N
  std::string engine_command;      // the shell command that starts the server; for sglang and vllm
  // A start, a load of a policy or an answer that takes longer counts as hung.
  Duration engine_patience = std::chrono::minutes(10);
  int gpus_per_engine = 1;          // of sglang and vllm
  std::optional<int> engines;       // servers of a worker; absent: GPUs of its machine / gpus_per_engine
  std::optional<unsigned> threads;  // of a worker; 0: all of its host; absent: worker::EngineOptions decides
  // These settings as arguments of `echoline worker`, without the number of engines.
  std::vector<std::string> arguments(bool with_engine_command = true) const;
  // The engines of a worker, for the plan and for the worker's command.
  provisioner::WorkerEngines worker_engines() const;
};

struct RunConfig {
  RunSection run;
  model::ModelSettings model;
  data_plane::TaskSettings task;
  model::PromptStyle prompts;  // from the sections `task` and `rollout`
  EvaluationSection evaluation;
  data_plane::RolloutSettings rollout;
  replay_buffer::LeaseSettings lease;  // from the section `rollout` too
  replay_buffer::StalenessSettings staleness;
  LearnerSection learner;
  overlay::NetworkSettings network;
  provisioner::PathSettings paths;  // from the section `network` too
  provisioner::FleetSettings fleet;
  store::StoreSettings store;
  WorkerSection worker;
  std::string resolved_yaml;  // all settings, defaults included
  replay_buffer::Pacing pacing() const;
  replay_buffer::LeaseLength lease_length() const {
    return {.limits = lease, .tokens_max = rollout.response_tokens_max};
  }
  std::filesystem::path run_folder() const { return run.folder / run.name; }
};

// Reads `path`, applies the `--set key=value` overrides, and reports every problem at once (kInvalid,
// `file:line:col: message` per line). Relative paths in the file refer to the file's folder, those in overrides to the
// working directory.
Result<RunConfig> load_run_config(const std::filesystem::path& path,
                                  const std::vector<std::pair<std::string, std::string>>& overrides = {});

// Reads the sections of a run file that a simulated run has as well, from a file that the caller has opened. model,
// task, evaluation and worker may be absent. So may fleet.offers, because a simulation can make up offers.
void read_simulated_run(ConfigSection root, RunConfig& config);

// Every key of a run file with its meaning, including those of the built-in adapters.
std::vector<ConfigKey> run_file_keys();

}  // namespace echoline::learner
