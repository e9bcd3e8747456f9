// The rows of a run's files that a picture or a page shows of it: few enough for memory, however long the run was.
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

// Reads metrics.jsonl and returns its steps, evaluations, deltas and their broadcasts, by number, as they were done
// last. A kind with more than kPlotRowsMax rows is thinned out to its first, its last, and those between whose number a
// power of two divides. Errors: learner/row_file.hpp.
Result<std::vector<nlohmann::json>> plotted_rows(const std::filesystem::path& metrics);

struct LastEvents {
  std::vector<nlohmann::json> rows;    // the last pages::kEventsShown
  std::uint64_t left_out = 0;          // before them
  std::optional<double> first_unix_s;  // of the first of all
};
// Reads events.jsonl; returns nothing where there is no file.
Result<LastEvents> last_events(const std::filesystem::path& events);

}  // namespace echoline::study
