// Aggregates a run's measurements (metrics.jsonl), row by row, for its report. Memory does not grow with the rows. It
// is 8 bytes per learner step to detect repeated ones, up to 6 MB for quantiles, and the few rows that a report shows.
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "learner/alarms.hpp"
#include "learner/distribution.hpp"

namespace echoline::learner {

inline constexpr std::size_t kEvaluationsReported = 1000;     // of `eval.by_step`
inline constexpr std::size_t kSettingChangesReported = 1000;  // the newest settings_changed rows

// A figure of steps, publications or broadcasts. `number`: the step, or the version that is published or broadcast.
struct MetricSummary {
  Totals totals;
  std::optional<std::pair<std::uint64_t, double>> first, last;  // values of the lowest and the highest number
  void add(std::uint64_t number, double value);
};

// Rows by number, thinned out: whenever there are more than `rows_max`, every second one is dropped. The last one
// always stays.
class ThinnedRows {
 public:
  explicit ThinnedRows(std::size_t rows_max) : rows_max_(rows_max) {}
  void set(std::uint64_t number, nlohmann::json row);
  const std::map<std::uint64_t, nlohmann::json>& rows() const { return rows_; }

 private:
  std::size_t rows_max_;
  std::uint64_t every_ = 1;  // numbers that are multiples of it are kept
  std::map<std::uint64_t, nlohmann::json> rows_;
};

// The members are named after the fields of metrics.jsonl (docs/run-folder.md).
struct RunFigures {
  // Figures of steps.
  std::uint64_t steps = 0;
  MetricSummary reward, entropy, response_tokens_mean, effective, gradient_norm, zero_advantage, clip, behaviour_kl,
      reference_kl;
  Totals wait_seconds;
  Distribution step_seconds, train_seconds, publish_seconds;
  std::map<std::uint64_t, std::uint64_t> staleness;  // steps stale -> trajectories; at most kStalenessValuesMax values
  struct TaskSeries {
    MetricSummary reward;
    std::uint64_t responses = 0;
  };
  std::map<std::string, TaskSeries> by_task;  // at most kTasksMax
  // Figures of deltas.
  std::uint64_t deltas = 0;
  Totals patch_bytes, changed_fraction;  // changed_fraction: share of the weights that a delta changes
  // Figures of their broadcasts.
  Distribution t_b, lower_bound, predicted;  // T_b: broadcast time in seconds, measured, its bound and its prediction
  MetricSummary workers, acknowledged;       // workers of a broadcast, and those that acknowledged it within T_b
  std::map<std::string, double> part_share_sums;  // part of T_b, such as "encode" -> sum of its shares
  std::uint64_t broadcasts_with_parts = 0;        // broadcasts with shares

  nlohmann::json snapshot = nullptr, warm_start = nullptr, eval_before = nullptr,
                 eval_after = nullptr;  // the last row of each
  ThinnedRows evaluations{kEvaluationsReported};
  nlohmann::json settings_changed = nlohmann::json::array();
  std::map<std::string, std::uint64_t> alarms;  // number of alarms that began, by kind
};

// Aggregates rows in two passes: all rows go to count_row(), then all to add_row(). A step, policy or evaluation that
// was repeated after a resume counts with its last row, which only the first pass can identify.
class FigureAggregator {
 public:
  void count_row(const nlohmann::json& row);  // first pass
  void add_row(const nlohmann::json& row);    // second pass
  RunFigures take_figures() { return std::move(figures_); }

 private:
  // Counts the rows of each number.
  class Repeats {
   public:
    void add(std::uint64_t number);
    // Whether this row is the last of its number. Call once for every call of add(), in the same order.
    bool is_last(std::uint64_t number);

   private:
    std::vector<std::uint16_t> rows_left_;  // by number
  };
  enum Kind : std::size_t { kStep, kDelta, kBroadcast, kEvaluation, kKindCount };
  static std::optional<std::pair<Kind, std::uint64_t>> kind_and_number(const nlohmann::json& row);
  void add_step(std::uint64_t step, const nlohmann::json& row);
  void add_broadcast(std::uint64_t version, const nlohmann::json& row);

  std::array<Repeats, kKindCount> repeats_;  // by kind
  Alarms alarms_;
  RunFigures figures_;
};

// Reads the file twice. kCorrupt, kNotFound, kIo: learner/row_file.hpp.
Result<RunFigures> read_run_figures(const std::filesystem::path& metrics);
RunFigures run_figures(const std::vector<nlohmann::json>& rows);

}  // namespace echoline::learner
