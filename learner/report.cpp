// Makes report.json, and its text for `echoline report`.
#include "learner/report.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "learner/run_record.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;

json json_or_null(const std::optional<double>& figure) { return figure ? json(*figure) : json(nullptr); }
// A figure's step and its value; the report has the value only.
json json_or_null(const std::optional<std::pair<std::uint64_t, double>>& figure) {
  return figure ? json(figure->second) : json(nullptr);
}
json first_and_last(const MetricSummary& figure) {
  return {{"first", json_or_null(figure.first)}, {"last", json_or_null(figure.last)}};
}
// The last value of a count, which the summary holds as a double.
json last_count(const MetricSummary& figure) {
  return figure.last ? json(static_cast<std::uint64_t>(figure.last->second)) : json(nullptr);
}

// Splits the median T_b (broadcast time: from publishing a version until the quorum has acknowledged it) by each part's
// mean share, so that the parts add up to the median.
json t_b_parts_json(const RunFigures& figures) {
  if (figures.broadcasts_with_parts == 0) return nullptr;
  const double median = *figures.t_b.quantile(0.5);  // exists: broadcasts with parts have a T_b
  json parts;
  for (const auto& [part, share] : figures.part_share_sums)
    parts[part] = share / static_cast<double>(figures.broadcasts_with_parts) * median;
  return parts;
}

json staleness_json(const ReportInput& input) {
  const replay_buffer::StalenessSettings& settings = input.config->staleness;
  const json& rejected = input.rejected;
  const std::map<std::uint64_t, std::uint64_t>& histogram = input.figures.staleness;  // staleness -> trajectories
  std::uint64_t trajectories = 0;
  double staleness_sum = 0;
  for (const auto& [staleness, count] : histogram) {
    trajectories += count;
    staleness_sum += static_cast<double>(staleness) * static_cast<double>(count);
  }
  std::uint64_t rejections = 0;
  for (const auto& [reason, count] : rejected.items()) rejections += count.get<std::uint64_t>();
  return {{"budget", settings.budget},
          {"publish_every", settings.publish_every},
          {"lookahead", settings.lookahead_steps()},
          // Steps in which a worker got less work than it could take, because the staleness budget, or the lookahead
          // (the batches generated ahead of the learner), permitted no more.
          {"steps_bound_by_budget", input.limited_steps.count(replay_buffer::Bound::kBudget)},
          {"steps_bound_by_lookahead", input.limited_steps.count(replay_buffer::Bound::kLookahead)},
          {"mean", trajectories ? json(staleness_sum / static_cast<double>(trajectories)) : json(nullptr)},
          {"p50", quantile(histogram, 0.5)},
          {"p90", quantile(histogram, 0.9)},
          {"p95", quantile(histogram, 0.95)},
          {"max", histogram.empty() ? json(nullptr) : json(histogram.rbegin()->first)},
          {"rejected", rejections},
          {"rejected_by_reason", rejected}};
}

// 0: not measured.
json bytes_or_null(std::uint64_t bytes) { return bytes > 0 ? json(bytes) : json(nullptr); }

json memory_json(const ReportInput& input) {
  std::uint64_t largest_worker_bytes = 0;  // by the last reports; the learner's maximum is over the whole run
  for (const WorkerEntry& worker : input.workers)
    largest_worker_bytes = std::max(largest_worker_bytes, worker.memory_bytes);
  return {{"learner_bytes", bytes_or_null(input.memory.resident.count)},
          {"learner_bytes_max", bytes_or_null(input.memory.resident_max.count)},
          {"worker_bytes_max", bytes_or_null(largest_worker_bytes)}};
}

