// Where the policies of a run come from: the seam between the service, which knows no tensor, and whoever trains.
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
#include "learner/run_config.hpp"
#include "learner/run_record.hpp"
#include "learner/run_task.hpp"
#include "model/config.hpp"

namespace echoline::learner {

// The log-probabilities that a policy gives model::probe_text(); kInvalid if log-probabilities under it are not finite
// at the run's temperature. Empty in a program without the built-in model.
using PolicyProbe = std::function<Result<std::vector<double>>(
    const delta::StateView& policy, const model::ModelConfig& model, double temperature, int threads)>;

// The run that a source serves; outlives it.
struct SourceHost {
  const RunConfig& config;
  const RunTask& task;
  RunRecord& record;
  std::function<void(const std::string&)>
      phase;  // hears what is being done right now; may be told as often as one likes
  // To be asked a few times a second while the source waits for others: an error ends the run.
  std::function<Status()> waiting;
  const std::atomic<bool>& stop;  // turns true when the run is to end
  PolicyProbe probe = {};
};

// What a trainer says of a learner step. What it does not know is absent.
struct TrainedStep {
  nlohmann::json figures = nlohmann::json::object();  // numbers by name, into the step's row of metrics.jsonl
  std::map<WorkerId, Scrutiny> scrutiny;              // some responses of each worker, by the policy before this step
};

// One thread, the service's. The policy of version v is the one that v learner steps have made.
class PolicySource {
 public:
  virtual ~PolicySource() = default;

  // Learner steps done; after a resume those of the checkpoint.
  virtual std::uint64_t steps() const = 0;
  // A run that is not resumed: all that comes before policy 0. Asked to stop, it returns early.
  virtual Status begin() = 0;
  // Learner step steps() + 1, on whole groups. Nothing when asked to stop before it was done: nobody trained on them
  // then.
  virtual Result<std::optional<TrainedStep>> step(const std::vector<schema::Trajectory>& batch) = 0;
  // The policy of `version`, which is steps(), in bf16 with Hugging Face's names; null when asked to stop before there
  // was one.
  virtual Result<delta::SharedState> policy(Version version) = 0;
  // After a learner step and what was published of it: evaluates where the run wants it.
  virtual Status step_done() = 0;
  // Greedy accuracy on the held-out problems, into the metrics, where the source can tell. Asked to stop, it returns
  // early.
  virtual Status evaluate(const char* when) = 0;
  // Writes a checkpoint (learner/checkpoint_folder.hpp) and makes the run's folder `model` its policy; nothing when the
  // newest checkpoint is of this step, or before begin().
  virtual Status checkpoint() = 0;
  virtual const std::map<std::string, double>& accuracy() const = 0;  // by `when`
};

// Makes a source; with `resume`, as the run's newest checkpoint has it.
using SourceMaker = std::function<Result<std::unique_ptr<PolicySource>>(const SourceHost& host, bool resume)>;

// The built-in trainer, as a program with libtorch has it; all empty in one without.
struct BuiltIn {
  SourceMaker load;
  std::function<Status(const std::string& device)> can_compute_on;  // kInvalid says why not
  // Of the settings that a checkpoint must agree with, as trainer.json has it under config_digest.
  std::function<std::string(const RunConfig&, const model::ModelConfig&)> settings_digest;
  PolicyProbe probe = {};  // for the policies of an external trainer
  // Of a GPU of this machine, all of it; nothing where this program cannot tell.
  std::function<std::optional<Bytes>(const std::string& device)> device_memory = {};
};

// The maker of what the run file asks for; kInvalid for a run that wants the built-in trainer of a program that has
// none.
Result<SourceMaker> source_maker(const RunConfig& config, const BuiltIn& built_in);

}  // namespace echoline::learner
