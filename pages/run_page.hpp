// A run's report as a page: results, reward, loss, staleness, waiting, broadcasts, workers and events.
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

inline constexpr std::size_t kEventsShown = 300;  // the page shows the last events

struct RunFiles {
  std::string name;
  nlohmann::json report;                     // null while the run lasts
  std::vector<nlohmann::json> metrics;       // rows of metrics.jsonl
  std::vector<nlohmann::json> events;        // the last rows of events.jsonl
  std::uint64_t events_left_out = 0;         // number of rows before `events`
  std::optional<double> first_event_unix_s;  // time of the run's first event; absent: that of the first in `events`
};

// Ignores content of the files that differs from docs/report.md and docs/run-folder.md.
std::string run_page(const RunFiles& run, const ChartLibrary& charts);
// Writes to `file`, or to report.html of `folder` if that is empty. Returns the path. kInvalid: `file` is a folder.
Result<std::filesystem::path> write_run_page(const RunFiles& run, const std::string& file,
                                             const std::filesystem::path& folder);

}  // namespace echoline::pages
