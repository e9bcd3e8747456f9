// Checks a run before any machine is rented and before an earlier run of its name is moved away. Used by `echoline
// plan` and `doctor`, and by the learner (so also by `up`), which rents machines by the resulting plan.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "learner/planning.hpp"
#include "learner/policy_source.hpp"
#include "learner/run_config.hpp"
#include "model/training_memory.hpp"

namespace echoline::learner {

enum class Verdict { kOk, kWarning, kFailed };

struct Check {
  std::string name;  // such as "model" or "GPU memory"; a check has the same name in every run
  Verdict verdict = Verdict::kOk;
  std::string detail;
  Code code = Code::kInvalid;  // of a failure
};

struct Preflight {
  std::vector<Check> checks;
  std::optional<RunPlan> plan;      // absent if no plan was made
  std::uint64_t prompt_tokens = 0;  // of the longest prompt checked
  // All failures at once, one per line: kInfeasible if every failure has that code, kInvalid otherwise.
  Status status() const;
};

struct PreflightOptions {
  BuiltIn built_in;                 // this program's built-in trainer; empty in a program without libtorch
  std::filesystem::path plan = {};  // if the file exists, it is the run's plan, and offers are not read
  bool resume = false;
  // The run will start on another machine: failures of this one are warnings.
  bool elsewhere = false;
};

// Reads everything that the run file names: the model's folder (only the headers of its weights), the task's data,
// offers, devices, keys of providers. Takes the learner's port for a moment; changes nothing. The run file's budgets
// replace those of PreflightOptions::plan.
Preflight preflight(const RunConfig& config, const PreflightOptions& options);

// kInvalid unless a learner could listen on this address; port 0: any.
Status can_listen(const std::string& host, std::uint16_t port);

// Whether a machine with `available` bytes of memory can be the learner of this model, while `local_workers` workers
// run on it too. `store`: memory for publications kept for late workers (network.store); absent: the overlay's default.
// `training`: from the run file; absent for an external trainer. `workers_on_gpu`: the workers' weights are in a GPU's
// memory instead.
Check memory_check(const model::ModelConfig& model, std::optional<Bytes> store, std::size_t local_workers,
                   Bytes available, const std::optional<model::TrainingShape>& training = model::TrainingShape{},
                   bool workers_on_gpu = false);

// Memory that the learner and workers of this machine take on one GPU.
struct GpuLoad {
  std::string device;       // as the run file names it
  Bytes learner;            // most memory of training; 0: the learner uses another device
  Bytes worker;             // most memory of one worker
  std::size_t workers = 0;  // workers on this GPU
};
// The loads of the devices that the learner and this machine's workers use, one per device. `training` and `workers` as
// in memory_check().
std::vector<GpuLoad> gpu_loads(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens,
                               const std::optional<model::TrainingShape>& training, std::size_t workers);
// Whether a GPU with `available` bytes of memory can carry the load. kFailed: the learner or one worker alone does not
// fit. A warning: all together do not fit, or the GPU's memory is unknown.
Check gpu_memory_check(const GpuLoad& load, std::optional<Bytes> available);

// Most bytes of one group's submission to the learner.
Bytes submission_bytes_max(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens);

}  // namespace echoline::learner
