// The HTML page of a sweep, which cli/sweep.cpp writes.
#include "study/sweep_page.hpp"

#include <algorithm>

#include "study/sweep_expression.hpp"

namespace echoline::study {

using namespace pages;

namespace {

constexpr std::size_t kSeriesMax = 24;  // series of a plot; further ones are left out

std::string value_of(const SweepCell& cell, const std::string& key) { return cell.value(key).value_or("-"); }

// A value such as "1/4" is a number too.
std::optional<double> number_of(const std::string& text) {
  const auto expression = Expression::parse(text);
  if (!expression || !expression->names().empty()) return std::nullopt;
  const auto value = expression->value([](const std::string&) { return std::nullopt; });
  return value ? std::optional(*value) : std::nullopt;
}

// The first key with several values; if there is none, the first key.
const std::string& key_of_axis(const SweepResults& results) {
  for (const std::string& key : results.plan->keys)
    for (const SweepRow& row : results.rows)
      if (value_of(*row.cell, key) != value_of(*results.rows.front().cell, key)) return key;
  return results.plan->keys.front();
}

// The positions of the cells on the axis: the values if all are numbers, otherwise their order.
struct Axis {
  std::string key, title;
  std::vector<std::string> categories;  // the values, if they are no numbers
  std::vector<double> x;                // by row of the results
};

Axis axis_of(const SweepResults& results) {
  Axis axis;
  if (results.plan->keys.empty()) {
    axis.categories = {"as it is"};
    axis.x.assign(results.rows.size(), 0);
    return axis;
  }
  const std::string& key = key_of_axis(results);
  axis.key = key;
  axis.title = short_key(key);
  std::vector<std::string> values;
  bool are_numbers = true;
  for (const SweepRow& row : results.rows) {
    values.push_back(value_of(*row.cell, key));
    are_numbers = are_numbers && number_of(values.back()).has_value();
  }
  for (const std::string& value : values) {
    if (are_numbers) {
      axis.x.push_back(*number_of(value));
      continue;
    }
    auto it = std::find(axis.categories.begin(), axis.categories.end(), value);
    axis.x.push_back(static_cast<double>(it - axis.categories.begin()));
    if (it == axis.categories.end()) axis.categories.push_back(value);
  }
  return axis;
}

// The names of the series that a cell belongs to: its keys and values, without the key of the axis. Values are taken as
// written: "kappa=S-1" is one series, although its number differs by cell.
std::vector<std::string> series_names(const Axis& axis, const SweepRow& row) {
  std::vector<std::string> names;
  for (const KeyValues& spelling : row.cell->written) {
    std::string name;
    for (const auto& [key, text] : spelling)
      if (key != axis.key) name += fmt::format("{}{}={}", name.empty() ? "" : " ", short_key(key), text);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
  }
  if (names.empty()) names.emplace_back();
  return names;
}

std::string link_to(const SweepRow& row) {
  return row.cell->runs.empty() ? "" : fmt::format("cells/{}/", row.cell->runs.front().digest);
}

PlotPoint point_of(const SweepRow& row, const Estimate& y, double x) {
  PlotPoint point{.x = x, .y = y.mean, .low = {}, .high = {}, .note = row.cell->name(), .link = link_to(row)};
  if (y.interval) {
    point.low = y.interval->low;
    point.high = y.interval->high;
  }
  return point;
}

std::string caption(const Measure& measure) {
  return measure.title == measure.meaning ? measure.title : fmt::format("{} ({})", measure.title, measure.meaning);
}

Plot measure_plot(const SweepResults& results, std::size_t measure_index, const Axis& axis) {
  Plot plot{.title = caption(results.measures[measure_index]),
            .x_title = axis.title,
            .y_title = results.measures[measure_index].title,
            .categories = axis.categories,
            .series = {}};
  for (std::size_t row_index = 0; row_index < results.rows.size(); ++row_index) {
    const SweepRow& row = results.rows[row_index];
    if (!row.estimates[measure_index]) continue;
    for (const std::string& name : series_names(axis, row)) {
      auto it = std::find_if(plot.series.begin(), plot.series.end(),
                             [&](const PlotSeries& candidate) { return candidate.name == name; });
      if (it == plot.series.end()) {
        if (plot.series.size() == kSeriesMax) continue;
        it = plot.series.insert(it, PlotSeries{.name = name, .points = {}, .connect_points = true});
      }
      it->points.push_back(point_of(row, *row.estimates[measure_index], axis.x[row_index]));
    }
  }
  for (PlotSeries& series : plot.series)
    std::stable_sort(series.points.begin(), series.points.end(),
                     [](const PlotPoint& a, const PlotPoint& b) { return a.x < b.x; });
  return plot;
}

// Plots the cells by two measures, both better if smaller. A line connects the cells of the Pareto front.
Plot pareto_plot(const SweepResults& results) {
  const auto index_of = [&](const std::string& field) {
    return static_cast<std::size_t>(std::find_if(results.measures.begin(), results.measures.end(),
                                                 [&](const Measure& measure) { return measure.field == field; }) -
                                    results.measures.begin());
  };
  const std::size_t x_measure = index_of(results.pareto_x), y_measure = index_of(results.pareto_y);
  Plot plot;
  plot.title = fmt::format("{} against {}: no cell is better in both than the cells on the line",
                           results.measures[y_measure].title, results.measures[x_measure].title);
  plot.x_title = results.measures[x_measure].title;
  plot.y_title = results.measures[y_measure].title;
  plot.series.push_back({.name = "not beaten", .points = {}, .connect_points = true});
  plot.series.push_back({.name = "the others", .points = {}, .connect_points = false});
  for (std::size_t row_index = 0; row_index < results.rows.size(); ++row_index) {
    const SweepRow& row = results.rows[row_index];
    if (!row.estimates[x_measure] || !row.estimates[y_measure]) continue;
    const bool is_unbeaten = std::find(results.pareto.begin(), results.pareto.end(), row_index) != results.pareto.end();
    plot.series[is_unbeaten ? 0 : 1].points.push_back(
        point_of(row, *row.estimates[y_measure], row.estimates[x_measure]->mean));
  }
  auto& line = plot.series.front().points;
  std::stable_sort(line.begin(), line.end(), [](const PlotPoint& a, const PlotPoint& b) { return a.x < b.x; });
  return plot;
}

void add_cells_table(Page& page, const SweepResults& results) {
  std::vector<std::string> titles;
  for (const std::string& key : results.plan->keys) titles.push_back(short_key(key));
  titles.emplace_back("runs");
  for (const Measure& measure : results.measures) titles.push_back(measure.title);
  std::vector<std::vector<PageCell>> rows;
  for (const SweepRow& row : results.rows) {
    auto& cells = rows.emplace_back();
    const auto add_right_aligned = [&](std::string text) {
      cells.push_back({.text = std::move(text), .link = "", .is_number = true});
    };
    for (const std::string& key : results.plan->keys) add_right_aligned(value_of(*row.cell, key));
    add_right_aligned(fmt::format("{} of {}", row.runs_done(), row.outcomes.size()));
    for (const auto& estimate : row.estimates) add_right_aligned(estimate ? estimate_text(*estimate) : "-");
  }
  page.add_heading("Cells");
  page.add_table(titles, rows);
}

void add_runs_table(Page& page, const SweepResults& results) {
  std::vector<std::vector<PageCell>> rows;
  for (const SweepRow& row : results.rows)
    for (std::size_t i = 0; i < row.outcomes.size(); ++i) {
      const SweepRun& run = row.cell->runs[i];
      const SweepOutcome& outcome = *row.outcomes[i];
      const std::string state(to_string(outcome.end));
      const std::string folder = fmt::format("cells/{}/", run.digest);
      const auto text_cell = [](std::string text, std::string link = "") {
        return PageCell{.text = std::move(text), .link = std::move(link), .is_number = false};
      };
      const PageCell seed{.text = std::to_string(run.seed), .link = "", .is_number = true};
      rows.push_back({text_cell(row.cell->name()), seed,
                      text_cell(state, state == "done" ? folder + "report.json" : ""),
                      text_cell("config.yaml", folder + "config.yaml"), text_cell("folder", folder),
                      // Without a log the text is empty, so the page shows no link.
                      text_cell(outcome.log.empty() ? "" : "log", fmt::format("logs/{}.log", run.digest)),
                      text_cell(outcome.why)});
    }
  page.add_heading("Runs");
  page.add_table({"cell", "seed", "state", "file", "folder", "log", "why"}, rows);
}

}  // namespace

std::string sweep_page(const SweepResults& results, const ChartLibrary& charts) {
  const SweepPlan& plan = *results.plan;
  Page page(fmt::format("Sweep of {}", plan.config.filename().string()));
  std::size_t runs_done = 0, run_count = 0;
  for (const SweepRow& row : results.rows) runs_done += row.runs_done(), run_count += row.outcomes.size();
  std::string keys;
  for (const std::string& key : plan.keys) keys += (keys.empty() ? "" : ", ") + key;
  page.add_definition_list({{"runs", plan.kind == SweepKind::kReal ? "real" : "simulated"},
                            {"swept", keys.empty() ? "nothing but the seed" : keys},
                            {"cells", std::to_string(plan.cells.size())},
                            {"seeds each", std::to_string(plan.seeds)},
                            {"done", fmt::format("{} of {}", runs_done, run_count)}});
  if (plan.seeds > 1)
    page.add_paragraph(
        "Intervals are 95 % intervals of the mean over seeds, by Student's t, limited to possible values. With two "
        "seeds they extend 12.7 standard errors to either side, with three 4.3.");
  const Axis axis = axis_of(results);
  std::vector<Plot> plots;
  if (!results.pareto.empty()) plots.push_back(pareto_plot(results));
  for (std::size_t index = 0; index < results.measures.size(); ++index)
    plots.push_back(measure_plot(results, index, axis));
  page.add_plots(std::move(plots));
  add_cells_table(page, results);
  add_runs_table(page, results);
  return page.finish(charts);
}

}  // namespace echoline::study
