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
  for (const auto& [age, n] : histogram) object[std::to_string(age)] = n;
  return object;
}

learner::WorkerEntry worker_entry(const sim::SimMachine& m) {
  learner::WorkerEntry w;
  w.id = WorkerId{m.worker};
  w.offer = m.offer;
  w.price_usd_per_hour = m.usd_per_hour;
  w.rollouts = m.rollouts;
  w.bytes_in = static_cast<std::uint64_t>(m.bytes_in);
  w.bytes_forwarded = static_cast<std::uint64_t>(m.bytes_forwarded);
  w.version = Version{m.version};
  if (m.lost) w.presence = learner::Presence::kLost;
  return w;
}

}  // namespace

std::vector<json> sim_run_metrics(const sim::RunResult& result) {
  std::vector<json> rows;
  for (const sim::SimPublication& p : result.publications) {
    rows.push_back({{"unix_s", p.at_s},
                    {"kind", "publication"},
                    {"version", p.version},
                    {"snapshot", p.snapshot && p.version == 0},
                    {"patch_bytes", p.bytes.count}});
    if (!p.t_b_s) continue;
    rows.push_back({{"unix_s", p.at_s + *p.t_b_s},
                    {"kind", "broadcast"},
                    {"version", p.version},
                    {"snapshot", p.snapshot && p.version == 0},
                    {"payload_bytes", p.bytes.count},
                    {"t_b_seconds", *p.t_b_s},
                    {"workers", p.workers},
                    {"acknowledged", p.installed},
                    {"depth", p.depth},
                    {"learner_bytes", p.learner_bytes.count},
                    {"lower_bound_seconds", p.lower_bound_s},
                    {"predicted_seconds", p.predicted_s}});
  }
  for (const sim::SimStep& s : result.by_step)
    rows.push_back({{"unix_s", s.at_s},
                    {"kind", "step"},
                    {"step", s.step},
                    {"staleness", age_histogram(s.staleness)},
                    {"wait_seconds", s.wait_s},
                    {"train_seconds", s.train_s},
                    {"step_seconds", s.wait_s + s.train_s},
                    {"response_tokens", s.tokens},
                    {"response_tokens_mean", s.tokens_mean},
                    {"workers", s.working},
                    {"workers_joining", s.joining},
                    {"rollouts_per_s_expected", s.rollouts_per_s},
                    {"rollouts_per_s_wanted", s.target_rollouts_per_s},
                    {"rollouts_waiting", s.waiting},
                    {"rollouts_in_flight", s.in_flight},
                    {"usd", s.usd},
                    {"usd_per_hour", s.usd_per_hour}});
  std::stable_sort(rows.begin(), rows.end(), [](const json& a, const json& b) {
    return a.at("unix_s").get<double>() < b.at("unix_s").get<double>();
  });
  return rows;
}

std::vector<json> thinned(std::vector<json> metrics, std::uint64_t steps) {
  if (metrics.size() <= kMetricRowsMax) return metrics;
  // A publication or broadcast is kept or removed together with the step it follows.
  const std::uint64_t every = std::max<std::uint64_t>(1, (3 * steps + kMetricRowsMax - 1) / (kMetricRowsMax - 10));
  std::erase_if(metrics, [&](const json& row) {
    const std::uint64_t n =
        row.contains("step") ? row.at("step").get<std::uint64_t>() : row.at("version").get<std::uint64_t>();
    return n != 0 && n % every != 0 && n != steps;
  });
  return metrics;
}

