// Writes a run's HTML page from its report.json, metrics.jsonl and events.jsonl, for cli/.
#include "pages/run_page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>

#include "base/files.hpp"
#include "base/units.hpp"

namespace echoline::pages {
namespace {

using nlohmann::json;

constexpr std::size_t kWorkersShown = 1000;

// Returns the value at a dotted path; null if there is none.
const json& value_at(const json& object, std::string_view path) {
  static const json kNull;
  const json* value = &object;
  while (true) {
    const std::size_t dot = path.find('.');
    if (!value->is_object()) return kNull;
    const auto it = value->find(std::string(path.substr(0, dot)));
    if (it == value->end()) return kNull;
    value = &*it;
    if (dot == std::string_view::npos) return *value;
    path.remove_prefix(dot + 1);
  }
}

// Absent unless the value is a finite number.
std::optional<double> number(const json& object, std::string_view path) {
  const json& value = value_at(object, path);
  if (!value.is_number() || !std::isfinite(value.get<double>())) return std::nullopt;
  return value.get<double>();
}

// The value as text; "-" if there is none.
std::string text(const json& object, std::string_view path) {
  const json& value = value_at(object, path);
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (const auto value_as_number = number(object, path)) return fmt::format("{:.6g}", *value_as_number);
  return "-";
}

std::string number_text(const json& object, std::string_view path, const char* format = "{:.4g}") {
  const auto value = number(object, path);
  return value ? fmt::format(fmt::runtime(format), *value) : "-";
}

// "0.1 to 0.9"; one number if both are equal; "-" if there is none.
std::string range_text(const json& object, std::string_view first, std::string_view last) {
  const std::string first_text = number_text(object, first), last_text = number_text(object, last);
  return first_text == last_text ? first_text : fmt::format("{} to {}", first_text, last_text);
}

std::string bytes_text(const json& object, std::string_view path) {
  const auto bytes = number(object, path);
  constexpr double kBytesMax = 1e18;  // fits into 64 bits
  return bytes && *bytes >= 0 && *bytes < kBytesMax ? to_text(Bytes{static_cast<std::uint64_t>(*bytes)}) : "-";
}

void add_result_list(Page& page, const json& report) {
  if (!report.is_object()) {
    page.add_paragraph("There is no report yet: it is written when the run ends.");
    return;
  }
  page.add_definition_list({
      {"ended", text(report, "ended")},
      {"learner steps",
       fmt::format("{} of {}", number_text(report, "steps", "{:.0f}"), number_text(report, "steps_planned", "{:.0f}"))},
      {"time", fmt::format("{} s", number_text(report, "wall_seconds", "{:.1f}"))},
      {"seed", number_text(report, "seed", "{:.0f}")},
      {"reward, first to last", range_text(report, "reward.first", "reward.last")},
      {"held-out accuracy", range_text(report, "eval.before", "eval.after")},
      {"learner idle", number_text(report, "learner.idle_fraction", "{:.3f}")},
      {"median step", fmt::format("{} s", number_text(report, "learner.step_seconds_median"))},
      {"staleness: mean, 95th percentile, budget",
       fmt::format("{}, {}, {}", number_text(report, "staleness.mean"), number_text(report, "staleness.p95"),
                   number_text(report, "staleness.budget"))},
      {"rollouts not trained on", number_text(report, "staleness.rejected", "{:.0f}")},
      // T_b: the time from publishing a policy until the quorum of workers has installed it.
      {"T_b, median", fmt::format("{} s", number_text(report, "broadcast.t_b_seconds_median"))},
      {"T_b, lower bound", fmt::format("{} s", number_text(report, "broadcast.lower_bound_seconds"))},
      {"policy, full", bytes_text(report, "broadcast.full_bytes")},
      {"delta, mean", bytes_text(report, "broadcast.delta_bytes_mean")},
      {"rollouts/s: needed", number_text(report, "plan.target_rollouts_per_s")},
      {"rollouts/s: rented and measured",
       fmt::format("{} and {}", number_text(report, "plan.provisioned_rollouts_per_s"),
                   number_text(report, "plan.measured_rollouts_per_s"))},
      {"workers lost, replaced",
       fmt::format("{}, {}", number_text(report, "fleet.workers_lost"), number_text(report, "fleet.workers_replaced"))},
      {"cost, US dollars", number_text(report, "cost.usd_total")},
      {"cost of the fleet, of the learner",
       fmt::format("{}, {}", number_text(report, "cost.usd_fleet"), number_text(report, "cost.usd_learner"))},
      {"cost of 1,000 rollouts", number_text(report, "cost.usd_per_1k_rollouts")},
      {"all weights identical", text(report, "weights.all_workers_identical")},
  });
}

// Rows of metrics.jsonl by step or version. The last row counts if a resumed run repeated the step.
using Rows = std::map<double, const json*>;

Rows select_rows(const std::vector<json>& metrics, std::string_view kind, const char* number_key) {
  Rows rows;
  for (const json& row : metrics) {
    if (text(row, "kind") != kind) continue;
    if (const auto row_number = number(row, number_key)) rows[*row_number] = &row;
  }
  return rows;
}

// Returns a series with x = a row's step or version and y = value(row). Skips rows without a value.
template <class Value>
PlotSeries make_series(std::string name, const Rows& rows, const Value& value, bool connect_points = true) {
  PlotSeries series{.name = std::move(name), .points = {}, .connect_points = connect_points};
  for (const auto& [row_number, row] : rows) {
    const std::optional<double> y = value(*row);
    if (!y) continue;
    PlotPoint& point = series.points.emplace_back();
    point.x = row_number;
    point.y = *y;
  }
  return series;
}

// Returns a function that reads the number in this field of a row.
auto number_in_field(const char* name) {
  return [name](const json& row) { return number(row, name); };
}

// Staleness of a step's rollouts, in learner steps.
struct BatchStaleness {
  double mean = 0, oldest = 0;
};
std::optional<BatchStaleness> batch_staleness(const json& row) {
  const json& histogram = value_at(row, "staleness");
  if (!histogram.is_object()) return std::nullopt;
  double rollout_sum = 0, age_sum = 0, oldest = 0;
  for (const auto& [age, rollouts] : histogram.items()) {
    double age_steps = 0;
    const char* const age_end = age.data() + age.size();
    const auto [parsed_end, error] = std::from_chars(age.data(), age_end, age_steps);
    const bool is_age = error == std::errc{} && parsed_end == age_end;
    if (!is_age || !rollouts.is_number() || !(rollouts.get<double>() > 0)) continue;
    rollout_sum += rollouts.get<double>();
    age_sum += age_steps * rollouts.get<double>();
    oldest = std::max(oldest, age_steps);
  }
  if (!(rollout_sum > 0)) return std::nullopt;
  return BatchStaleness{.mean = age_sum / rollout_sum, .oldest = oldest};
}

void add_plots(Page& page, const std::vector<json>& metrics) {
  const Rows steps = select_rows(metrics, "step", "step"), evaluations = select_rows(metrics, "evaluation", "step");
  Rows broadcasts = select_rows(metrics, "broadcast", "version"),
       publications = select_rows(metrics, "publication", "version");
  for (Rows* rows : {&broadcasts, &publications})
    // Plots show deltas only: a snapshot is many times larger and slower.
    std::erase_if(*rows, [](const auto& row) { return value_at(*row.second, "snapshot") == json(true); });
  const auto waiting_share = [](const json& row) -> std::optional<double> {
    const auto wait = number(row, "wait_seconds"), whole_step_s = number(row, "step_seconds");
    return wait && whole_step_s && *whole_step_s > 0 ? std::optional(*wait / *whole_step_s) : std::nullopt;
  };
  const auto mean_staleness = [](const json& row) {
    const auto staleness = batch_staleness(row);
    return staleness ? std::optional(staleness->mean) : std::nullopt;
  };
  const auto oldest_staleness = [](const json& row) {
    const auto staleness = batch_staleness(row);
    return staleness ? std::optional(staleness->oldest) : std::nullopt;
  };
  const std::string step = "learner step", version = "version";
  constexpr bool kPointsOnly = false;  // no line, because evaluations are rare
  const auto make_plot = [](std::string title, const std::string& x_title, std::string y_unit,
                            std::vector<PlotSeries> series) {
    return Plot{.title = std::move(title),
                .x_title = x_title,
                .y_title = std::move(y_unit),
                .categories = {},
                .series = std::move(series)};
  };
  page.add_plots({
      make_plot("Reward and accuracy", step, "",
                {make_series("mean reward", steps, number_in_field("reward_mean")),
                 make_series("accuracy", steps, number_in_field("accuracy")),
                 make_series("held-out accuracy", evaluations, number_in_field("accuracy"), kPointsOnly)}),
      make_plot("Loss", step, "", {make_series("loss", steps, number_in_field("loss"))}),
      make_plot("Staleness of the rollouts trained on, steps", step, "",
                {make_series("mean", steps, mean_staleness), make_series("oldest", steps, oldest_staleness)}),
      make_plot("Seconds of a learner step", step, "s",
                {make_series("waiting for rollouts", steps, number_in_field("wait_seconds")),
                 make_series("training", steps, number_in_field("train_seconds"))}),
      make_plot("Share of the time spent waiting", step, "", {make_series("idle", steps, waiting_share)}),
      make_plot("T_b, seconds from publishing to having it installed", version, "s",
                {make_series("T_b", broadcasts, number_in_field("t_b_seconds")),
                 make_series("transfer, predicted", broadcasts, number_in_field("predicted_seconds")),
                 make_series("lower bound", broadcasts, number_in_field("lower_bound_seconds"))}),
      make_plot("Bytes of a delta", version, "B", {make_series("delta", publications, number_in_field("patch_bytes"))}),
      make_plot("Length of the responses, tokens", step, "",
                {make_series("mean", steps, number_in_field("response_tokens_mean")),
                 make_series("longest", steps, number_in_field("response_tokens_max"))}),
      make_plot("Entropy and divergence, nats a token", step, "",
                {make_series("entropy", steps, number_in_field("entropy")),
                 make_series("from the generating policy", steps, number_in_field("behaviour_kl")),
                 make_series("from the reference", steps, number_in_field("reference_kl"))}),
      make_plot("Gradient norm", step, "", {make_series("before clipping", steps, number_in_field("gradient_norm"))}),
      make_plot("Workers", step, "",
                {make_series("at work", steps, number_in_field("workers")),
                 make_series("on their way", steps, number_in_field("workers_joining"))}),
      make_plot("Cost, US dollars", step, "$",
                {make_series("so far", steps, number_in_field("usd")),
                 make_series("an hour", steps, number_in_field("usd_per_hour"))}),
  });
}

PageCell number_cell(std::string content) { return {.text = std::move(content), .link = "", .is_number = true}; }
PageCell text_cell(std::string content) { return {.text = std::move(content), .link = "", .is_number = false}; }

void add_workers(Page& page, const json& report) {
  const json& workers = value_at(report, "workers");
  if (!workers.is_array() || workers.empty()) return;
  std::vector<std::vector<PageCell>> rows;
  for (const json& worker : workers) {
    if (rows.size() == kWorkersShown) break;
    const std::string state = text(worker, "lost") == "yes"   ? "lost"
                              : text(worker, "away") == "yes" ? "away"
                                                              : "connected";
    rows.push_back({number_cell(text(worker, "id")), text_cell(text(worker, "offer")),
                    number_cell(number_text(worker, "price_usd_per_hour")),
                    number_cell(number_text(worker, "rollouts", "{:.0f}")), number_cell(bytes_text(worker, "bytes_in")),
                    number_cell(bytes_text(worker, "bytes_forwarded")),
                    number_cell(number_text(worker, "version", "{:.0f}")), text_cell(state)});
  }
  page.add_heading("Workers");
  if (workers.size() > rows.size())
    page.add_paragraph(fmt::format("Shows the first {} of {} workers.", rows.size(), workers.size()));
  page.add_table({"id", "offer", "$ an hour", "rollouts", "received", "passed on", "version", "state at the end"},
                 rows);
}

void add_events(Page& page, const RunFiles& run) {
  const std::vector<json>& events = run.events;
  if (events.empty()) return;
  // `events` may lack the run's first ones, so RunFiles has the time of the first event.
  const auto first_s = run.first_event_unix_s ? run.first_event_unix_s : number(events.front(), "unix_s");
  std::vector<std::vector<PageCell>> rows;
  for (std::size_t i = events.size() - std::min(events.size(), kEventsShown); i < events.size(); ++i) {
    const json& event = events[i];
    const auto event_s = number(event, "unix_s");
    std::string other_fields;
    if (event.is_object())
      for (const auto& [key, value] : event.items())
        if (key != "unix_s" && key != "event")
          other_fields += fmt::format(
              "{}{}: {}", other_fields.empty() ? "" : ", ", key,
              value.is_string() ? value.get<std::string>()
                                : value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace));
    const std::string time_text = event_s && first_s ? fmt::format("{:.1f} s", *event_s - *first_s) : "-";
    rows.push_back({number_cell(time_text), text_cell(text(event, "event")), text_cell(other_fields)});
  }
  page.add_heading("Events");
  const std::uint64_t event_count = run.events_left_out + events.size();
  if (event_count > rows.size())
    page.add_paragraph(fmt::format("Shows the last {} of {} events.", rows.size(), event_count));
  page.add_table({"after", "event", ""}, rows);
}

}  // namespace

std::string run_page(const RunFiles& run, const ChartLibrary& charts) {
  const std::string name = text(run.report, "run");
  const bool simulated = value_at(run.report, "simulation").is_object();
  Page page(fmt::format("{} {}", simulated ? "Simulated run" : "Run", name == "-" ? run.name : name));
  add_result_list(page, run.report);
  add_plots(page, run.metrics);
  add_workers(page, run.report);
  add_events(page, run);
  return page.finish(charts);
}

Result<std::filesystem::path> write_run_page(const RunFiles& run, const std::string& file,
                                             const std::filesystem::path& folder) {
  const std::filesystem::path path = file.empty() ? folder / "report.html" : std::filesystem::path(file);
  if (std::filesystem::is_directory(path))
    return fail(Code::kInvalid, "--html", "{} is a folder, expected a file; name the run before --html", path.string());
  ECHO_TRY(write_file_atomic(path, run_page(run, built_in_charts())));
  return path;
}

}  // namespace echoline::pages
