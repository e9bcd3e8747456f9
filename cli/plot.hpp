// Draws a run as an SVG file with one panel per measure.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace echoline::cli {

// `metrics` are the rows of metrics.jsonl. The panels show, by learner step: reward; time of a step; T_b (from
// publishing a policy until most workers have installed it) with its lower bound; staleness (age of the rollouts
// trained on).
std::string run_svg(const std::string& title, const std::vector<nlohmann::json>& metrics);

}  // namespace echoline::cli