json worker_json(const WorkerEntry& worker) {
  return {{"id", worker.id.value},
          {"offer", worker.offer},
          {"region", worker.region_name.empty() ? json(nullptr) : json(worker.region_name)},
          {"price_usd_per_hour", worker.price_usd_per_hour ? json(*worker.price_usd_per_hour) : json(nullptr)},
          {"rollouts", worker.rollouts},
          {"bytes_in", worker.bytes_in},
          {"bytes_forwarded", worker.bytes_forwarded},
          {"install_seconds_mean", worker.install_seconds_mean ? json(*worker.install_seconds_mean) : json(nullptr)},
          {"memory_bytes", bytes_or_null(worker.memory_bytes)},
          {"version", worker.version ? json(worker.version->value) : json(nullptr)},
          {"digest", worker.version ? json(overlay::to_hex(worker.digest)) : json(nullptr)},
          {"away", worker.presence == Presence::kAway},
          {"lost", worker.presence == Presence::kLost}};
}

json regrading_json(const RegradingCounts& counts) {
  json expelled = json::array();
  for (const auto& [worker, reason] : counts.expelled)
    expelled.push_back({{"worker", worker.value}, {"reason", reason}});
  return {
      {"responses", counts.responses},
      {"graded", counts.graded},
      {"share", counts.responses > 0 ? json(static_cast<double>(counts.graded) / static_cast<double>(counts.responses))
                                     : json(nullptr)},
      {"seconds", counts.seconds},
      {"different", counts.different},
      {"unsettled", counts.unsettled},
      {"late", counts.late},
      {"impossible", counts.impossible},
      {"left_out", counts.left_out},
      {"expelled", std::move(expelled)}};
}

json learning_json(const RunFigures& figures) {
  std::uint64_t alarms_begun = 0;
  for (const auto& [kind, times] : figures.alarms) alarms_begun += times;
  return {{"entropy", first_and_last(figures.entropy)},
          {"response_tokens_mean", first_and_last(figures.response_tokens_mean)},
          {"effective_sample_fraction_mean", json_or_null(figures.effective.totals.mean())},
          {"gradient_norm_max", json_or_null(figures.gradient_norm.totals.max())},
          {"zero_advantage_fraction_mean", json_or_null(figures.zero_advantage.totals.mean())},
          {"clip_fraction_mean", json_or_null(figures.clip.totals.mean())},
          {"behaviour_kl_mean", json_or_null(figures.behaviour_kl.totals.mean())},
          {"reference_kl_last", json_or_null(figures.reference_kl.last)},
          // Null if no step reported the figures that alarms watch. The effective sample fraction is one of them.
          {"alarms_begun", figures.effective.last ? json(alarms_begun) : json(nullptr)},
          {"alarms", figures.alarms}};
}

}  // namespace

json quantile(std::vector<double> values, double q) {
  if (values.empty()) return nullptr;
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(q * static_cast<double>(values.size()));  // counted from 1
  const auto index = static_cast<std::size_t>(std::max(0.0, rank - 1));
  return values[std::min(values.size() - 1, index)];
}

json quantile(const std::map<std::uint64_t, std::uint64_t>& histogram, double q) {
  std::uint64_t count = 0, cumulative = 0;
  for (const auto& [value, count_of_value] : histogram) count += count_of_value;
  for (const auto& [value, count_of_value] : histogram) {
    cumulative += count_of_value;
    if (count_of_value > 0 && static_cast<double>(cumulative) >= q * static_cast<double>(count)) return value;
  }
  return nullptr;
}

json worker_status(const WorkerEntry& worker, std::optional<double> rollouts_per_s,
                   std::optional<double> rollouts_per_s_expected, bool receives_from_learner) {
  return {{"id", worker.id.value},
          {"offer", worker.offer},
          {"rollouts", worker.rollouts},
          {"rollouts_per_s", json_or_null(rollouts_per_s)},
          {"rollouts_per_s_expected", json_or_null(rollouts_per_s_expected)},
          {"version", worker.version ? json(worker.version->value) : json(nullptr)},
          {"bytes_in", worker.bytes_in},
          {"bytes_forwarded", worker.bytes_forwarded},
          {"memory_bytes", bytes_or_null(worker.memory_bytes)},
          {"heap_bytes", bytes_or_null(worker.heap_bytes)},
          {"seed", receives_from_learner},
          {"quarantined", worker.quarantined},
          {"troubles", worker.trouble_events},
          {"away", worker.presence == Presence::kAway},
          {"lost", worker.presence == Presence::kLost}};
}

