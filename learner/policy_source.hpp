// The source of a run's policies: the interface between the service, which uses no tensors, and a trainer.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "data_plane/trajectory.hpp"
#include "delta/tensor.hpp"
#include "learner/credibility.hpp"
#include "learner/datum_trainer.hpp"
#include "learner/run_config.hpp"
#include "learner/run_record.hpp"
#include "learner/run_task.hpp"
#include "model/config.hpp"

namespace echoline::learner {

class NodeCalls;

// Computes a policy's log-probabilities of model::probe_text(). kInvalid if its log-probabilities are not finite at the
// run's temperature. Empty in a program without the built-in model.
using PolicyProbe = std::function<Result<std::vector<double>>(
    const delta::StateView& policy, const model::ModelConfig& model, double temperature, int threads)>;

// The parts of a run that its policy source uses. They outlive the source.
struct SourceHost {
  const RunConfig& config;
  const RunTask& task;
  RunRecord& record;
  // Reports the current phase, for status.json; may be called at any rate.
  std::function<void(const std::string&)> report_phase;
  // Call a few times a second during long waits. An error ends the run.
  std::function<Status()> while_waiting;
  const std::atomic<bool>& stop;  // turns true when the run must end
  PolicyProbe probe = {};
  NodeCalls* node_calls = nullptr;  // calls of an external trainer's ranks on other machines; null: there are none
};

// A trainer's report on a learner step. Values that the trainer does not know are absent.
struct TrainedStep {
  nlohmann::json figures = nlohmann::json::object();  // numbers by name, into the step's row of metrics.jsonl
  std::map<WorkerId, Scrutiny> scrutiny;  // of some responses of each worker, under the policy before this step
};

// One thread, the service's. Version v is the policy after v learner steps.
class PolicySource {
 public:
  virtual ~PolicySource() = default;

  // Learner steps done; after a resume those of the checkpoint.
  virtual std::uint64_t steps() const = 0;
  // For a run that is not resumed: does all work before the first learner step, such as a warm start. Returns early
  // when asked to stop.
  virtual Status begin() = 0;
  // Performs learner step steps() + 1 on whole groups. Absent if the run was stopped first: then the groups were not
  // used.
  virtual Result<std::optional<TrainedStep>> step(const std::vector<schema::Trajectory>& batch) = 0;
  // The policy of `version`, in bf16 with Hugging Face's names. Only the newest one exists, so `version` is steps().
  // Null if the run was stopped first.
  virtual Result<delta::SharedState> policy(Version version) = 0;
  // Called after each learner step, when its policy is handed over for publication. Evaluates at the run's interval.
  virtual Status on_step_end() = 0;
  // Writes the greedy accuracy on the held-out problems to the metrics, if the source can evaluate. `when`: "before",
  // "during" or "after" the training. Returns early when asked to stop.
  virtual Status evaluate(const char* when) = 0;
  // Writes a checkpoint (learner/checkpoint_folder.hpp) and puts its policy into the run's folder `model`. No effect
  // before begin(), or if the newest checkpoint is of this step.
  virtual Status checkpoint() = 0;
  virtual const std::map<std::string, double>& accuracy() const = 0;  // by `when`
  // Trains on a client's own examples; null if the source cannot. Call it after begin().
  virtual DatumTrainer* datum_trainer() { return nullptr; }
};

// Makes a source; with `resume`, from the run's newest checkpoint.
using SourceMaker = std::function<Result<std::unique_ptr<PolicySource>>(const SourceHost& host, bool resume)>;

// The functions of the built-in trainer; all empty in a program without libtorch.
struct BuiltIn {
  SourceMaker load;
  std::function<Status(const std::string& device)> can_compute_on;  // kInvalid with the reason
  // Digest of the settings that a checkpoint must agree with; in trainer.json as config_digest.
  std::function<std::string(const RunConfig&, const model::ModelConfig&)> settings_digest;
  PolicyProbe probe = {};  // for the policies of an external trainer
  // Total memory of a GPU of this machine; absent if this program cannot determine it.
  std::function<std::optional<Bytes>(const std::string& device)> device_memory = {};
  // Whether the program's libtorch has CUDA, with or without a GPU on this machine.
  std::function<bool()> has_cuda = {};
};

// The source maker for the run file's trainer. kInvalid if it is the built-in one and the program has none.
Result<SourceMaker> source_maker(const RunConfig& config, const BuiltIn& built_in);

}  // namespace echoline::learner
