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

std::optional<double> number_at(const json& object, std::string_view path) {
  const json* at = &object;
  while (true) {
    const std::size_t dot = path.find('.');
    if (!at->is_object()) return std::nullopt;
    const auto it = at->find(std::string(path.substr(0, dot)));
    if (it == at->end()) return std::nullopt;
    at = &*it;
    if (dot == std::string_view::npos) break;
    path.remove_prefix(dot + 1);
  }
  if (!at->is_number() || !std::isfinite(at->get<double>())) return std::nullopt;
  return at->get<double>();
}

// The number of decimals with which a number of this size has three significant digits.
int decimals_of(double size) {
  if (!(size > 0)) return 0;
  return std::clamp(2 - static_cast<int>(std::floor(std::log10(size))), 0, 9);
}

// The columns of a text on a terminal, if all its characters are one column wide.
std::size_t width_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; }));
}

struct Column {
  std::string title;
  std::vector<std::string> cells;
  bool left = false;
  std::size_t width() const {
    std::size_t most = width_of(title);
    for (const std::string& cell : cells) most = std::max(most, width_of(cell));
    return most;
  }
  std::string padded(const std::string& text) const {
    const std::string space(width() - width_of(text), ' ');
    return left ? text + space : space + text;
  }
};

std::string table_text(const std::vector<const Column*>& columns, std::size_t rows) {
  std::string out;
  const auto line = [&](const auto& text_of) {
    std::string text;
    for (const Column* c : columns) text += (text.empty() ? "" : "  ") + c->padded(text_of(*c));
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  };
  line([](const Column& c) { return c.title; });
  for (std::size_t r = 0; r < rows; ++r) line([&](const Column& c) { return c.cells[r]; });
  return out;
}

