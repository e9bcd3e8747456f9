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
  double parameters = 0;     // number of the model's values
  bool prices_known = true;  // every offer states its price
};

// `file` comes from ConfigFile::load() or parse(). kInvalid lists every problem as `file:line:col: message`.
Result<SimRun> load_sim_run(Result<ConfigFile> file,
                            const std::vector<std::pair<std::string, std::string>>& overrides = {});

std::vector<ConfigKey> simulation_keys();

}  // namespace echoline::study
