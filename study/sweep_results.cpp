// Reads the reports of a sweep's runs and prints them, for cli/sweep.cpp.
#include "study/sweep_results.hpp"

#include <algorithm>
#include <boost/math/distributions/students_t.hpp>
#include <cmath>

#include "base/files.hpp"
#include "base/text.hpp"

namespace echoline::study {
namespace {

using nlohmann::json;

// The measures of every sweep: field of the report, title of the column, meaning.
const std::vector<Measure>& standard_measures() {
  static const std::vector<Measure> measures{
      {"steps_per_s", "steps/s", "learner steps per second, after the warm start"},
      {"learner.idle_fraction", "idle", "share of the time in which the learner waited for a batch"},
      {"broadcast.t_b_seconds_median", "T_b s",
       "seconds from publishing a policy to its installation on the workers, median"},
      {"staleness.mean", "stale", "staleness of the rollouts trained on, mean"},
      {"staleness.p95", "stale p95", "staleness of the rollouts trained on, 95th percentile"},
      {"reward.last", "reward", "mean reward of the last step"},
      {"eval.after", "eval", "accuracy on held-out problems at the end"},
      {"learning.effective_sample_fraction_mean", "ess",
       "effective sample size as a share of the batch, mean over the steps"},
      {"learning.behaviour_kl_mean", "kl", "divergence from the policy that generated, mean over the steps"},
      {"learning.clip_fraction_mean", "clip", "share of clipped tokens, mean over the steps"},
      {"learning.gradient_norm_max", "grad", "largest gradient norm before clipping"},
      {"learning.alarms_begun", "alarms", "alarms of collapse"},
      {"wall_seconds", "wall s", "seconds of the whole run"},
      {"cost.usd_total", "usd", "US dollars of the whole run"},
      {"cost.usd_per_1k_rollouts", "usd/1k", "US dollars of the fleet per thousand rollouts"},
  };
  return measures;
}

// Returns the number at a dotted path; absent if it is missing or not finite.
std::optional<double> number_at(const json& object, std::string_view path) {
  const json* value = &object;
  while (true) {
    const std::size_t dot = path.find('.');
    if (!value->is_object()) return std::nullopt;
    const auto it = value->find(std::string(path.substr(0, dot)));
    if (it == value->end()) return std::nullopt;
    value = &*it;
    if (dot == std::string_view::npos) break;
    path.remove_prefix(dot + 1);
  }
  if (!value->is_number() || !std::isfinite(value->get<double>())) return std::nullopt;
  return value->get<double>();
}

constexpr int kDecimalsMax = 9;

// The number of decimals with which a number of this size has three significant digits.
int decimals_of(double magnitude) {
  if (!(magnitude > 0)) return 0;
  return std::clamp(2 - static_cast<int>(std::floor(std::log10(magnitude))), 0, kDecimalsMax);
}

// The columns of a text on a terminal, if all its characters are one column wide.
std::size_t width_of(std::string_view text) {
  const auto begins_character = [](unsigned char c) { return (c & 0xc0) != 0x80; };  // in UTF-8
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), begins_character));
}

struct Column {
  std::string title;
  std::vector<std::string> cells;
  bool is_left_aligned = false;
  std::size_t width() const {
    std::size_t widest = width_of(title);
    for (const std::string& cell : cells) widest = std::max(widest, width_of(cell));
    return widest;
  }
  std::string padded(const std::string& text) const {
    const std::string space(width() - width_of(text), ' ');
    return is_left_aligned ? text + space : space + text;
  }
};

constexpr std::string_view kColumnGap = "  ";

