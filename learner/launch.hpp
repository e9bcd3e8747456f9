// Arguments and environment that make a rented machine a worker of the run.
#pragma once
#include <filesystem>

#include "base/result.hpp"
#include "learner/run_config.hpp"
#include "overlay/uv/node.hpp"
#include "provisioner/provider.hpp"

namespace echoline::learner {

// The environment variable with a worker's join token, if its command line names none.
inline constexpr const char* kTokenVariable = "ECHOLINE_TOKEN";
// The environment variable that stands for `--engine-command`.
inline constexpr const char* kEngineCommandVariable = "ECHOLINE_ENGINE_COMMAND";

struct LocalWorkers {
  std::filesystem::path program;  // the echoline program, started as `<program> worker ...`
  std::filesystem::path folder;   // parent of the folders of this machine's workers
};

// Arguments and environment of a worker on a machine of this offer, which joins `node`. A process on this machine is
// limited to the speed and links of its offer; a rented host has its own limits. The token is in the environment,
// because process lists show arguments. kInvalid if the host could not reach the learner. Any thread.
Result<provisioner::LaunchSpec> worker_launch_spec(const provisioner::Offer& offer, const RunConfig& config,
                                                   const overlay::LearnerNode& node, const LocalWorkers& local);

}  // namespace echoline::learner
