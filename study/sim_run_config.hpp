// A scenario file of `echoline sim run`: a run file with a description of the simulated world (docs/simulation.md).
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "base/config.hpp"
#include "learner/run_config.hpp"
#include "sim/run_scenario.hpp"

namespace echoline::study {

struct SimRun {
  learner::RunConfig config;
  sim::RunScenario scenario;
  double parameters = 0;
  bool prices_known = true;
};

// `file` comes from ConfigFile::load() or parse(). kInvalid lists every problem as `file:line:col: message`.
Result<SimRun> load_sim_run(Result<ConfigFile> file,
                            const std::vector<std::pair<std::string, std::string>>& overrides = {});

std::vector<ConfigKey> simulation_keys();

}  // namespace echoline::study
