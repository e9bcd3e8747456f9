// Reads the rows of a run's files that a picture or a page shows: a limited number, however long the run was.
#pragma once
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "base/result.hpp"
#include "pages/run_page.hpp"

namespace echoline::study {

inline constexpr std::size_t kPlotRowsMax = 2000;  // of each kind

// Reads metrics.jsonl and returns its rows by number: steps, evaluations, deltas and their broadcasts. If a resumed
// run wrote a row twice, the later one counts. A kind with more than kPlotRowsMax rows keeps its first, its last, and
// those whose number is divisible by a power of two. Errors are those of learner::each_row().
Result<std::vector<nlohmann::json>> plotted_rows(const std::filesystem::path& metrics);

struct LastEvents {
  std::vector<nlohmann::json> rows;    // the last pages::kEventsShown
  std::uint64_t left_out = 0;          // rows before these
  std::optional<double> first_unix_s;  // of the first row of the file
};
// Reads events.jsonl; empty if there is no such file.
Result<LastEvents> last_events(const std::filesystem::path& events);

}  // namespace echoline::study