std::string table_text(const std::vector<const Column*>& columns, std::size_t row_count) {
  std::string out;
  const auto add_line = [&](const auto& text_of) {
    std::string line;
    for (const Column* column : columns) {
      if (!line.empty()) line += kColumnGap;
      line += column->padded(text_of(*column));
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  };
  add_line([](const Column& column) { return column.title; });
  for (std::size_t row_index = 0; row_index < row_count; ++row_index)
    add_line([&](const Column& column) { return column.cells[row_index]; });
  return out;
}

// The text as a field of a CSV file.
std::string csv_field(const std::string& text) {
  // A spreadsheet reads a text that begins with = + - @ or a tab as a formula, unless it is a number. An apostrophe
  // before it prevents that.
  const bool starts_like_formula =
      !text.empty() && std::string_view("=+-@\t").find(text.front()) != std::string_view::npos;
  const bool is_formula = starts_like_formula && !json::parse(text, nullptr, /*allow_exceptions=*/false).is_number();
  const std::string safe = is_formula ? "'" + text : text;
  if (safe.find_first_of(",\"\n\r") == std::string::npos) return safe;
  std::string quoted = "\"";
  for (const char c : safe) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

// Sets the results' Pareto front: the rows that no other row beats in both of two measures.
void find_pareto_front(SweepResults& results) {
  const auto index_of = [&](std::string_view field) {
    const auto it = std::find_if(results.measures.begin(), results.measures.end(),
                                 [&](const Measure& measure) { return measure.field == field; });
    return static_cast<std::size_t>(it - results.measures.begin());
  };
  // Takes the first of these pairs that at least two rows have.
  for (const auto& [x, y] :
       {std::pair("wall_seconds", "cost.usd_total"), std::pair("wall_seconds", "learner.idle_fraction")}) {
    const std::size_t x_index = index_of(x), y_index = index_of(y);
    if (x_index == results.measures.size() || y_index == results.measures.size()) continue;
    std::vector<std::size_t> rows_with_both;
    for (std::size_t row_index = 0; row_index < results.rows.size(); ++row_index)
      if (results.rows[row_index].estimates[x_index] && results.rows[row_index].estimates[y_index])
        rows_with_both.push_back(row_index);
    if (rows_with_both.size() < 2) continue;
    // Less is better in both measures.
    const auto beats = [&](std::size_t a, std::size_t b) {
      const double a_x = results.rows[a].estimates[x_index]->mean, a_y = results.rows[a].estimates[y_index]->mean;
      const double b_x = results.rows[b].estimates[x_index]->mean, b_y = results.rows[b].estimates[y_index]->mean;
      return a_x <= b_x && a_y <= b_y && (a_x < b_x || a_y < b_y);
    };
    for (const std::size_t row_index : rows_with_both)
      if (std::none_of(rows_with_both.begin(), rows_with_both.end(),
                       [&](std::size_t other) { return beats(other, row_index); }))
        results.pareto.push_back(row_index);
    results.pareto_x = x;
    results.pareto_y = y;
    return;
  }
}

}  // namespace

std::string_view to_string(SweepEnd end) {
  switch (end) {
    case SweepEnd::kNotRun:
      return "not run";
    case SweepEnd::kCached:
    case SweepEnd::kDone:
      return "done";
    case SweepEnd::kFailed:
      return "failed";
  }
  return "";
}

// Infers the possible values from the field's name. estimate() limits intervals to these values.
Range range_of(std::string_view field) {
  const auto has = [&](std::string_view word) { return field.find(word) != std::string_view::npos; };
  if (field.starts_with("reward.")) return {};
  const bool is_accuracy = field.starts_with("eval.") && (field.ends_with(".before") || field.ends_with(".after"));
  if (is_accuracy || has("fraction") || has("density") || field.ends_with(".share")) return {.min = 0, .max = 1};
  return {.min = 0, .max = std::nullopt};
}

std::optional<Estimate> estimate(const std::vector<double>& values, const Range& range) {
  if (values.empty()) return std::nullopt;
  Estimate result;
  result.n = values.size();
  const double n = static_cast<double>(result.n);
  double mean = 0;
  for (const double value : values) mean += value / n;  // divided first, because a sum of all could overflow
  result.mean = mean;
  if (result.n < 2) return result;
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  constexpr double kQuantile = 0.975;  // of the upper end of a 95 % interval
  const double t = boost::math::quantile(boost::math::students_t(n - 1), kQuantile);
  const double half_width = t * std::sqrt(squares / (n - 1) / n);
  if (!std::isfinite(half_width)) return result;
  // std::min(mean, ...) and std::max(mean, ...) keep the mean in the interval even if it is outside the range.
  const double range_min = range.min.value_or(-INFINITY), range_max = range.max.value_or(INFINITY);
  result.interval = Interval{.low = std::min(mean, std::max(range_min, mean - half_width)),
                             .high = std::max(mean, std::min(range_max, mean + half_width))};
  return result;
}

std::optional<double> measure_value(const json& report, const std::string& field) {
  if (field != "steps_per_s") return number_at(report, field);
  const auto steps = number_at(report, "steps"), wall = number_at(report, "wall_seconds");
  const double training_s = wall.value_or(0) - number_at(report, "warm_start.seconds").value_or(0);
  if (!steps || training_s <= 0 || !std::isfinite(*steps / training_s)) return std::nullopt;
  return *steps / training_s;
}

std::size_t SweepRow::runs_done() const {
  return static_cast<std::size_t>(std::count_if(outcomes.begin(), outcomes.end(), [](const SweepOutcome* outcome) {
    return outcome->end == SweepEnd::kDone || outcome->end == SweepEnd::kCached;
  }));
}

SweepResults collect(const SweepPlan& plan, const SweepOutcomes& outcomes) {
  SweepResults results;
  results.plan = &plan;
  std::vector<Measure> measures = standard_measures();
  for (const std::string& field : plan.measures)
    if (std::none_of(measures.begin(), measures.end(), [&](const Measure& measure) { return measure.field == field; }))
      measures.push_back({.field = field, .title = field, .meaning = field});
  constexpr std::uint64_t kReportFileBytesMax = 256 << 20;
  std::vector<bool> has_value(measures.size(), false);  // by measure: in at least one report
  for (const SweepCell& cell : plan.cells) {  // a cell is one combination of settings, with a run for each seed
    SweepRow& row = results.rows.emplace_back();
    row.cell = &cell;
    row.values.resize(measures.size());
    for (const SweepRun& run : cell.runs) {
      static const SweepOutcome kNotRun;
      const auto it = outcomes.find(run.digest);
      const SweepOutcome& outcome = it == outcomes.end() ? kNotRun : it->second;
      row.outcomes.push_back(&outcome);
      json report;
      if (outcome.end == SweepEnd::kDone || outcome.end == SweepEnd::kCached)
        if (const auto text = read_file(run.folder / "report.json", kReportFileBytesMax))
          report = json::parse(*text, nullptr, /*allow_exceptions=*/false);
      for (std::size_t measure_index = 0; measure_index < measures.size(); ++measure_index) {
        row.values[measure_index].push_back(measure_value(report, measures[measure_index].field));
        if (row.values[measure_index].back()) has_value[measure_index] = true;
      }
    }
  }
  for (std::size_t measure_index = 0; measure_index < measures.size(); ++measure_index)
    if (has_value[measure_index]) results.measures.push_back(measures[measure_index]);
  for (SweepRow& row : results.rows) {
    std::vector<std::vector<std::optional<double>>> kept_values;
    for (std::size_t measure_index = 0; measure_index < measures.size(); ++measure_index) {
      if (!has_value[measure_index]) continue;
      std::vector<double> values;
      for (const auto& value : row.values[measure_index])
        if (value) values.push_back(*value);
      row.estimates.push_back(estimate(values, range_of(measures[measure_index].field)));
      kept_values.push_back(std::move(row.values[measure_index]));
    }
    row.values = std::move(kept_values);
  }
  find_pareto_front(results);
  return results;
}

std::string estimate_text(const Estimate& estimate) {
  const double magnitude = std::abs(estimate.mean);
  const double below = estimate.interval ? estimate.mean - estimate.interval->low : 0,
               above = estimate.interval ? estimate.interval->high - estimate.mean : 0;
  const double half_width = std::max(below, above);
  // An interval that the range limits is not symmetric, so both of its ends are shown. The tolerances are for rounding.
  const bool is_limited = std::abs(above - below) > 1e-6 * half_width + 1e-12 * magnitude;
  const bool needs_exponent = magnitude >= 1e7 || (magnitude > 0 && magnitude < 1e-6);
  if (needs_exponent) {
    if (!estimate.interval) return fmt::format("{:.3g}", estimate.mean);
    return is_limited ? fmt::format("{:.3g} ({:.2g} to {:.2g})", estimate.mean, estimate.interval->low,
                                    estimate.interval->high)
                      : fmt::format("{:.3g} ± {:.2g}", estimate.mean, half_width);
  }
  int decimals = decimals_of(magnitude);
  if (!estimate.interval) return fmt::format("{:.{}f}", estimate.mean, decimals);
  // Two significant digits of the interval, unless it is so narrow that it is rounding error.
  if (half_width > 1e-9 * magnitude) decimals = std::max(0, decimals_of(half_width) - 1);
  if (is_limited)
    return fmt::format("{:.{}f} ({:.{}f} to {:.{}f})", estimate.mean, decimals, estimate.interval->low, decimals,
                       estimate.interval->high, decimals);
  return fmt::format("{:.{}f} ± {:.{}f}", estimate.mean, decimals, half_width, decimals);
}

std::string to_table(const SweepResults& results, std::size_t width_max) {
  constexpr std::size_t kValueWidthMax = 40;
  std::vector<Column> keys, measures;
  for (const std::string& key : results.plan->keys) {
    Column column;
    column.title = short_key(key);
    for (const SweepRow& row : results.rows) {
      const std::optional<std::string> value = row.cell->value(key);
      column.cells.push_back(value ? printable(*value, kValueWidthMax) : "-");
    }
    keys.push_back(std::move(column));
  }
  if (keys.empty())
    keys.push_back(
        {.title = "cell", .cells = std::vector<std::string>(results.rows.size(), "as it is"), .is_left_aligned = true});
  const bool is_all_done = std::all_of(results.rows.begin(), results.rows.end(),
                                       [](const SweepRow& row) { return row.runs_done() == row.outcomes.size(); });
  if (!is_all_done || results.plan->seeds > 1) {
    Column runs;
    runs.title = "runs";
    for (const SweepRow& row : results.rows)
      runs.cells.push_back(row.runs_done() == row.outcomes.size()
                               ? std::to_string(row.outcomes.size())
                               : fmt::format("{} of {}", row.runs_done(), row.outcomes.size()));
    keys.push_back(std::move(runs));
  }
  for (std::size_t measure_index = 0; measure_index < results.measures.size(); ++measure_index) {
    Column column;
    column.title = results.measures[measure_index].title;
    for (const SweepRow& row : results.rows)
      column.cells.push_back(row.estimates[measure_index] ? estimate_text(*row.estimates[measure_index]) : "-");
    measures.push_back(std::move(column));
  }
  std::size_t key_width = 0;
  for (const Column& column : keys) key_width += column.width() + kColumnGap.size();
  std::string out;
  // Each table has the columns of the keys, and as many further measures as fit, but at least one.
  for (std::size_t next_measure = 0; out.empty() || next_measure < measures.size();) {
    std::vector<const Column*> shown;
    for (const Column& column : keys) shown.push_back(&column);
    std::size_t width = key_width;
    do {
      if (next_measure == measures.size()) break;
      width += measures[next_measure].width() + kColumnGap.size();
      shown.push_back(&measures[next_measure++]);
    } while (next_measure < measures.size() && width + measures[next_measure].width() <= width_max);
    out += (out.empty() ? "" : "\n") + table_text(shown, results.rows.size());
  }
  return out;
}

std::string to_csv(const SweepResults& results) {
  std::string out;
  bool is_line_start = true;
  const auto add = [&](const std::string& text) {
    if (!std::exchange(is_line_start, false)) out += ",";
    out += csv_field(text);
  };
  const auto end_line = [&] {
    out += "\n";
    is_line_start = true;
  };
  for (const std::string& key : results.plan->keys) add(key);
  add("runs");
  add("runs_done");
  for (const Measure& measure : results.measures) {
    add(measure.field);
    add(measure.field + ".low");
    add(measure.field + ".high");
  }
  end_line();
  for (const SweepRow& row : results.rows) {
    for (const std::string& key : results.plan->keys) add(row.cell->value(key).value_or(""));
    add(std::to_string(row.outcomes.size()));
    add(std::to_string(row.runs_done()));
    for (const auto& estimate : row.estimates) {
      add(estimate ? fmt::format("{}", estimate->mean) : "");
      add(estimate && estimate->interval ? fmt::format("{}", estimate->interval->low) : "");
      add(estimate && estimate->interval ? fmt::format("{}", estimate->interval->high) : "");
    }
    end_line();
  }
  return out;
}

nlohmann::json to_json(const SweepResults& results) {
  const SweepPlan& plan = *results.plan;
  json out;
  out["schema_version"] = kSweepSchemaVersion;
  out["config"] = plan.config.string();
  out["kind"] = plan.kind == SweepKind::kReal ? "real" : "simulated";
  out["keys"] = plan.keys;
  out["seeds"] = plan.seeds;
  out["measures"] = json::array();
  for (const Measure& measure : results.measures)
    out["measures"].push_back({{"field", measure.field}, {"title", measure.title}, {"meaning", measure.meaning}});
  out["cells"] = json::array();
  std::size_t failed = 0, not_run = 0;
  for (const SweepRow& row : results.rows) {
    json cell;
    cell["values"] = json::object();
    for (const auto& [key, value] : row.cell->values) cell["values"][key] = value;
    cell["runs"] = json::array();
    for (std::size_t i = 0; i < row.outcomes.size(); ++i) {
      const SweepOutcome& outcome = *row.outcomes[i];
      const SweepRun& run = row.cell->runs[i];
      json entry{{"seed", run.seed},
                 {"digest", run.digest},
                 {"folder", run.folder.string()},
                 {"state", to_string(outcome.end)}};
      if (outcome.end == SweepEnd::kFailed) entry["why"] = outcome.why;
      if (!outcome.log.empty()) entry["log"] = outcome.log.string();
      entry["measures"] = json::object();
      for (std::size_t measure_index = 0; measure_index < results.measures.size(); ++measure_index)
        if (row.values[measure_index][i])
          entry["measures"][results.measures[measure_index].field] = *row.values[measure_index][i];
      cell["runs"].push_back(std::move(entry));
      failed += outcome.end == SweepEnd::kFailed;
      not_run += outcome.end == SweepEnd::kNotRun;
    }
    cell["measures"] = json::object();
    for (std::size_t measure_index = 0; measure_index < results.measures.size(); ++measure_index) {
      const auto& estimate = row.estimates[measure_index];
      if (!estimate) continue;
      cell["measures"][results.measures[measure_index].field] = {
          {"mean", estimate->mean},
          {"low", estimate->interval ? json(estimate->interval->low) : json(nullptr)},
          {"high", estimate->interval ? json(estimate->interval->high) : json(nullptr)},
          {"n", estimate->n}};
    }
    out["cells"].push_back(std::move(cell));
  }
  out["failed"] = failed;
  out["not_run"] = not_run;
  if (!results.pareto.empty())
    out["pareto"] = {{"x", results.pareto_x}, {"y", results.pareto_y}, {"cells", results.pareto}};
  return out;
}

}  // namespace echoline::study
