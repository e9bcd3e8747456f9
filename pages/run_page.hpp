// A run as a page: what it came to, how reward, loss, staleness, waiting and broadcasts went, its workers and events.
#pragma once
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "pages/html_page.hpp"

namespace echoline::pages {

inline constexpr std::size_t kEventsShown = 300;  // the last ones

struct RunFiles {
  std::string name;
  nlohmann::json report;                // null while it runs
  std::vector<nlohmann::json> metrics;  // rows of metrics.jsonl and events.jsonl
  std::vector<nlohmann::json> events;
  std::uint64_t events_left_out = 0;         // before these
  std::optional<double> first_event_unix_s;  // of the first of all; absent: of these
};

// What the files hold that is not as docs/report.md and docs/run-folder.md have it is left out.
std::string run_page(const RunFiles& run, const ChartLibrary& charts);
// Into `file`, or into report.html of `folder` where none is named; returns where it is. kInvalid: `file` is a folder.
Result<std::filesystem::path> write_run_page(const RunFiles& run, const std::string& file,
                                             const std::filesystem::path& folder);

}  // namespace echoline::pages
