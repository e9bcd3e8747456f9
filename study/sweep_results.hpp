// Results of a sweep: numbers from each run's report with mean and interval over seeds, as text, CSV and JSON.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "study/sweep_plan.hpp"
#include "study/sweep_runner.hpp"

namespace echoline::study {

inline constexpr int kSweepSchemaVersion = 2;  // of sweep.json

std::string_view to_string(SweepEnd end);

struct Measure {
  std::string field;  // dotted, as in the report (docs/report.md); "steps_per_s" is computed from several fields
  std::string title;  // heading of the column
  std::string meaning;
};

struct Range {
  std::optional<double> min, max;
};
// The possible values of a report's field or of "steps_per_s": 0 to 1 for shares and accuracies, any number for
// rewards, at least 0 for all others.
Range range_of(std::string_view field);

struct Interval {
  double low = 0, high = 0;
};
// A mean and its 95 % interval by Student's t, limited to the quantity's range. A single value has no interval.
struct Estimate {
  std::size_t n = 0;
  double mean = 0;
  std::optional<Interval> interval;
};
// Absent if there are no values.
std::optional<Estimate> estimate(const std::vector<double>& values, const Range& range = {});

// Returns a measure's number in a report; absent if it is missing, null or not finite.
std::optional<double> measure_value(const nlohmann::json& report, const std::string& field);

struct SweepRow {
  const SweepCell* cell = nullptr;
  std::vector<const SweepOutcome*> outcomes;               // by run
  std::vector<std::vector<std::optional<double>>> values;  // by measure, then by run
  std::vector<std::optional<Estimate>> estimates;          // by measure
  std::size_t runs_done() const;
};

struct SweepResults {
  const SweepPlan* plan = nullptr;
  std::vector<Measure> measures;  // measures that at least one run's report has
  std::vector<SweepRow> rows;
  // The fields of two measures where less is better, and the indices of the rows on their Pareto front: no other row
  // beats one of these in both measures. Empty if the results lack such measures.
  std::string pareto_x, pareto_y;
  std::vector<std::size_t> pareto;
};

// Reads the reports of all runs that are done. The result refers to `plan` and `outcomes`, which must outlive it.
SweepResults collect(const SweepPlan& plan, const SweepOutcomes& outcomes);

// One row per cell; measures that do not fit into lines of `width_max` characters follow in further tables.
std::string to_table(const SweepResults& results, std::size_t width_max);
std::string to_csv(const SweepResults& results);
nlohmann::json to_json(const SweepResults& results);

// "0.1234", "0.123 ± 0.004", or "0.95 (0.61 to 1)" for a limited interval; shows only significant digits.
std::string estimate_text(const Estimate& estimate);

}  // namespace echoline::study
