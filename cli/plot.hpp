// Draws a run as an SVG file with one panel per measure.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace echoline::cli {

// `metrics` are the rows of metrics.jsonl. Panels by learner step: reward, time of a step, T_b with its lower bound,
// staleness.
std::string run_svg(const std::string& title, const std::vector<nlohmann::json>& metrics);

}  // namespace echoline::cli