json sim_run_report(const SimRun& run, const sim::RunResult& r, const std::vector<json>& metrics) {
  learner::ReportInput input;
  input.config = &run.config;
  input.plan = &r.plan;
  input.figures = learner::run_figures(metrics);
  if (input.figures.snapshot.is_object()) input.figures.snapshot["state_bytes"] = run.scenario.request.full_bytes.count;
  std::size_t joined = 0;
  for (const sim::SimMachine& m : r.machines)
    if (m.worker != 0 && ++joined <= kWorkersListed) input.workers.push_back(worker_entry(m));
  input.fleet.planned = r.machines_planned;
  input.fleet.started = r.machines_started;
  input.fleet.lost = r.machines_lost;
  input.fleet.replaced = r.machines_replaced;
  input.fleet.usd = r.usd_fleet;
  input.fleet.prices_known = run.prices_known;
  input.wall_seconds = r.wall_s;
  if (run.scenario.request.learner_usd_per_hour) input.learner_usd = r.usd_learner;
  input.version = Version{r.version};
  input.bytes_sent = static_cast<std::uint64_t>(r.learner_bytes_sent);
  input.steps_done = r.steps;
  input.topology = r.topology;
  input.ended = r.ended;
  input.rejected = json::object();
  for (const auto& [reason, n] : r.rejected) input.rejected[reason] = n;
  input.limited_steps = r.work_limits;
  if (r.groups_set_aside > 0) input.groups_set_aside["worker lost"] = r.groups_set_aside;
  json report = learner::make_report(input);
  // A simulation trains no weights.
  for (const char* key : {"digest", "differing", "all_workers_identical", "workers", "acknowledged"})
    report["weights"][key] = nullptr;
  for (json& worker : report["workers"]) worker["digest"] = nullptr;

  std::uint64_t unfinished = 0;
  for (const auto& [reason, n] : r.unfinished) unfinished += n;
  json by_region = json::object();
  const bool lists_regions = run.scenario.regions.size() > 1 && run.scenario.regions.size() <= 64;
  for (const sim::SimMachine& m : r.machines) {
    if (!lists_regions) break;
    json& region = by_region[run.scenario.regions[m.region]];
    if (region.is_null()) region = {{"machines", 0}, {"rollouts", 0}, {"usd", 0.0}};
    region["machines"] = region["machines"].get<std::uint64_t>() + 1;
    region["rollouts"] = region["rollouts"].get<std::uint64_t>() + m.rollouts;
    region["usd"] = region["usd"].get<double>() + m.usd_per_hour * (m.paid_to_s - m.paid_from_s) / 3600 + m.usd_traffic;
  }
  std::map<std::uint64_t, std::uint64_t> handed_in = r.stale_by_age;  // by age, of rollouts trained on and rejected
  double too_stale = 0, all_ages = 0;
  for (const auto& [age, n] : r.stale_by_age) too_stale += static_cast<double>(n);
  for (const sim::SimStep& step : r.by_step)
    for (const auto& [age, n] : step.staleness) handed_in[age] += n;
  for (const auto& [age, n] : handed_in) all_ages += static_cast<double>(n);
  const auto share = [](double part, double of) { return of > 0 ? json(part / of) : json(nullptr); };
  double later_waits = 0, later_total = 0;  // the first step waits for the first policy
  for (const sim::SimStep& step : r.by_step)
    if (step.step > 1) later_waits += step.wait_s, later_total += step.wait_s + step.train_s;
  report["simulation"] = {
      {"seed", run.scenario.seed},
      {"parameters", run.parameters},
      {"delta_bytes_first", run.scenario.delta_bytes.front().count},
      {"begun_seconds", r.first_snapshot_s},
      {"idle_fraction_after_first_step", share(later_waits, later_total)},
      {"plan", r.plan_error.empty() ? json("as planned") : json(r.plan_error)},
      {"events", r.events},
      {"topologies_planned", r.topologies_planned},
      {"publications_merged", r.publications_merged},
      {"staleness",
       {{"in_flight", age_histogram(r.in_flight)},
        {"in_queue", age_histogram(r.in_queue)},
        {"handed_in", {{"p50", learner::quantile(handed_in, 0.5)}, {"p90", learner::quantile(handed_in, 0.9)}}},
        {"admissible_fraction", share(all_ages - too_stale, all_ages)}}},
      {"rollouts_unfinished", unfinished},
      {"rollouts_unfinished_by_reason", r.unfinished},
      {"tokens", {{"generated", r.tokens_generated}, {"trained", r.tokens_trained}}},
      {"fleet",
       {{"workers_most", r.workers_peak},
        {"machine_hours", r.machine_hours},
        {"busy_fraction", share(r.busy_s, r.present_s)},
        {"workers_left_out", joined - std::min(joined, kWorkersListed)}}},
      {"recovery",
       {{"count", r.recoveries_s.size()},
        {"seconds_median", learner::quantile(r.recoveries_s, 0.5)},
        {"seconds_p95", learner::quantile(r.recoveries_s, 0.95)},
        {"seconds_max", learner::quantile(r.recoveries_s, 1)}}},
      {"cost", {{"usd_rent", r.usd_rent}, {"usd_traffic", r.usd_traffic}}},
      {"regions", by_region},
      {"crossing_bytes_sent", static_cast<std::uint64_t>(r.crossing_bytes_sent)},
      {"decisions", r.decision_counts}};
  return report;
}

