// A run as a page: what it came to, how reward, loss, staleness, waiting and broadcasts went, its workers and events.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/html_page.hpp"

namespace echoline::cli {

struct RunFiles {
  std::string name;
  nlohmann::json report;                // null while it runs
  std::vector<nlohmann::json> metrics;  // rows of metrics.jsonl and events.jsonl
  std::vector<nlohmann::json> events;
};

// What the files hold that is not as docs/report.md and docs/run-folder.md have it is left out.
std::string run_page(const RunFiles& run, const ChartLibrary& charts);

}  // namespace echoline::cli