json make_report(const ReportInput& input) {
  const RunConfig& config = *input.config;
  const provisioner::Plan& plan = *input.plan;
  const RunFigures& figures = input.figures;
  const json delta_bytes_mean = json_or_null(figures.patch_bytes.mean());
  const json full_bytes = figures.snapshot.is_object() ? figures.snapshot.at("state_bytes") : json(nullptr);
  const double step_seconds_sum = figures.step_seconds.totals().sum();
  const double rollouts = static_cast<double>(figures.steps * config.rollout.trajectories_per_step());
  const auto rate_of = [&](double seconds) { return seconds > 0 ? json(rollouts / seconds) : json(nullptr); };

  std::uint64_t present_count = 0, acknowledged = 0;
  json differing = json::array();  // workers that acknowledged the last version with another digest
  for (const WorkerEntry& worker : input.workers) {
    if (worker.presence != Presence::kPresent) continue;
    ++present_count;
    if (worker.version != input.version) continue;
    ++acknowledged;
    if (worker.digest != input.digest) differing.push_back(worker.id.value);
  }
  json workers = json::array();
  for (const WorkerEntry& worker : input.workers) workers.push_back(worker_json(worker));

  json report;
  report["schema_version"] = kReportSchemaVersion;
  report["run"] = config.run.name;
  report["ended"] = input.end_reason;
  report["seed"] = config.run.seed;
  report["steps"] = input.steps_done;
  report["steps_planned"] = config.run.steps;
  report["wall_seconds"] = input.wall_seconds;
  report["settings_changed"] = figures.settings_changed;
  report["reward"] = first_and_last(figures.reward);
  const auto accuracy = [](const json& row) { return row.is_object() ? row.at("accuracy") : json(nullptr); };
  report["eval"] = {{"before", accuracy(figures.eval_before)},
                    {"after", accuracy(figures.eval_after)},
                    {"problems", figures.eval_before.is_object() ? figures.eval_before.at("problems") : json(nullptr)},
                    {"by_step", json::array()}};
  for (const auto& [step, row] : figures.evaluations.rows()) report["eval"]["by_step"].push_back(row);
  for (const auto& task : config.task.listed_tasks) {
    const auto figure_of = [&](const json& row, const char* figure) {
      const json by_task = row.is_object() ? row.value("by_task", json::object()) : json::object();
      return by_task.contains(task.name) ? by_task.at(task.name).at(figure) : json(nullptr);
    };
    report["eval"]["by_task"][task.name] = {{"before", figure_of(figures.eval_before, "accuracy")},
                                            {"after", figure_of(figures.eval_after, "accuracy")},
                                            {"problems", figure_of(figures.eval_before, "problems")}};
    const auto task_entry = figures.by_task.find(task.name);
    const RunFigures::TaskSeries series =
        task_entry == figures.by_task.end() ? RunFigures::TaskSeries{} : task_entry->second;
    json reward = first_and_last(series.reward);
    reward["responses"] = series.responses;
    report["reward"]["by_task"][task.name] = std::move(reward);
  }
  if (figures.warm_start.is_object())
    report["warm_start"] = {{"steps", figures.warm_start.at("steps")}, {"seconds", figures.warm_start.at("seconds")}};
  report["learner"] = {
      {"step_seconds_median", json_or_null(figures.step_seconds.quantile(0.5))},
      {"train_seconds_median", json_or_null(figures.train_seconds.quantile(0.5))},
      {"publish_seconds_median", json_or_null(figures.publish_seconds.quantile(0.5))},
      {"idle_fraction", step_seconds_sum > 0 ? json(figures.wait_seconds.sum() / step_seconds_sum) : json(nullptr)}};
  report["learning"] = learning_json(figures);
  report["staleness"] = staleness_json(input);
  std::uint64_t groups_set_aside = 0;  // problems whose groups no worker could generate; they are not tried again
  for (const auto& [reason, groups] : input.groups_set_aside) groups_set_aside += groups;
  report["groups_set_aside"] = {{"count", groups_set_aside}, {"by_reason", input.groups_set_aside}};
  report["regrading"] = regrading_json(input.regrading);
  report["scoring"] = {{"responses", input.scoring.responses},
                       {"failed_groups", input.scoring.failed_groups},
                       {"seconds", input.scoring.seconds}};
  report["broadcast"] = {
      {"publications", figures.deltas + (figures.snapshot.is_object() ? 1 : 0)},
      {"full_bytes", full_bytes},
      {"snapshot_bytes", figures.snapshot.is_object() ? figures.snapshot.at("patch_bytes") : json(nullptr)},
      {"delta_bytes_mean", delta_bytes_mean},
      {"compression_ratio", delta_bytes_mean.is_number() && full_bytes.is_number() && delta_bytes_mean.get<double>() > 0
                                ? json(full_bytes.get<double>() / delta_bytes_mean.get<double>())
                                : json(nullptr)},
      {"density_mean", json_or_null(figures.changed_fraction.mean())},
      {"density_deviation", json_or_null(figures.changed_fraction.deviation())},
      {"density_min", json_or_null(figures.changed_fraction.min())},
      {"density_max", json_or_null(figures.changed_fraction.max())},
      {"t_b_seconds_median", json_or_null(figures.t_b.quantile(0.5))},
      {"t_b_seconds_p95", json_or_null(figures.t_b.quantile(0.95))},
      {"t_b_parts", t_b_parts_json(figures)},
      {"workers", last_count(figures.workers)},
      {"acknowledged", last_count(figures.acknowledged)},
      {"lower_bound_seconds", json_or_null(figures.lower_bound.quantile(0.5))},
      {"predicted_seconds", json_or_null(figures.predicted.quantile(0.5))},
      {"learner_bytes_sent", input.bytes_sent},
      {"topology", input.topology}};
  report["fleet"] = {{"workers_planned", input.fleet.planned},
                     {"workers_started", input.fleet.started},
                     {"workers_lost", input.fleet.lost},
                     {"workers_replaced", input.fleet.replaced},
                     {"unreturned", input.fleet.unreturned}};
  report["workers"] = workers;
  report["nodes"] = input.nodes;
  report["memory"] = memory_json(input);
  report["weights"] = {
      {"version", input.version.value},
      {"digest", overlay::to_hex(input.digest)},
      {"workers", present_count},
      {"acknowledged", acknowledged},
      {"differing", differing},
      {"all_workers_identical", present_count > 0 && acknowledged == present_count && differing.empty()}};
  report["cost"] = {{"usd_total", input.fleet.usd + input.learner_usd.value_or(0)},
                    {"usd_learner", input.learner_usd ? json(*input.learner_usd) : json(nullptr)},
                    {"usd_fleet", input.fleet.usd},
                    {"prices_known", input.fleet.prices_known && input.learner_usd},
                    {"usd_per_1k_rollouts", rollouts > 0 ? json(1000 * input.fleet.usd / rollouts) : json(nullptr)},
                    {"plan_usd_per_hour", plan.usd_per_hour.expected}};
  report["plan"] = {{"target_rollouts_per_s", plan.target.required_rollouts_per_s},
                    {"provisioned_rollouts_per_s", plan.rollouts_per_s},
                    {"measured_rollouts_per_s", rate_of(step_seconds_sum)},
                    {"broadcast_seconds", seconds(plan.broadcast_time)},
                    {"staleness_worst", plan.staleness_worst}};
  return report;
}

