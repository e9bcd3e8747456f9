// A run as a page: what it came to, how reward, loss, staleness, waiting and broadcasts went, its workers and events.
#pragma once
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "pages/html_page.hpp"

namespace echoline::pages {

struct RunFiles {
  std::string name;
  nlohmann::json report;                // null while it runs
  std::vector<nlohmann::json> metrics;  // rows of metrics.jsonl and events.jsonl
  std::vector<nlohmann::json> events;
};

// What the files hold that is not as docs/report.md and docs/run-folder.md have it is left out.
std::string run_page(const RunFiles& run, const ChartLibrary& charts);
// Into `file`, or into report.html of `folder` where none is named; returns where it is. kInvalid: `file` is a folder.
Result<std::filesystem::path> write_run_page(const RunFiles& run, const std::string& file,
                                             const std::filesystem::path& folder);

}  // namespace echoline::pages
