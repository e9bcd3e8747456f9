// A simulated run of the world that a real one found: its configuration, with what it measured in place of what was
// expected.
#pragma once
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"

namespace echoline::study {

struct LikeRun {
  std::filesystem::path config;  // the run's own
  // Of the section `simulation`: step time, sizes of deltas, lengths of responses, time to boot.
  std::vector<std::pair<std::string, std::string>> world;
  nlohmann::json report;
  std::map<std::string, double> ages;  // share of the rollouts trained on, by how many steps old they were
};

// kNotFound: no folder of a run that has ended; kInvalid: it measured too little.
Result<LikeRun> like_run(const std::filesystem::path& folder);

// The same figures of both: {"t_b_seconds_median": {"real", "simulated"}, ..}, and how far the ages of what was trained
// on differ: the total variation, from 0 to 1.
nlohmann::json compare(const LikeRun& real, const nlohmann::json& report, const std::vector<nlohmann::json>& metrics);
std::string comparison_table(const nlohmann::json& comparison);

}  // namespace echoline::study