namespace {

std::string number_text(const json& value, const char* format_spec) {
  if (!value.is_number()) return "-";
  return fmt::format(fmt::runtime(format_spec), value.get<double>());
}

std::string bytes_text(const json& value) {
  return value.is_number() ? to_text(Bytes{static_cast<std::uint64_t>(value.get<double>())}) : "-";
}

// ", of 8 of 9 workers"; empty if all workers had acknowledged when T_b ended.
std::string acknowledged_text(const json& broadcast) {
  const json workers = broadcast.value("workers", json()), acknowledged = broadcast.value("acknowledged", json());
  if (!workers.is_number() || !acknowledged.is_number() || acknowledged >= workers) return "";
  return fmt::format(", of {} of {} workers", number_text(acknowledged, "{:.0f}"), number_text(workers, "{:.0f}"));
}

// Shows whether the workers have the learner's policy. A missing acknowledgement is harmless; a different digest of the
// same version is not.
std::string weights_text(const json& weights) {
  const auto version = weights.at("version").get<std::uint64_t>();
  const auto workers = weights.at("workers").get<std::uint64_t>();
  const auto acknowledged = weights.value("acknowledged", std::uint64_t{0});
  const json differing = weights.value("differing", json::array());
  std::string text = fmt::format("version {}, digest {}; ", version, weights.at("digest").get<std::string>());
  if (!differing.empty())
    return text + fmt::format("NOT IDENTICAL: {} of {} workers acknowledged v{} with another digest (workers {})",
                              differing.size(), workers, version, differing.dump());
  if (workers == 0) return text + "no worker was there at the end";
  if (weights.at("all_workers_identical").get<bool>())
    return text + fmt::format("{} worker{} bit-identical", workers, workers == 1 ? "" : "s");
  return text + fmt::format("{} of {} workers acknowledged v{}", acknowledged, workers, version);
}

}  // namespace

