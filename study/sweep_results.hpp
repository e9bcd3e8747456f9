// What a sweep has measured: numbers of each run's report, their mean and interval over seeds, as text, CSV and JSON.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "study/sweep_plan.hpp"
#include "study/sweep_runner.hpp"

namespace echoline::study {

inline constexpr int kSweepSchemaVersion = 2;

// "done", "failed", "not run".
std::string_view to_string(SweepEnd end);

struct Measure {
  std::string field;  // dotted, of the report (docs/report.md); "steps_per_s" follows from several
  std::string title;  // of a column
  std::string meaning;
};

// Values that a quantity can have.
struct Range {
  std::optional<double> min, max;
};
// Returns the range of a report's field, or of "steps_per_s": 0 to 1 for shares and accuracies, none for rewards, at
// least 0 for all else.
Range range_of(std::string_view field);

struct Interval {
  double low = 0, high = 0;
};
// A mean and its 95 % interval by Student's t, cut to the quantity's range. A single value has no interval.
struct Estimate {
  std::size_t n = 0;
  double mean = 0;
  std::optional<Interval> interval;
};
std::optional<Estimate> estimate(const std::vector<double>& values, const Range& range = {});

// A number of a report, by the name of a measure; absent where it is null, no finite number, or not there.
std::optional<double> measured(const nlohmann::json& report, const std::string& field);

struct SweepRow {
  const SweepCell* cell = nullptr;
  std::vector<const SweepOutcome*> outcomes;               // by run
  std::vector<std::vector<std::optional<double>>> by_run;  // by measure, by run
  std::vector<std::optional<Estimate>> measures;           // by measure
  std::size_t runs_done() const;
};

struct SweepResults {
  const SweepPlan* plan = nullptr;
  std::vector<Measure> measures;  // that at least one run has
  std::vector<SweepRow> rows;
  // Cells that no other beats in both, and in which of two measures; both are better when less. Empty without them.
  std::string pareto_x, pareto_y;
  std::vector<std::size_t> pareto;
};

// Reads the reports of all runs that are done.
SweepResults collect(const SweepPlan& plan, const SweepOutcomes& outcomes);

// One row per cell; measures that have no room in `columns` follow in further tables.
std::string to_table(const SweepResults& results, std::size_t columns);
std::string to_csv(const SweepResults& results);
nlohmann::json to_json(const SweepResults& results);

// "0.1234", "0.123 ± 0.004", or "0.95 (0.61 to 1)" where the interval was cut: as many digits as mean something.
std::string estimate_text(const Estimate& e);

}  // namespace echoline::study
