// The report and table of `echoline sim run`.
#include "study/sim_run_report.hpp"

#include <algorithm>
#include <cmath>

#include "learner/report.hpp"

namespace echoline::study {
namespace {

using nlohmann::json;

json age_histogram(const auto& histogram) {
  json object = json::object();
  for (const auto& [age, rollouts] : histogram) object[std::to_string(age)] = rollouts;
  return object;
}

learner::WorkerEntry worker_entry(const sim::SimMachine& machine) {
  learner::WorkerEntry entry;
  entry.id = WorkerId{machine.worker};
  entry.offer = machine.offer;
  entry.price_usd_per_hour = machine.usd_per_hour;
  entry.rollouts = machine.rollouts;
  entry.bytes_in = static_cast<std::uint64_t>(machine.bytes_in);
  entry.bytes_forwarded = static_cast<std::uint64_t>(machine.bytes_forwarded);
  entry.version = Version{machine.version};
  if (machine.lost) entry.presence = learner::Presence::kLost;
  return entry;
}

}  // namespace

std::vector<json> sim_run_metrics(const sim::RunResult& result) {
  std::vector<json> rows;
  for (const sim::SimPublication& publication : result.publications) {
    // A later snapshot is sent in place of a delta, so it counts as one.
    const bool is_first_snapshot = publication.snapshot && publication.version == 0;
    rows.push_back({{"unix_s", publication.at_s},
                    {"kind", "publication"},
                    {"version", publication.version},
                    {"snapshot", is_first_snapshot},
                    {"patch_bytes", publication.bytes.count}});
    if (!publication.t_b_s) continue;  // T_b, the broadcast time: absent if the run ended before
    rows.push_back({{"unix_s", publication.at_s + *publication.t_b_s},
                    {"kind", "broadcast"},
                    {"version", publication.version},
                    {"snapshot", is_first_snapshot},
                    {"payload_bytes", publication.bytes.count},
                    {"t_b_seconds", *publication.t_b_s},
                    {"workers", publication.workers},
                    {"acknowledged", publication.installed},
                    {"depth", publication.depth},
                    {"learner_bytes", publication.learner_bytes.count},
                    {"lower_bound_seconds", publication.lower_bound_s},
                    {"predicted_seconds", publication.predicted_s}});
  }
  for (const sim::SimStep& step : result.by_step)
    rows.push_back({{"unix_s", step.at_s},
                    {"kind", "step"},
                    {"step", step.step},
                    {"staleness", age_histogram(step.staleness)},
                    {"wait_seconds", step.wait_s},
                    {"train_seconds", step.train_s},
                    {"step_seconds", step.wait_s + step.train_s},
                    {"response_tokens", step.tokens},
                    {"response_tokens_mean", step.tokens_mean},
                    {"workers", step.working},
                    {"workers_joining", step.joining},
                    {"rollouts_per_s_expected", step.rollouts_per_s},
                    {"rollouts_per_s_wanted", step.target_rollouts_per_s},
                    {"rollouts_waiting", step.waiting},
                    {"rollouts_in_flight", step.in_flight},
                    {"usd", step.usd},
                    {"usd_per_hour", step.usd_per_hour}});
  std::stable_sort(rows.begin(), rows.end(), [](const json& a, const json& b) {
    return a.at("unix_s").get<double>() < b.at("unix_s").get<double>();
  });
  return rows;
}

std::vector<json> thin_out_metrics(std::vector<json> metrics, std::uint64_t steps) {
  if (metrics.size() <= kMetricRowsMax) return metrics;
  // A publication or broadcast is kept or removed together with the step it follows, so a kept step has up to three
  // rows. The first publications and the last step are always kept; they need a few rows more.
  constexpr std::uint64_t kRowsPerStep = 3, kSpareRows = 10;
  constexpr std::uint64_t kRowsForSteps = kMetricRowsMax - kSpareRows;
  // Rounded up, so that the kept rows are not too many.
  const std::uint64_t stride = std::max<std::uint64_t>(1, (kRowsPerStep * steps + kMetricRowsMax - 1) / kRowsForSteps);
  std::erase_if(metrics, [&](const json& row) {
    const std::uint64_t step =
        row.contains("step") ? row.at("step").get<std::uint64_t>() : row.at("version").get<std::uint64_t>();
    return step != 0 && step % stride != 0 && step != steps;
  });
  return metrics;
}

std::optional<double> idle_fraction_after_first_step(const sim::RunResult& result) {
  double wait_s = 0, total_s = 0;
  for (const sim::SimStep& step : result.by_step)
    if (step.step > 1) wait_s += step.wait_s, total_s += step.wait_s + step.train_s;
  return total_s > 0 ? std::optional(wait_s / total_s) : std::nullopt;
}

json sim_run_report(const SimRun& run, const sim::RunResult& result, const std::vector<json>& metrics) {
  learner::ReportInput input;
  input.config = &run.config;
  input.plan = &result.plan;
  input.figures = learner::run_figures(metrics);
  if (input.figures.snapshot.is_object()) input.figures.snapshot["state_bytes"] = run.scenario.request.full_bytes.count;
  std::size_t machines_joined = 0;
  for (const sim::SimMachine& machine : result.machines)
    if (machine.worker != 0 && ++machines_joined <= kWorkersListed) input.workers.push_back(worker_entry(machine));
  input.fleet.planned = result.machines_planned;
  input.fleet.started = result.machines_started;
  input.fleet.lost = result.machines_lost;
  input.fleet.replaced = result.machines_replaced;
  input.fleet.usd = result.usd_fleet;
  input.fleet.prices_known = run.prices_known;
  input.wall_seconds = result.wall_s;
  if (run.scenario.request.learner_usd_per_hour) input.learner_usd = result.usd_learner;
  input.version = Version{result.version};
  input.bytes_sent = static_cast<std::uint64_t>(result.learner_bytes_sent);
  input.steps_done = result.steps;
  input.topology = result.topology;
  input.end_reason = result.ended;
  input.rejected = json::object();
  for (const auto& [reason, rollouts] : result.rejected) input.rejected[reason] = rollouts;
  input.limited_steps = result.work_limits;
  if (result.groups_set_aside > 0) input.groups_set_aside["worker lost"] = result.groups_set_aside;
  json report = learner::make_report(input);
  // A simulation trains no weights, so it has no digests of them to compare.
  for (const char* key : {"digest", "differing", "all_workers_identical", "workers", "acknowledged"})
    report["weights"][key] = nullptr;
  for (json& worker : report["workers"]) worker["digest"] = nullptr;

  std::uint64_t unfinished = 0;
  for (const auto& [reason, rollouts] : result.unfinished) unfinished += rollouts;
  json by_region = json::object();
  constexpr std::size_t kRegionsListed = 64;
  const bool lists_regions = run.scenario.regions.size() > 1 && run.scenario.regions.size() <= kRegionsListed;
  for (const sim::SimMachine& machine : result.machines) {
    if (!lists_regions) break;
    json& region = by_region[run.scenario.regions[machine.region]];
    if (region.is_null()) region = {{"machines", 0}, {"rollouts", 0}, {"usd", 0.0}};
    region["machines"] = region["machines"].get<std::uint64_t>() + 1;
    region["rollouts"] = region["rollouts"].get<std::uint64_t>() + machine.rollouts;
    region["usd"] = region["usd"].get<double>() +
                    machine.usd_per_hour * (machine.paid_to_s - machine.paid_from_s) / 3600 + machine.usd_traffic;
  }
  // Submitted rollouts by age: those rejected as stale, and those trained on.
  std::map<std::uint64_t, std::uint64_t> submitted_by_age = result.stale_by_age;
  double stale_rollouts = 0, submitted_rollouts = 0;
  for (const auto& [age, rollouts] : result.stale_by_age) stale_rollouts += static_cast<double>(rollouts);
  for (const sim::SimStep& step : result.by_step)
    for (const auto& [age, rollouts] : step.staleness) submitted_by_age[age] += rollouts;
  for (const auto& [age, rollouts] : submitted_by_age) submitted_rollouts += static_cast<double>(rollouts);
  const auto share = [](double part, double whole) { return whole > 0 ? json(part / whole) : json(nullptr); };
  const auto idle_fraction = idle_fraction_after_first_step(result);
  report["simulation"] = {
      {"seed", run.scenario.seed},
      {"parameters", run.parameters},
      {"delta_bytes_first", run.scenario.delta_bytes.front().count},
      {"begun_seconds", result.first_snapshot_s},
      {"idle_fraction_after_first_step", idle_fraction ? json(*idle_fraction) : json(nullptr)},
      {"idle_fraction_predicted", result.idle_predicted ? json(*result.idle_predicted) : json(nullptr)},
      {"plan", result.plan_error.empty() ? json("as planned") : json(result.plan_error)},
      {"events", result.events},
      {"topologies_planned", result.topologies_planned},
      {"publications_merged", result.publications_merged},
      {"staleness",
       {{"in_flight", age_histogram(result.in_flight)},
        {"in_queue", age_histogram(result.in_queue)},
        {"handed_in",
         {{"p50", learner::quantile(submitted_by_age, 0.5)}, {"p90", learner::quantile(submitted_by_age, 0.9)}}},
        {"admissible_fraction", share(submitted_rollouts - stale_rollouts, submitted_rollouts)}}},
      {"rollouts_unfinished", unfinished},
      {"rollouts_unfinished_by_reason", result.unfinished},
      {"tokens", {{"generated", result.tokens_generated}, {"trained", result.tokens_trained}}},
      {"fleet",
       {{"workers_most", result.workers_peak},
        {"machine_hours", result.machine_hours},
        {"busy_fraction", share(result.busy_s, result.present_s)},
        {"workers_left_out", machines_joined - std::min(machines_joined, kWorkersListed)}}},
      {"recovery",
       {{"count", result.recoveries_s.size()},
        {"seconds_median", learner::quantile(result.recoveries_s, 0.5)},
        {"seconds_p95", learner::quantile(result.recoveries_s, 0.95)},
        {"seconds_max", learner::quantile(result.recoveries_s, 1)}}},
      {"cost", {{"usd_rent", result.usd_rent}, {"usd_traffic", result.usd_traffic}}},
      {"regions", by_region},
      {"crossing_bytes_sent", static_cast<std::uint64_t>(result.crossing_bytes_sent)},
      {"decisions", result.decision_counts}};
  return report;
}

namespace {

std::string number_or_dash(const json& value, const char* format) {
  return value.is_number() ? fmt::format(fmt::runtime(format), value.get<double>()) : "-";
}
std::string bytes_or_dash(const json& value) {
  return value.is_number() ? to_text(Bytes{static_cast<std::uint64_t>(value.get<double>())}) : "-";
}
std::string duration_or_dash(const json& value) {
  return value.is_number() ? to_text(from_seconds(value.get<double>())) : "-";
}
std::string percent_or_dash(const json& value) {
  return value.is_number() ? fmt::format("{:.1f} %", 100 * value.get<double>()) : "-";
}

// The shares of the youngest ages: "0: 60 %  1: 40 %".
std::string histogram_text(const json& ages) {
  constexpr std::size_t kAgesShown = 5;
  std::vector<std::pair<std::uint64_t, double>> by_age;
  double total = 0;
  for (const auto& [age, rollouts] : ages.items()) {
    by_age.emplace_back(std::stoull(age), rollouts.get<double>());
    total += rollouts.get<double>();
  }
  std::sort(by_age.begin(), by_age.end());
  std::string text;
  for (std::size_t i = 0; i < std::min(kAgesShown, by_age.size()); ++i) {
    const double percent_of_all = 100 * by_age[i].second / std::max(total, 1e-12);
    text += fmt::format("{}{}: {:.0f} %", text.empty() ? "" : "  ", by_age[i].first, percent_of_all);
  }
  return text.empty() ? "-" : text + (by_age.size() > kAgesShown ? "  .." : "");
}

}  // namespace

std::string sim_run_table(const json& report) {
  const json &learner = report.at("learner"), &staleness = report.at("staleness"), &broadcast = report.at("broadcast"),
             &fleet = report.at("fleet"), &cost = report.at("cost"), &plan = report.at("plan"),
             &simulation = report.at("simulation");
  std::string out;
  const auto add_line = [&](std::string_view label, const std::string& text) {
    out += fmt::format("{:<13}{}\n", label, text);
  };
  out += fmt::format("{}: {} of {} steps in {} ({}), simulated\n", report.at("run").get<std::string>(),
                     report.at("steps").get<std::uint64_t>(), report.at("steps_planned").get<std::uint64_t>(),
                     duration_or_dash(report.at("wall_seconds")), report.at("ended").get<std::string>());
  add_line("learner", fmt::format("idle {}, {} after the first step", percent_or_dash(learner.at("idle_fraction")),
                                  percent_or_dash(simulation.at("idle_fraction_after_first_step"))));
  if (simulation.at("idle_fraction_predicted").is_number())
    add_line("", fmt::format("predicted {}", percent_or_dash(simulation.at("idle_fraction_predicted"))));
  add_line("", fmt::format("step {}, training {}", duration_or_dash(learner.at("step_seconds_median")),
                           duration_or_dash(learner.at("train_seconds_median"))));
  add_line("cost", fmt::format("${} ({} fleet, {} learner)", number_or_dash(cost.at("usd_total"), "{:.2f}"),
                               number_or_dash(cost.at("usd_fleet"), "{:.2f}"),
                               number_or_dash(cost.at("usd_learner"), "{:.2f}")));
  add_line("", fmt::format("rent ${}, traffic ${}", number_or_dash(simulation.at("cost").at("usd_rent"), "{:.2f}"),
                           number_or_dash(simulation.at("cost").at("usd_traffic"), "{:.2f}")));
  add_line("",
           fmt::format("${} per 1000 rollouts, plan ${}/h", number_or_dash(cost.at("usd_per_1k_rollouts"), "{:.4f}"),
                       number_or_dash(cost.at("plan_usd_per_hour"), "{:.2f}")));
  add_line("fleet", fmt::format("planned {}, started {}, at most {}", fleet.at("workers_planned").get<std::uint64_t>(),
                                fleet.at("workers_started").get<std::uint64_t>(),
                                simulation.at("fleet").at("workers_most").get<std::uint64_t>()));
  add_line("", fmt::format("lost {}, replaced {}; busy {}", fleet.at("workers_lost").get<std::uint64_t>(),
                           fleet.at("workers_replaced").get<std::uint64_t>(),
                           percent_or_dash(simulation.at("fleet").at("busy_fraction"))));
  if (simulation.at("recovery").at("count").get<std::uint64_t>() > 0)
    add_line("recovery",
             fmt::format("{} times; median {}, p95 {}", simulation.at("recovery").at("count").get<std::uint64_t>(),
                         duration_or_dash(simulation.at("recovery").at("seconds_median")),
                         duration_or_dash(simulation.at("recovery").at("seconds_p95"))));
  add_line("rollouts/s",
           fmt::format("needed {}, rented {}, trained {}", number_or_dash(plan.at("target_rollouts_per_s"), "{:.4g}"),
                       number_or_dash(plan.at("provisioned_rollouts_per_s"), "{:.4g}"),
                       number_or_dash(plan.at("measured_rollouts_per_s"), "{:.4g}")));
  add_line("staleness",
           fmt::format("mean {}, p95 {}, max {} of {}", number_or_dash(staleness.at("mean"), "{:.2f}"),
                       number_or_dash(staleness.at("p95"), "{:.0f}"), number_or_dash(staleness.at("max"), "{:.0f}"),
                       staleness.at("budget").get<std::uint64_t>()));
  if (const std::string bound = learner::bound_text(staleness); !bound.empty()) add_line("", bound);
  add_line("  in flight", histogram_text(simulation.at("staleness").at("in_flight")));
  add_line("  in queue", histogram_text(simulation.at("staleness").at("in_queue")));
  add_line("discarded", fmt::format("{} too late, {} never finished", staleness.at("rejected").get<std::uint64_t>(),
                                    simulation.at("rollouts_unfinished").get<std::uint64_t>()));
  add_line("broadcast",
           fmt::format("{}, delta {}, full {}", broadcast.at("publications").get<std::uint64_t>(),
                       bytes_or_dash(broadcast.at("delta_bytes_mean")), bytes_or_dash(broadcast.at("full_bytes"))));
  add_line("", fmt::format("T_b {}, p95 {}; bound {}", duration_or_dash(broadcast.at("t_b_seconds_median")),
                           duration_or_dash(broadcast.at("t_b_seconds_p95")),
                           duration_or_dash(broadcast.at("lower_bound_seconds"))));
  add_line("", fmt::format("the learner sent {}", bytes_or_dash(broadcast.at("learner_bytes_sent"))));
  if (simulation.at("crossing_bytes_sent").get<std::uint64_t>() > 0)
    add_line("", fmt::format("{} sent between regions", bytes_or_dash(simulation.at("crossing_bytes_sent"))));
  for (const auto& [name, region] : simulation.at("regions").items())
    add_line("  " + name.substr(0, 10),
             fmt::format("{} machines, {} rollouts, ${:.2f}", region.at("machines").get<std::uint64_t>(),
                         region.at("rollouts").get<std::uint64_t>(), region.at("usd").get<double>()));
  std::string decisions;
  // Only the first line of decisions has the label.
  constexpr std::size_t kDecisionsWidth = 44;
  bool is_first_line = true;
  const auto add_decisions_line = [&] {
    add_line(std::exchange(is_first_line, false) ? "decisions" : "", std::exchange(decisions, ""));
  };
  for (const auto& [kind, count] : simulation.at("decisions").items()) {
    const std::string decision = fmt::format("{} {}", kind, count.get<std::uint64_t>());
    if (!decisions.empty() && decisions.size() + decision.size() > kDecisionsWidth) add_decisions_line();
    decisions += (decisions.empty() ? "" : ", ") + decision;
  }
  if (!decisions.empty()) add_decisions_line();
  return out;
}

}  // namespace echoline::study
