// Simulates a run that has ended: its configuration, with the measured values in place of the expected ones.
#pragma once
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"

namespace echoline::study {

struct MeasuredRun {
  std::filesystem::path config;  // config.yaml of the run
  // The world to simulate, as keys of the section `simulation` and their values: step times, delta sizes, response
  // lengths, boot time.
  std::vector<std::pair<std::string, std::string>> world;
  nlohmann::json report;
  // Share of the rollouts trained on, by age in learner steps.
  std::map<std::string, double> ages;
};

// kNotFound: not the folder of a run that has ended. kInvalid: the run measured too little.
Result<MeasuredRun> read_measured_run(const std::filesystem::path& folder);

// Overrides for load_sim_run() of MeasuredRun::config: the measured world, then the user's values, which replace it.
std::vector<std::pair<std::string, std::string>> overrides_like(
    const MeasuredRun& run, const std::vector<std::pair<std::string, std::string>>& given);

// The figures of both runs: {"broadcast.t_b_seconds_median": {"real", "simulated"}, ..}, and the total variation
// distance between the ages of the rollouts trained on, from 0 (equal) to 1. `report` and `metrics` are those of the
// simulated run.
nlohmann::json compare(const MeasuredRun& real, const nlohmann::json& report,
                       const std::vector<nlohmann::json>& metrics);
std::string comparison_table(const nlohmann::json& comparison);

}  // namespace echoline::study
