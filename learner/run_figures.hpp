// The measurements of a run (metrics.jsonl), folded row by row into what its report says. Memory: 8 bytes a learner
// step for what was done again, up to 6 MB for quantiles, and the few rows that a report shows; it does not grow with
// the rows.
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
inline constexpr std::size_t kSettingChangesReported = 1000;  // the newest

// A figure of each step, publication or broadcast that has it, by number.
struct Figure {
  Totals totals;
  std::optional<std::pair<std::uint64_t, double>> first, last;  // of the least and the largest number
  void add(std::uint64_t number, double value);
};

// Rows by number, thinned out: beyond `most` of them every second remains, again and again, and always the last.
class ThinnedRows {
 public:
  explicit ThinnedRows(std::size_t most) : most_(most) {}
  void set(std::uint64_t number, nlohmann::json row);
  const std::map<std::uint64_t, nlohmann::json>& rows() const { return rows_; }

 private:
  std::size_t most_;
  std::uint64_t every_ = 1;
  std::map<std::uint64_t, nlohmann::json> rows_;
};

struct RunFigures {
  // Figures of steps.
  std::uint64_t steps = 0;
  Figure reward, entropy, response_tokens_mean, effective, gradient_norm, zero_advantage, clip, behaviour_kl,
      reference_kl;
  Totals wait_seconds;
  Distribution step_seconds, train_seconds, publish_seconds;
  std::map<std::uint64_t, std::uint64_t> staleness;  // steps stale -> trajectories; at most kAgesMax ages
  struct OfTask {
    Figure reward;
    std::uint64_t responses = 0;
  };
  std::map<std::string, OfTask> by_task;  // at most kTasksMax
  // Figures of deltas.
  std::uint64_t deltas = 0;
  Totals patch_bytes, density;
  // Figures of their broadcasts.
  Distribution t_b, lower_bound, predicted;
  Figure workers, acknowledged;
  std::map<std::string, double> t_b_shares;  // part -> sum of its shares of T_b
  std::uint64_t t_b_shared = 0;              // broadcasts that have them

  nlohmann::json snapshot = nullptr, warm_start = nullptr, eval_before = nullptr,
                 eval_after = nullptr;  // the last row of each
  ThinnedRows evaluations{kEvaluationsReported};
  nlohmann::json settings_changed = nlohmann::json::array();
  std::map<std::string, std::uint64_t> alarms;  // begun, by kind
};

// Folds rows. Each row is shown twice: all of them to count(), then all of them to fold(). A step, policy or evaluation
// that was done again after a resume counts as it was done last; only the first pass can tell.
class FigureFold {
 public:
  void count(const nlohmann::json& row);
  void fold(const nlohmann::json& row);
  RunFigures take() { return std::move(figures_); }

 private:
  // How often each number comes.
  class Repeats {
   public:
    void note(std::uint64_t number);
    // Called once for every noted one in the same order; true for the last of its number.
    bool is_last(std::uint64_t number);

   private:
    std::vector<std::uint16_t> left_;  // by number
  };
  enum Kind : std::size_t { kStep, kDelta, kBroadcast, kEvaluation, kKinds };
  static std::optional<std::pair<Kind, std::uint64_t>> numbered(const nlohmann::json& row);
  void step(std::uint64_t number, const nlohmann::json& row);
  void broadcast(std::uint64_t number, const nlohmann::json& row);

  std::array<Repeats, kKinds> repeats_;
  Alarms alarms_;
  RunFigures figures_;
};

// Reads the file twice. kCorrupt, kNotFound, kIo: learner/row_file.hpp.
Result<RunFigures> read_run_figures(const std::filesystem::path& metrics);
RunFigures run_figures(const std::vector<nlohmann::json>& rows);

}  // namespace echoline::learner
