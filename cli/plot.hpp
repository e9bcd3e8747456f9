// A run as a picture: an SVG with one panel per question a reader asks first.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace echoline::cli {

// From the rows of metrics.jsonl: reward, what a step's time went to, T_b against its lower bound, staleness; by step.
std::string run_svg(const std::string& title, const std::vector<nlohmann::json>& metrics);

}  // namespace echoline::cli