// S is the staleness budget.
std::string bound_text(const json& staleness) {
  const auto by_budget = staleness.value("steps_bound_by_budget", std::uint64_t{0});
  const auto by_lookahead = staleness.value("steps_bound_by_lookahead", std::uint64_t{0});
  std::string text;
  if (by_budget > 0) text = fmt::format("S bound in {} steps", by_budget);
  if (by_lookahead > 0)
    text += fmt::format("{}the lookahead of {} {}in {}{}", text.empty() ? "" : ", ", staleness.value("lookahead", 0),
                        text.empty() ? "bound " : "", by_lookahead, text.empty() ? " steps" : "");
  return text;
}

std::string report_text(const json& report) {
  std::string out;
  const auto add_line = [&](std::string_view label, const std::string& text) {
    out += fmt::format("  {:<12}{}\n", label, text);
  };
  const json &eval = report.at("eval"), &learner = report.at("learner"), &staleness = report.at("staleness"),
             &broadcast = report.at("broadcast");
  const json &fleet = report.at("fleet"), &weights = report.at("weights"), &cost = report.at("cost"),
             &plan = report.at("plan");
  out += fmt::format("{}: {} of {} steps in {} s ({})\n", report.at("run").get<std::string>(),
                     report.at("steps").get<std::uint64_t>(), report.at("steps_planned").get<std::uint64_t>(),
                     number_text(report.at("wall_seconds"), "{:.0f}"), report.at("ended").get<std::string>());
  for (const json& change : report.value("settings_changed", json::array())) {
    const auto value = [&](const char* which) {
      return change.at(which).is_string() ? change.at(which).get<std::string>() : std::string("not given");
    };
    add_line("changed", fmt::format("{}: {} -> {}, from step {} on", change.at("key").get<std::string>(), value("old"),
                                    value("new"), change.at("step").get<std::uint64_t>()));
  }
  add_line("accuracy",
           fmt::format("{} -> {} on {} held-out problems;  reward {} -> {}", number_text(eval.at("before"), "{:.3f}"),
                       number_text(eval.at("after"), "{:.3f}"), number_text(eval.at("problems"), "{:.0f}"),
                       number_text(report.at("reward").at("first"), "{:.3f}"),
                       number_text(report.at("reward").at("last"), "{:.3f}")));
  if (eval.contains("by_task"))
    for (const auto& [task, task_eval] : eval.at("by_task").items()) {
      const json& reward = report.at("reward").at("by_task").at(task);
      add_line("",
               fmt::format("{}: {} -> {} on {};  reward {} -> {} in {} responses", task,
                           number_text(task_eval.at("before"), "{:.3f}"), number_text(task_eval.at("after"), "{:.3f}"),
                           number_text(task_eval.at("problems"), "{:.0f}"), number_text(reward.at("first"), "{:.3f}"),
                           number_text(reward.at("last"), "{:.3f}"), number_text(reward.at("responses"), "{:.0f}")));
    }
  add_line("learner", fmt::format("step {} s (training {} s), idle {} of the time",
                                  number_text(learner.at("step_seconds_median"), "{:.2f}"),
                                  number_text(learner.at("train_seconds_median"), "{:.2f}"),
                                  number_text(learner.at("idle_fraction"), "{:.3f}")));
  if (const json& learning = report.value("learning", json::object());
      !learning.value("alarms", json::object()).empty())
    add_line("alarms", fmt::format("{}; see events.jsonl for times and advice", learning.at("alarms").dump()));
  add_line(
      "staleness",
      fmt::format("mean {}, p95 {}, max {} of budget {};  rejected {} {}", number_text(staleness.at("mean"), "{:.2f}"),
                  number_text(staleness.at("p95"), "{:.0f}"), number_text(staleness.at("max"), "{:.0f}"),
                  staleness.at("budget").get<int>(), staleness.at("rejected").get<std::uint64_t>(),
                  staleness.at("rejected_by_reason").empty() ? "" : staleness.at("rejected_by_reason").dump()));
  if (const std::string limits = bound_text(staleness); !limits.empty()) add_line("", limits);
  if (const json& set_aside = report.value("groups_set_aside", json::object()); set_aside.value("count", 0) > 0)
    add_line("set aside", fmt::format("{} groups that could not be generated {}",
                                      set_aside.at("count").get<std::uint64_t>(), set_aside.at("by_reason").dump()));
  if (const json& regrading = report.value("regrading", json::object()); regrading.value("responses", 0) > 0) {
    add_line("regraded",
             fmt::format("{} of {} responses ({:.1f} %) in {:.1f} s; {} differed, {} unsettled, {} late, {} impossible",
                         regrading.at("graded").get<std::uint64_t>(), regrading.at("responses").get<std::uint64_t>(),
                         100 * regrading.at("share").get<double>(), regrading.at("seconds").get<double>(),
                         regrading.at("different").get<std::uint64_t>(), regrading.at("unsettled").get<std::uint64_t>(),
                         regrading.at("late").get<std::uint64_t>(), regrading.at("impossible").get<std::uint64_t>()));
    for (const json& expelled : regrading.at("expelled"))
      add_line("", fmt::format("worker {} expelled: {}", expelled.at("worker").get<std::uint64_t>(),
                               expelled.at("reason").get<std::string>()));
  }
  if (const json& scoring = report.value("scoring", json::object());
      scoring.value("responses", 0) + scoring.value("failed_groups", 0) > 0)
    add_line("scored here",
             fmt::format("{} responses in {:.1f} s; {} groups failed", scoring.at("responses").get<std::uint64_t>(),
                         scoring.at("seconds").get<double>(), scoring.at("failed_groups").get<std::uint64_t>()));
  add_line("broadcast",
           fmt::format("{} publications; full {}, delta {} on average ({}x smaller)",
                       broadcast.at("publications").get<std::uint64_t>(), bytes_text(broadcast.at("full_bytes")),
                       bytes_text(broadcast.at("delta_bytes_mean")),
                       number_text(broadcast.at("compression_ratio"), "{:.1f}")));
  add_line("", fmt::format("T_b {} s (p95 {} s){}; lower bound {} s, formula {} s; learner sent {}",
                           number_text(broadcast.at("t_b_seconds_median"), "{:.3f}"),
                           number_text(broadcast.at("t_b_seconds_p95"), "{:.3f}"), acknowledged_text(broadcast),
                           number_text(broadcast.at("lower_bound_seconds"), "{:.3f}"),
                           number_text(broadcast.at("predicted_seconds"), "{:.3f}"),
                           bytes_text(broadcast.at("learner_bytes_sent"))));
  if (const json& parts = broadcast.value("t_b_parts", json()); parts.is_object()) {
    std::string text;
    for (const char* part : {"encode", "seal", "send", "verify", "install", "acknowledge"})
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", part, number_text(parts.value(part, json()), "{:.3f}"));
    add_line("", fmt::format("of T_b: {} s", text));
  }
  add_line("", broadcast.at("topology").get<std::string>());
  if (const json& memory = report.value("memory", json::object());
      memory.value("learner_bytes_max", json()).is_number())
    add_line("memory", fmt::format("learner {} at most, a worker {}", bytes_text(memory.at("learner_bytes_max")),
                                   bytes_text(memory.at("worker_bytes_max"))));
  add_line("fleet", fmt::format("planned {}, started {}, lost {}, replaced {}", fleet.at("workers_planned").get<int>(),
                                fleet.at("workers_started").get<int>(), fleet.at("workers_lost").get<int>(),
                                fleet.at("workers_replaced").get<int>()));
  for (const json& what : fleet.value("unreturned", json::array()))
    add_line("", "MAY STILL BE RENTED: " + what.get<std::string>());
  add_line("rollouts/s", fmt::format("target {}, provisioned {}, measured {}",
                                     number_text(plan.at("target_rollouts_per_s"), "{:.1f}"),
                                     number_text(plan.at("provisioned_rollouts_per_s"), "{:.1f}"),
                                     number_text(plan.at("measured_rollouts_per_s"), "{:.1f}")));
  add_line("weights", weights_text(weights));
  add_line("cost", fmt::format("${}{} in all, ${} per 1000 rollouts, fleet ${} per hour",
                               number_text(cost.at("usd_total"), "{:.4f}"),
                               cost.at("prices_known").get<bool>() ? "" : " and what is not stated",
                               number_text(cost.at("usd_per_1k_rollouts"), "{:.5f}"),
                               number_text(cost.at("plan_usd_per_hour"), "{:.3f}")));
  out += fmt::format("\n  {:>6}  {:<22}{:>8}{:>10}{:>10}{:>11}{:>9}\n", "worker", "offer", "$/h", "rollouts", "in",
                     "forwarded", "version");
  for (const json& worker : report.at("workers"))
    out += fmt::format("  {:>6}  {:<22}{:>8}{:>10}{:>10}{:>11}{:>9}{}\n", worker.at("id").get<std::uint64_t>(),
                       worker.at("offer").get<std::string>(), number_text(worker.at("price_usd_per_hour"), "{:.3f}"),
                       worker.at("rollouts").get<std::uint64_t>(), bytes_text(worker.at("bytes_in")),
                       bytes_text(worker.at("bytes_forwarded")),
                       worker.at("version").is_null() ? "-" : std::to_string(worker.at("version").get<std::uint64_t>()),
                       worker.at("lost").get<bool>() ? "  lost" : "");
  for (const json& node : report.value("nodes", json::array()))
    out += fmt::format("  {:>6}  {:<22}{:>8}{:>10}{:>10}{:>11}{:>9}\n", node.at("node").get<std::uint64_t>(),
                       node.at("name").get<std::string>(), "-", "-", bytes_text(node.at("bytes_in")),
                       bytes_text(node.at("bytes_forwarded")), node.at("version").get<std::uint64_t>());
  return out;
}

}  // namespace echoline::learner