namespace {

std::string number(const json& value, const char* format) {
  return value.is_number() ? fmt::format(fmt::runtime(format), value.get<double>()) : "-";
}
std::string bytes(const json& value) {
  return value.is_number() ? to_text(Bytes{static_cast<std::uint64_t>(value.get<double>())}) : "-";
}
std::string duration(const json& value) { return value.is_number() ? to_text(from_seconds(value.get<double>())) : "-"; }
std::string percent(const json& value) {
  return value.is_number() ? fmt::format("{:.1f} %", 100 * value.get<double>()) : "-";
}

std::string histogram(const json& ages) {
  std::vector<std::pair<std::uint64_t, double>> sorted;
  double total = 0;
  for (const auto& [age, n] : ages.items())
    sorted.emplace_back(std::stoull(age), n.get<double>()), total += n.get<double>();
  std::sort(sorted.begin(), sorted.end());
  std::string text;
  std::size_t shown = 0;
  for (const auto& [age, n] : sorted)
    if (shown++ < 5)
      text += fmt::format("{}{}: {:.0f} %", text.empty() ? "" : "  ", age, 100 * n / std::max(total, 1e-12));
  return text.empty() ? "-" : text + (sorted.size() > 5 ? "  .." : "");
}

}  // namespace

std::string sim_run_table(const json& r) {
  const json &learner = r.at("learner"), &staleness = r.at("staleness"), &broadcast = r.at("broadcast"),
             &fleet = r.at("fleet"), &cost = r.at("cost"), &plan = r.at("plan"), &simulation = r.at("simulation");
  std::string out;
  const auto line = [&](std::string_view label, const std::string& text) {
    out += fmt::format("{:<13}{}\n", label, text);
  };
  out += fmt::format("{}: {} of {} steps in {} ({}), simulated\n", r.at("run").get<std::string>(),
                     r.at("steps").get<std::uint64_t>(), r.at("steps_planned").get<std::uint64_t>(),
                     duration(r.at("wall_seconds")), r.at("ended").get<std::string>());
  line("learner", fmt::format("idle {}, {} after the first step", percent(learner.at("idle_fraction")),
                              percent(simulation.at("idle_fraction_after_first_step"))));
  line("", fmt::format("step {}, training {}", duration(learner.at("step_seconds_median")),
                       duration(learner.at("train_seconds_median"))));
  line("cost", fmt::format("${} ({} fleet, {} learner)", number(cost.at("usd_total"), "{:.2f}"),
                           number(cost.at("usd_fleet"), "{:.2f}"), number(cost.at("usd_learner"), "{:.2f}")));
  line("", fmt::format("rent ${}, traffic ${}", number(simulation.at("cost").at("usd_rent"), "{:.2f}"),
                       number(simulation.at("cost").at("usd_traffic"), "{:.2f}")));
  line("", fmt::format("${} per 1000 rollouts, plan ${}/h", number(cost.at("usd_per_1k_rollouts"), "{:.4f}"),
                       number(cost.at("plan_usd_per_hour"), "{:.2f}")));
  line("fleet", fmt::format("planned {}, started {}, at most {}", fleet.at("workers_planned").get<std::uint64_t>(),
                            fleet.at("workers_started").get<std::uint64_t>(),
                            simulation.at("fleet").at("workers_most").get<std::uint64_t>()));
  line("", fmt::format("lost {}, replaced {}; busy {}", fleet.at("workers_lost").get<std::uint64_t>(),
                       fleet.at("workers_replaced").get<std::uint64_t>(),
                       percent(simulation.at("fleet").at("busy_fraction"))));
  if (simulation.at("recovery").at("count").get<std::uint64_t>() > 0)
    line("recovery",
         fmt::format("{} times; median {}, p95 {}", simulation.at("recovery").at("count").get<std::uint64_t>(),
                     duration(simulation.at("recovery").at("seconds_median")),
                     duration(simulation.at("recovery").at("seconds_p95"))));
  line("rollouts/s", fmt::format("needed {}, rented {}, trained {}", number(plan.at("target_rollouts_per_s"), "{:.4g}"),
                                 number(plan.at("provisioned_rollouts_per_s"), "{:.4g}"),
                                 number(plan.at("measured_rollouts_per_s"), "{:.4g}")));
  line("staleness", fmt::format("mean {}, p95 {}, max {} of {}", number(staleness.at("mean"), "{:.2f}"),
                                number(staleness.at("p95"), "{:.0f}"), number(staleness.at("max"), "{:.0f}"),
                                staleness.at("budget").get<std::uint64_t>()));
  if (const std::string bound = learner::bound_text(staleness); !bound.empty()) line("", bound);
  line("  in flight", histogram(simulation.at("staleness").at("in_flight")));
  line("  in queue", histogram(simulation.at("staleness").at("in_queue")));
  line("discarded", fmt::format("{} too late, {} never finished", staleness.at("rejected").get<std::uint64_t>(),
                                simulation.at("rollouts_unfinished").get<std::uint64_t>()));
  line("broadcast", fmt::format("{}, delta {}, full {}", broadcast.at("publications").get<std::uint64_t>(),
                                bytes(broadcast.at("delta_bytes_mean")), bytes(broadcast.at("full_bytes"))));
  line("", fmt::format("T_b {}, p95 {}; bound {}", duration(broadcast.at("t_b_seconds_median")),
                       duration(broadcast.at("t_b_seconds_p95")), duration(broadcast.at("lower_bound_seconds"))));
  line("", fmt::format("the learner sent {}", bytes(broadcast.at("learner_bytes_sent"))));
  if (simulation.at("crossing_bytes_sent").get<std::uint64_t>() > 0)
    line("", fmt::format("{} sent between regions", bytes(simulation.at("crossing_bytes_sent"))));
  for (const auto& [name, region] : simulation.at("regions").items())
    line("  " + name.substr(0, 10),
         fmt::format("{} machines, {} rollouts, ${:.2f}", region.at("machines").get<std::uint64_t>(),
                     region.at("rollouts").get<std::uint64_t>(), region.at("usd").get<double>()));
  std::string decisions;
  for (const auto& [kind, n] : simulation.at("decisions").items()) {
    const std::string decision = fmt::format("{} {}", kind, n.get<std::uint64_t>());
    if (!decisions.empty() && decisions.size() + decision.size() > 44)
      line(out.find("decisions") == std::string::npos ? "decisions" : "", std::exchange(decisions, ""));
    decisions += (decisions.empty() ? "" : ", ") + decision;
  }
  if (!decisions.empty()) line(out.find("decisions") == std::string::npos ? "decisions" : "", decisions);
  return out;
}

}  // namespace echoline::study
