// What can be known to be wrong with a run before anything is rented and before an earlier run is touched. `plan`,
// `doctor` and the learner (and so `up`) all ask here, and rent by the plan that is made here.
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
  std::string name;  // resume, trainer, model, task, lengths, messages, publications, store, learning rate, sampling,
                     // port, plan, providers, memory, GPU memory
  Verdict verdict = Verdict::kOk;
  std::string detail;
  Code code = Code::kInvalid;  // of a failure
};

struct Preflight {
  std::vector<Check> checks;
  std::optional<RunPlan> plan;      // where there is one
  std::uint64_t prompt_tokens = 0;  // of the longest prompt that was looked at
  // Every failure at once, one per line: kInfeasible when that is all that is wrong, kInvalid otherwise.
  Status status() const;
};

struct PreflightFor {
  BuiltIn built_in;                 // the built-in trainer, as this program has it
  std::filesystem::path plan = {};  // if the file exists, it is the run's plan, and offers are not read
  bool resume = false;
};

// Reads everything that the run file names: the model's folder (its weights by their headers only), the task's data,
// the offers, devices, keys of providers. Takes the learner's port for a moment; changes nothing. The run file's
// budgets replace those of PreflightFor::plan.
Preflight preflight(const RunConfig& config, const PreflightFor& what);

// kInvalid unless a learner could listen there; port 0 is any.
Status can_listen(const std::string& host, std::uint16_t port);

// Whether a machine with so much memory can be the learner of such a model, with so many workers on it. `store`:
// network.store; `training` as the run file has it, absent where another program trains; workers_on_gpu: their weights
// are not here.
Check memory_check(const model::ModelConfig& model, std::optional<Bytes> store, std::size_t local_workers, Bytes have,
                   const std::optional<model::TrainingShape>& training = model::TrainingShape{},
                   bool workers_on_gpu = false);

// Memory that the learner and workers of this machine take on one GPU.
struct GpuLoad {
  std::string device;       // as the run file names it
  Bytes learner;            // most that training takes; 0: the learner computes elsewhere
  Bytes worker;             // most that a worker takes
  std::size_t workers = 0;  // that compute there
};
// The load of the device that the learner or workers of this machine are told to compute on: one for every device.
// `training` and `workers` as memory_check() has them.
std::vector<GpuLoad> gpu_loads(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens,
                               const std::optional<model::TrainingShape>& training, std::size_t workers);
// Whether a GPU of so much memory can hold it. kFailed when the learner or one worker does not fit alone, a warning
// when all together do not, or when it is not known how much the GPU has.
Check gpu_memory_check(const GpuLoad& load, std::optional<Bytes> have);

// What one group can take on its way to the learner.
Bytes submission_bytes_max(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens);

}  // namespace echoline::learner
