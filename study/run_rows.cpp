// Rows of a run's files for plots and pages, for cli/status.cpp.
#include "study/run_rows.hpp"

#include <array>
#include <deque>

#include "learner/row_file.hpp"
#include "learner/run_figures.hpp"

namespace echoline::study {
namespace {

using learner::ThinnedRows;
using nlohmann::json;

constexpr double kRowNumberMax = 1e15;  // largest step or version

std::optional<double> number_or_none(const json& row, const char* key) {
  const auto it = row.find(key);
  return it != row.end() && it->is_number() ? std::optional(it->get<double>()) : std::nullopt;
}

}  // namespace

Result<std::vector<json>> plotted_rows(const std::filesystem::path& metrics) {
  struct Kind {
    const char *name, *number_key;
    ThinnedRows rows{kPlotRowsMax};
  };
  std::array<Kind, 4> kinds{
      {{"step", "step"}, {"evaluation", "step"}, {"publication", "version"}, {"broadcast", "version"}}};
  ECHO_TRY(learner::each_row(metrics, [&](json row) {
    // Plots show deltas only, because a snapshot is many times larger.
    if (const auto snapshot = row.find("snapshot"); snapshot != row.end() && *snapshot == true) return ok();
    const auto kind_name = row.find("kind");
    if (kind_name == row.end()) return ok();
    for (Kind& kind : kinds) {
      if (*kind_name != kind.name) continue;
      const auto row_number = number_or_none(row, kind.number_key);
      if (!row_number || !(*row_number >= 0 && *row_number <= kRowNumberMax)) continue;
      kind.rows.set(static_cast<std::uint64_t>(*row_number), std::move(row));
      break;
    }
    return ok();
  }));
  std::vector<json> rows;
  for (const Kind& kind : kinds)
    for (const auto& [row_number, row] : kind.rows.rows()) rows.push_back(row);
  return rows;
}

Result<LastEvents> last_events(const std::filesystem::path& events) {
  LastEvents result;
  std::deque<json> rows;
  const Status read = learner::each_row(events, [&](json row) {
    if (rows.empty()) result.first_unix_s = number_or_none(row, "unix_s");
    rows.push_back(std::move(row));
    if (rows.size() > pages::kEventsShown) rows.pop_front(), ++result.left_out;
    return ok();
  });
  if (!read && read.error().code != Code::kNotFound) return read.error();
  result.rows = {std::make_move_iterator(rows.begin()), std::make_move_iterator(rows.end())};
  return result;
}

}  // namespace echoline::study
