// A scenario file of `echoline sim run`: a run file, and what is made up of the world (docs/simulation.md).
#pragma once
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "base/config.hpp"
#include "learner/run_config.hpp"
#include "sim/run_scenario.hpp"

namespace echoline::cli {

struct SimRun {
  learner::RunConfig config;
  sim::RunScenario scenario;
  double parameters = 0;
  bool prices_known = true;
};

// kInvalid with every problem as `file:line:col: message`.
Result<SimRun> load_sim_run(const std::filesystem::path& path, const std::vector<std::pair<std::string, std::string>>& overrides = {});
// The same for text already read; relative paths then refer to the working directory.
Result<SimRun> parse_sim_run(std::string_view text, std::string name);

// Every key of the section `simulation`.
std::vector<ConfigKey> simulation_keys();

}  // namespace echoline::cli