std::string csv_word(const std::string& text) {
  // A spreadsheet would read this text as a formula.
  const bool formula = !text.empty() && std::string_view("=+-@\t").find(text.front()) != std::string_view::npos &&
                       !json::parse(text, nullptr, false).is_number();
  const std::string safe = formula ? "'" + text : text;
  if (safe.find_first_of(",\"\n\r") == std::string::npos) return safe;
  std::string quoted = "\"";
  for (const char c : safe) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

void find_pareto_front(SweepResults& results) {
  const auto index_of = [&](std::string_view field) {
    const auto it = std::find_if(results.measures.begin(), results.measures.end(),
                                 [&](const Measure& m) { return m.field == field; });
    return static_cast<std::size_t>(it - results.measures.begin());
  };
  for (const auto& [x, y] :
       {std::pair("wall_seconds", "cost.usd_total"), std::pair("wall_seconds", "learner.idle_fraction")}) {
    const std::size_t ix = index_of(x), iy = index_of(y);
    if (ix == results.measures.size() || iy == results.measures.size()) continue;
    std::vector<std::size_t> with_both;
    for (std::size_t r = 0; r < results.rows.size(); ++r)
      if (results.rows[r].estimates[ix] && results.rows[r].estimates[iy]) with_both.push_back(r);
    if (with_both.size() < 2) continue;
    const auto beats = [&](std::size_t a, std::size_t b) {
      const double ax = results.rows[a].estimates[ix]->mean, ay = results.rows[a].estimates[iy]->mean;
      const double bx = results.rows[b].estimates[ix]->mean, by = results.rows[b].estimates[iy]->mean;
      return ax <= bx && ay <= by && (ax < bx || ay < by);
    };
    for (const std::size_t r : with_both)
      if (std::none_of(with_both.begin(), with_both.end(), [&](std::size_t other) { return beats(other, r); }))
        results.pareto.push_back(r);
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

Range range_of(std::string_view field) {
  const auto has = [&](std::string_view word) { return field.find(word) != std::string_view::npos; };
  if (field.starts_with("reward.")) return {};
  const bool accuracy = field.starts_with("eval.") && (field.ends_with(".before") || field.ends_with(".after"));
  if (accuracy || has("fraction") || has("density") || field.ends_with(".share")) return {0, 1};
  return {0, std::nullopt};
}

std::optional<Estimate> estimate(const std::vector<double>& values, const Range& range) {
  if (values.empty()) return std::nullopt;
  Estimate e;
  e.n = values.size();
  const double n = static_cast<double>(e.n);
  for (const double v : values) e.mean += v / n;  // a sum of all could overflow
  if (e.n < 2) return e;
  double squares = 0;
  for (const double v : values) squares += (v - e.mean) * (v - e.mean);
  const double t = boost::math::quantile(boost::math::students_t(n - 1), 0.975);
  const double half = t * std::sqrt(squares / (n - 1) / n);
  if (!std::isfinite(half)) return e;
  // A mean outside the possible range is reported unchanged.
  const double low = range.min.value_or(-INFINITY), high = range.max.value_or(INFINITY);
  e.interval =
      Interval{std::min(e.mean, std::max(low, e.mean - half)), std::max(e.mean, std::min(high, e.mean + half))};
  return e;
}

std::optional<double> measure_value(const json& report, const std::string& field) {
  if (field != "steps_per_s") return number_at(report, field);
  const auto steps = number_at(report, "steps"), wall = number_at(report, "wall_seconds");
  const double seconds = wall.value_or(0) - number_at(report, "warm_start.seconds").value_or(0);
  if (!steps || seconds <= 0 || !std::isfinite(*steps / seconds)) return std::nullopt;
  return *steps / seconds;
}

std::size_t SweepRow::runs_done() const {
  return static_cast<std::size_t>(std::count_if(outcomes.begin(), outcomes.end(), [](const SweepOutcome* o) {
    return o->end == SweepEnd::kDone || o->end == SweepEnd::kCached;
  }));
}

SweepResults collect(const SweepPlan& plan, const SweepOutcomes& outcomes) {
  SweepResults results;
  results.plan = &plan;
  std::vector<Measure> measures = standard_measures();
  for (const std::string& field : plan.measures)
    if (std::none_of(measures.begin(), measures.end(), [&](const Measure& m) { return m.field == field; }))
      measures.push_back({field, field, field});
  std::vector<bool> seen(measures.size(), false);
  for (const SweepCell& cell : plan.cells) {
    SweepRow& row = results.rows.emplace_back();
    row.cell = &cell;
    row.values.resize(measures.size());
    for (const SweepRun& run : cell.runs) {
      static const SweepOutcome kNone;
      const auto it = outcomes.find(run.digest);
      const SweepOutcome& outcome = it == outcomes.end() ? kNone : it->second;
      row.outcomes.push_back(&outcome);
      json report;
      if (outcome.end == SweepEnd::kDone || outcome.end == SweepEnd::kCached)
        if (const auto text = read_file(run.folder / "report.json", 256 << 20))
          report = json::parse(*text, nullptr, false);
      for (std::size_t m = 0; m < measures.size(); ++m) {
        row.values[m].push_back(measure_value(report, measures[m].field));
        if (row.values[m].back()) seen[m] = true;
      }
    }
  }
  for (std::size_t m = 0; m < measures.size(); ++m)
    if (seen[m]) results.measures.push_back(measures[m]);
  for (SweepRow& row : results.rows) {
    std::vector<std::vector<std::optional<double>>> kept;
    for (std::size_t m = 0; m < measures.size(); ++m) {
      if (!seen[m]) continue;
      std::vector<double> values;
      for (const auto& value : row.values[m])
        if (value) values.push_back(*value);
      row.estimates.push_back(estimate(values, range_of(measures[m].field)));
      kept.push_back(std::move(row.values[m]));
    }
    row.values = std::move(kept);
  }
  find_pareto_front(results);
  return results;
}

std::string estimate_text(const Estimate& e) {
  const double size = std::abs(e.mean);
  const double below = e.interval ? e.mean - e.interval->low : 0, above = e.interval ? e.interval->high - e.mean : 0;
  const double half = std::max(below, above);
  const bool cut = std::abs(above - below) > 1e-6 * half + 1e-12 * size;
  if (size >= 1e7 || (size > 0 && size < 1e-6)) {
    if (!e.interval) return fmt::format("{:.3g}", e.mean);
    return cut ? fmt::format("{:.3g} ({:.2g} to {:.2g})", e.mean, e.interval->low, e.interval->high)
               : fmt::format("{:.3g} ± {:.2g}", e.mean, half);
  }
  int decimals = decimals_of(size);
  if (!e.interval) return fmt::format("{:.{}f}", e.mean, decimals);
  if (half > 1e-9 * size) decimals = std::max(0, std::min(9, decimals_of(half) - 1));
  if (cut)
    return fmt::format("{:.{}f} ({:.{}f} to {:.{}f})", e.mean, decimals, e.interval->low, decimals, e.interval->high,
                       decimals);
  return fmt::format("{:.{}f} ± {:.{}f}", e.mean, decimals, half, decimals);
}

std::string to_table(const SweepResults& results, std::size_t columns) {
  std::vector<Column> keys, measures;
  for (const std::string& key : results.plan->keys) {
    Column column{short_key(key), {}, false};
    for (const SweepRow& row : results.rows) {
      const auto it =
          std::find_if(row.cell->values.begin(), row.cell->values.end(), [&](const auto& v) { return v.first == key; });
      column.cells.push_back(it == row.cell->values.end() ? "-" : printable(it->second, 40));
    }
    keys.push_back(std::move(column));
  }
  if (keys.empty()) keys.push_back({"cell", std::vector<std::string>(results.rows.size(), "as it is"), true});
  const bool all = std::all_of(results.rows.begin(), results.rows.end(),
                               [](const SweepRow& row) { return row.runs_done() == row.outcomes.size(); });
  if (!all || results.plan->seeds > 1) {
    Column runs{"runs", {}, false};
    for (const SweepRow& row : results.rows)
      runs.cells.push_back(row.runs_done() == row.outcomes.size()
                               ? std::to_string(row.outcomes.size())
                               : fmt::format("{} of {}", row.runs_done(), row.outcomes.size()));
    keys.push_back(std::move(runs));
  }
  for (std::size_t m = 0; m < results.measures.size(); ++m) {
    Column column{results.measures[m].title, {}, false};
    for (const SweepRow& row : results.rows)
      column.cells.push_back(row.estimates[m] ? estimate_text(*row.estimates[m]) : "-");
    measures.push_back(std::move(column));
  }
  std::size_t key_width = 0;
  for (const Column& c : keys) key_width += c.width() + 2;
  std::string out;
  for (std::size_t next = 0; out.empty() || next < measures.size();) {
    std::vector<const Column*> shown;
    for (const Column& c : keys) shown.push_back(&c);
    std::size_t width = key_width;
    do {
      if (next == measures.size()) break;
      width += measures[next].width() + 2;
      shown.push_back(&measures[next++]);
    } while (next < measures.size() && width + measures[next].width() <= columns);
    out += (out.empty() ? "" : "\n") + table_text(shown, results.rows.size());
  }
  return out;
}

std::string to_csv(const SweepResults& results) {
  std::string out;
  const auto add = [&](const std::string& text, bool first = false) { out += (first ? "" : ",") + csv_word(text); };
  bool first = true;
  for (const std::string& key : results.plan->keys) add(key, std::exchange(first, false));
  add("runs", std::exchange(first, false));
  add("runs_done");
  for (const Measure& m : results.measures) {
    add(m.field);
    add(m.field + ".low");
    add(m.field + ".high");
  }
  out += "\n";
  for (const SweepRow& row : results.rows) {
    first = true;
    for (const std::string& key : results.plan->keys) {
      const auto it =
          std::find_if(row.cell->values.begin(), row.cell->values.end(), [&](const auto& v) { return v.first == key; });
      add(it == row.cell->values.end() ? "" : it->second, std::exchange(first, false));
    }
    add(std::to_string(row.outcomes.size()), std::exchange(first, false));
    add(std::to_string(row.runs_done()));
    for (const auto& e : row.estimates) {
      add(e ? fmt::format("{}", e->mean) : "");
      add(e && e->interval ? fmt::format("{}", e->interval->low) : "");
      add(e && e->interval ? fmt::format("{}", e->interval->high) : "");
    }
    out += "\n";
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
  for (const Measure& m : results.measures)
    out["measures"].push_back({{"field", m.field}, {"title", m.title}, {"meaning", m.meaning}});
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
      for (std::size_t m = 0; m < results.measures.size(); ++m)
        if (row.values[m][i]) entry["measures"][results.measures[m].field] = *row.values[m][i];
      cell["runs"].push_back(std::move(entry));
      failed += outcome.end == SweepEnd::kFailed;
      not_run += outcome.end == SweepEnd::kNotRun;
    }
    cell["measures"] = json::object();
    for (std::size_t m = 0; m < results.measures.size(); ++m) {
      const auto& e = row.estimates[m];
      if (!e) continue;
      cell["measures"][results.measures[m].field] = {{"mean", e->mean},
                                                     {"low", e->interval ? json(e->interval->low) : json(nullptr)},
                                                     {"high", e->interval ? json(e->interval->high) : json(nullptr)},
                                                     {"n", e->n}};
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
