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
json first_and_last(const Figure& figure) {
  return {{"first", json_or_null(figure.first)}, {"last", json_or_null(figure.last)}};
}
json count(const Figure& figure) {
  return figure.last ? json(static_cast<std::uint64_t>(figure.last->second)) : json(nullptr);
}

// Splits the median T_b (broadcast time: from publishing a version until the quorum has acknowledged it) by each part's
// mean share, so that the parts add up to the median.
json t_b_parts_json(const RunFigures& figures) {
  if (figures.broadcasts_with_parts == 0) return nullptr;
  const double median = *figures.t_b.quantile(0.5);
  json parts;
  for (const auto& [part, share] : figures.part_share_sums)
    parts[part] = share / static_cast<double>(figures.broadcasts_with_parts) * median;
  return parts;
}

json staleness_json(const ReportInput& input) {
  const replay_buffer::StalenessSettings& settings = input.config->staleness;
  const json& rejected = input.rejected;
  const std::map<std::uint64_t, std::uint64_t>& histogram = input.figures.staleness;
  std::uint64_t count = 0;
  double total = 0;
  for (const auto& [age, n] : histogram) {
    count += n;
    total += static_cast<double>(age) * static_cast<double>(n);
  }
  std::uint64_t rejections = 0;
  for (const auto& [reason, n] : rejected.items()) rejections += n.get<std::uint64_t>();
  return {{"budget", settings.budget},
          {"publish_every", settings.publish_every},
          {"lookahead", settings.lookahead_steps()},
          {"steps_bound_by_budget", input.limited_steps.count(replay_buffer::Bound::kBudget)},
          {"steps_bound_by_lookahead", input.limited_steps.count(replay_buffer::Bound::kLookahead)},
          {"mean", count ? json(total / static_cast<double>(count)) : json(nullptr)},
          {"p50", quantile(histogram, 0.5)},
          {"p90", quantile(histogram, 0.9)},
          {"p95", quantile(histogram, 0.95)},
          {"max", histogram.empty() ? json(nullptr) : json(histogram.rbegin()->first)},
          {"rejected", rejections},
          {"rejected_by_reason", rejected}};
}

json bytes_or_null(std::uint64_t bytes) { return bytes > 0 ? json(bytes) : json(nullptr); }

json memory_json(const ReportInput& input) {
  std::uint64_t worker = 0;
  for (const WorkerEntry& w : input.workers) worker = std::max(worker, w.memory_bytes);
  return {{"learner_bytes", bytes_or_null(input.memory.resident.count)},
          {"learner_bytes_max", bytes_or_null(input.memory.resident_max.count)},
          {"worker_bytes_max", bytes_or_null(worker)}};
}

json worker_json(const WorkerEntry& w) {
  return {{"id", w.id.value},
          {"offer", w.offer},
          {"region", w.region_name.empty() ? json(nullptr) : json(w.region_name)},
          {"price_usd_per_hour", w.price_usd_per_hour ? json(*w.price_usd_per_hour) : json(nullptr)},
          {"rollouts", w.rollouts},
          {"bytes_in", w.bytes_in},
          {"bytes_forwarded", w.bytes_forwarded},
          {"install_seconds_mean", w.install_seconds_mean ? json(*w.install_seconds_mean) : json(nullptr)},
          {"memory_bytes", bytes_or_null(w.memory_bytes)},
          {"version", w.version ? json(w.version->value) : json(nullptr)},
          {"digest", w.version ? json(overlay::to_hex(w.digest)) : json(nullptr)},
          {"away", w.presence == Presence::kAway},
          {"lost", w.presence == Presence::kLost}};
}

json regrading_json(const RegradingCounts& c) {
  json expelled = json::array();
  for (const auto& [worker, reason] : c.expelled) expelled.push_back({{"worker", worker.value}, {"reason", reason}});
  return {{"responses", c.responses},
          {"graded", c.graded},
          {"share",
           c.responses > 0 ? json(static_cast<double>(c.graded) / static_cast<double>(c.responses)) : json(nullptr)},
          {"seconds", c.seconds},
          {"different", c.differences},
          {"unsettled", c.undecided},
          {"late", c.explained_by_timeout},
          {"impossible", c.task_failures},
          {"left_out", c.queue_overflows},
          {"expelled", std::move(expelled)}};
}

json learning_json(const RunFigures& f) {
  std::uint64_t alarms_begun = 0;
  for (const auto& [kind, times] : f.alarms) alarms_begun += times;
  return {{"entropy", first_and_last(f.entropy)},
          {"response_tokens_mean", first_and_last(f.response_tokens_mean)},
          {"effective_sample_fraction_mean", json_or_null(f.effective.totals.mean())},
          {"gradient_norm_max", json_or_null(f.gradient_norm.totals.max())},
          {"zero_advantage_fraction_mean", json_or_null(f.zero_advantage.totals.mean())},
          {"clip_fraction_mean", json_or_null(f.clip.totals.mean())},
          {"behaviour_kl_mean", json_or_null(f.behaviour_kl.totals.mean())},
          {"reference_kl_last", json_or_null(f.reference_kl.last)},
          // null if no step reported the figures that alarms watch
          {"alarms_begun", f.effective.last ? json(alarms_begun) : json(nullptr)},
          {"alarms", f.alarms}};
}

}  // namespace

json quantile(std::vector<double> values, double q) {
  if (values.empty()) return nullptr;
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(q * static_cast<double>(values.size()));
  return values[std::min(values.size() - 1, static_cast<std::size_t>(std::max(0.0, rank - 1)))];
}

json quantile(const std::map<std::uint64_t, std::uint64_t>& histogram, double q) {
  std::uint64_t count = 0, cumulative = 0;
  for (const auto& [value, n] : histogram) count += n;
  for (const auto& [value, n] : histogram) {
    cumulative += n;
    if (n > 0 && static_cast<double>(cumulative) >= q * static_cast<double>(count)) return value;
  }
  return nullptr;
}

json worker_status(const WorkerEntry& w, std::optional<double> rollouts_per_s,
                   std::optional<double> rollouts_per_s_expected, bool receives_from_learner) {
  return {{"id", w.id.value},
          {"offer", w.offer},
          {"rollouts", w.rollouts},
          {"rollouts_per_s", json_or_null(rollouts_per_s)},
          {"rollouts_per_s_expected", json_or_null(rollouts_per_s_expected)},
          {"version", w.version ? json(w.version->value) : json(nullptr)},
          {"bytes_in", w.bytes_in},
          {"bytes_forwarded", w.bytes_forwarded},
          {"memory_bytes", bytes_or_null(w.memory_bytes)},
          {"heap_bytes", bytes_or_null(w.heap_bytes)},
          {"seed", receives_from_learner},
          {"quarantined", w.quarantined},
          {"troubles", w.trouble_events},
          {"away", w.presence == Presence::kAway},
          {"lost", w.presence == Presence::kLost}};
}

json make_report(const ReportInput& input) {
  const RunConfig& config = *input.config;
  const provisioner::Plan& plan = *input.plan;
  const RunFigures& f = input.figures;
  const json delta_mean = json_or_null(f.patch_bytes.mean());
  const json full = f.snapshot.is_object() ? f.snapshot.at("state_bytes") : json(nullptr);
  const double training_seconds = f.step_seconds.totals().sum();
  const double rollouts = static_cast<double>(f.steps * config.rollout.trajectories_per_step());
  const auto rate_of = [&](double seconds) { return seconds > 0 ? json(rollouts / seconds) : json(nullptr); };

  std::uint64_t alive = 0, acknowledged = 0;
  json differing = json::array();  // workers that acknowledged the last version with another digest
  for (const WorkerEntry& w : input.workers) {
    if (w.presence != Presence::kPresent) continue;
    ++alive;
    if (w.version != input.version) continue;
    ++acknowledged;
    if (w.digest != input.digest) differing.push_back(w.id.value);
  }
  json workers = json::array();
  for (const WorkerEntry& w : input.workers) workers.push_back(worker_json(w));

  json report;
  report["schema_version"] = kReportSchemaVersion;
  report["run"] = config.run.name;
  report["ended"] = input.ended;
  report["seed"] = config.run.seed;
  report["steps"] = input.steps_done;
  report["steps_planned"] = config.run.steps;
  report["wall_seconds"] = input.wall_seconds;
  report["settings_changed"] = f.settings_changed;
  report["reward"] = first_and_last(f.reward);
  const auto accuracy = [](const json& row) { return row.is_object() ? row.at("accuracy") : json(nullptr); };
  report["eval"] = {{"before", accuracy(f.eval_before)},
                    {"after", accuracy(f.eval_after)},
                    {"problems", f.eval_before.is_object() ? f.eval_before.at("problems") : json(nullptr)},
                    {"by_step", json::array()}};
  for (const auto& [step, row] : f.evaluations.rows()) report["eval"]["by_step"].push_back(row);
  for (const auto& task : config.task.listed_tasks) {
    const auto figure_of = [&](const json& row, const char* figure) {
      const json by_task = row.is_object() ? row.value("by_task", json::object()) : json::object();
      return by_task.contains(task.name) ? by_task.at(task.name).at(figure) : json(nullptr);
    };
    report["eval"]["by_task"][task.name] = {{"before", figure_of(f.eval_before, "accuracy")},
                                            {"after", figure_of(f.eval_after, "accuracy")},
                                            {"problems", figure_of(f.eval_before, "problems")}};
    const auto found = f.by_task.find(task.name);
    const RunFigures::OfTask of_task = found == f.by_task.end() ? RunFigures::OfTask{} : found->second;
    json reward = first_and_last(of_task.reward);
    reward["responses"] = of_task.responses;
    report["reward"]["by_task"][task.name] = std::move(reward);
  }
  if (f.warm_start.is_object())
    report["warm_start"] = {{"steps", f.warm_start.at("steps")}, {"seconds", f.warm_start.at("seconds")}};
  report["learner"] = {
      {"step_seconds_median", json_or_null(f.step_seconds.quantile(0.5))},
      {"train_seconds_median", json_or_null(f.train_seconds.quantile(0.5))},
      {"publish_seconds_median", json_or_null(f.publish_seconds.quantile(0.5))},
      {"idle_fraction", training_seconds > 0 ? json(f.wait_seconds.sum() / training_seconds) : json(nullptr)}};
  report["learning"] = learning_json(f);
  report["staleness"] = staleness_json(input);
  std::uint64_t set_aside = 0;
  for (const auto& [reason, groups] : input.groups_set_aside) set_aside += groups;
  report["groups_set_aside"] = {{"count", set_aside}, {"by_reason", input.groups_set_aside}};
  report["regrading"] = regrading_json(input.regrading);
  report["scoring"] = {{"responses", input.scoring.responses},
                       {"failed_groups", input.scoring.failed_groups},
                       {"seconds", input.scoring.seconds}};
  report["broadcast"] = {
      {"publications", f.deltas + (f.snapshot.is_object() ? 1 : 0)},
      {"full_bytes", full},
      {"snapshot_bytes", f.snapshot.is_object() ? f.snapshot.at("patch_bytes") : json(nullptr)},
      {"delta_bytes_mean", delta_mean},
      {"compression_ratio", delta_mean.is_number() && full.is_number() && delta_mean.get<double>() > 0
                                ? json(full.get<double>() / delta_mean.get<double>())
                                : json(nullptr)},
      {"density_mean", json_or_null(f.changed_fraction.mean())},
      {"density_deviation", json_or_null(f.changed_fraction.deviation())},
      {"density_min", json_or_null(f.changed_fraction.min())},
      {"density_max", json_or_null(f.changed_fraction.max())},
      {"t_b_seconds_median", json_or_null(f.t_b.quantile(0.5))},
      {"t_b_seconds_p95", json_or_null(f.t_b.quantile(0.95))},
      {"t_b_parts", t_b_parts_json(f)},
      {"workers", count(f.workers)},
      {"acknowledged", count(f.acknowledged)},
      {"lower_bound_seconds", json_or_null(f.lower_bound.quantile(0.5))},
      {"predicted_seconds", json_or_null(f.predicted.quantile(0.5))},
      {"learner_bytes_sent", input.bytes_sent},
      {"topology", input.topology}};
  report["fleet"] = {{"workers_planned", input.fleet.planned},
                     {"workers_started", input.fleet.started},
                     {"workers_lost", input.fleet.lost},
                     {"workers_replaced", input.fleet.replaced}};
  report["workers"] = workers;
  report["memory"] = memory_json(input);
  report["weights"] = {{"version", input.version.value},
                       {"digest", overlay::to_hex(input.digest)},
                       {"workers", alive},
                       {"acknowledged", acknowledged},
                       {"differing", differing},
                       {"all_workers_identical", alive > 0 && acknowledged == alive && differing.empty()}};
  report["cost"] = {{"usd_total", input.fleet.usd + input.learner_usd.value_or(0)},
                    {"usd_learner", input.learner_usd ? json(*input.learner_usd) : json(nullptr)},
                    {"usd_fleet", input.fleet.usd},
                    {"prices_known", input.fleet.prices_known && input.learner_usd},
                    {"usd_per_1k_rollouts", rollouts > 0 ? json(1000 * input.fleet.usd / rollouts) : json(nullptr)},
                    {"plan_usd_per_hour", plan.usd_per_hour.expected}};
  report["plan"] = {{"target_rollouts_per_s", plan.target.required_rollouts_per_s},
                    {"provisioned_rollouts_per_s", plan.rollouts_per_s},
                    {"measured_rollouts_per_s", rate_of(training_seconds)},
                    {"broadcast_seconds", seconds(plan.broadcast_time)},
                    {"staleness_worst", plan.staleness_worst}};
  return report;
}

namespace {

std::string number(const json& value, const char* format_spec) {
  if (!value.is_number()) return "-";
  return fmt::format(fmt::runtime(format_spec), value.get<double>());
}

std::string bytes(const json& value) {
  return value.is_number() ? to_text(Bytes{static_cast<std::uint64_t>(value.get<double>())}) : "-";
}

// ", of 8 of 9 workers"; empty if all workers had acknowledged when T_b ended.
std::string acknowledged_text(const json& broadcast) {
  const json workers = broadcast.value("workers", json()), acknowledged = broadcast.value("acknowledged", json());
  if (!workers.is_number() || !acknowledged.is_number() || acknowledged >= workers) return "";
  return fmt::format(", of {} of {} workers", number(acknowledged, "{:.0f}"), number(workers, "{:.0f}"));
}

// A missing acknowledgement is harmless; a different digest of the same version is not.
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

std::string report_text(const json& r) {
  std::string out;
  const auto line = [&](std::string_view label, const std::string& text) {
    out += fmt::format("  {:<12}{}\n", label, text);
  };
  const json &eval = r.at("eval"), &learner = r.at("learner"), &staleness = r.at("staleness"),
             &broadcast = r.at("broadcast");
  const json &fleet = r.at("fleet"), &weights = r.at("weights"), &cost = r.at("cost"), &plan = r.at("plan");
  out += fmt::format("{}: {} of {} steps in {} s ({})\n", r.at("run").get<std::string>(),
                     r.at("steps").get<std::uint64_t>(), r.at("steps_planned").get<std::uint64_t>(),
                     number(r.at("wall_seconds"), "{:.0f}"), r.at("ended").get<std::string>());
  for (const json& change : r.value("settings_changed", json::array())) {
    const auto value = [&](const char* which) {
      return change.at(which).is_string() ? change.at(which).get<std::string>() : std::string("not given");
    };
    line("changed", fmt::format("{}: {} -> {}, from step {} on", change.at("key").get<std::string>(), value("old"),
                                value("new"), change.at("step").get<std::uint64_t>()));
  }
  line("accuracy",
       fmt::format("{} -> {} on {} held-out problems;  reward {} -> {}", number(eval.at("before"), "{:.3f}"),
                   number(eval.at("after"), "{:.3f}"), number(eval.at("problems"), "{:.0f}"),
                   number(r.at("reward").at("first"), "{:.3f}"), number(r.at("reward").at("last"), "{:.3f}")));
  if (eval.contains("by_task"))
    for (const auto& [task, of] : eval.at("by_task").items()) {
      const json& reward = r.at("reward").at("by_task").at(task);
      line("", fmt::format("{}: {} -> {} on {};  reward {} -> {} in {} responses", task,
                           number(of.at("before"), "{:.3f}"), number(of.at("after"), "{:.3f}"),
                           number(of.at("problems"), "{:.0f}"), number(reward.at("first"), "{:.3f}"),
                           number(reward.at("last"), "{:.3f}"), number(reward.at("responses"), "{:.0f}")));
    }
  line(
      "learner",
      fmt::format("step {} s (training {} s), idle {} of the time", number(learner.at("step_seconds_median"), "{:.2f}"),
                  number(learner.at("train_seconds_median"), "{:.2f}"), number(learner.at("idle_fraction"), "{:.3f}")));
  if (const json& learning = r.value("learning", json::object()); !learning.value("alarms", json::object()).empty())
    line("alarms", fmt::format("{}; see events.jsonl for times and advice", learning.at("alarms").dump()));
  line("staleness",
       fmt::format("mean {}, p95 {}, max {} of budget {};  rejected {} {}", number(staleness.at("mean"), "{:.2f}"),
                   number(staleness.at("p95"), "{:.0f}"), number(staleness.at("max"), "{:.0f}"),
                   staleness.at("budget").get<int>(), staleness.at("rejected").get<std::uint64_t>(),
                   staleness.at("rejected_by_reason").empty() ? "" : staleness.at("rejected_by_reason").dump()));
  if (const std::string limits = bound_text(staleness); !limits.empty()) line("", limits);
  if (const json& set_aside = r.value("groups_set_aside", json::object()); set_aside.value("count", 0) > 0)
    line("set aside", fmt::format("{} groups that could not be generated {}",
                                  set_aside.at("count").get<std::uint64_t>(), set_aside.at("by_reason").dump()));
  if (const json& regrading = r.value("regrading", json::object()); regrading.value("responses", 0) > 0) {
    line("regraded",
         fmt::format("{} of {} responses ({:.1f} %) in {:.1f} s; {} differed, {} unsettled, {} late, {} impossible",
                     regrading.at("graded").get<std::uint64_t>(), regrading.at("responses").get<std::uint64_t>(),
                     100 * regrading.at("share").get<double>(), regrading.at("seconds").get<double>(),
                     regrading.at("different").get<std::uint64_t>(), regrading.at("unsettled").get<std::uint64_t>(),
                     regrading.at("late").get<std::uint64_t>(), regrading.at("impossible").get<std::uint64_t>()));
    for (const json& expelled : regrading.at("expelled"))
      line("", fmt::format("worker {} expelled: {}", expelled.at("worker").get<std::uint64_t>(),
                           expelled.at("reason").get<std::string>()));
  }
  if (const json& scoring = r.value("scoring", json::object());
      scoring.value("responses", 0) + scoring.value("failed_groups", 0) > 0)
    line("scored here",
         fmt::format("{} responses in {:.1f} s; {} groups failed", scoring.at("responses").get<std::uint64_t>(),
                     scoring.at("seconds").get<double>(), scoring.at("failed_groups").get<std::uint64_t>()));
  line("broadcast",
       fmt::format("{} publications; full {}, delta {} on average ({}x smaller)",
                   broadcast.at("publications").get<std::uint64_t>(), bytes(broadcast.at("full_bytes")),
                   bytes(broadcast.at("delta_bytes_mean")), number(broadcast.at("compression_ratio"), "{:.1f}")));
  line("", fmt::format("T_b {} s (p95 {} s){}; lower bound {} s, formula {} s; learner sent {}",
                       number(broadcast.at("t_b_seconds_median"), "{:.3f}"),
                       number(broadcast.at("t_b_seconds_p95"), "{:.3f}"), acknowledged_text(broadcast),
                       number(broadcast.at("lower_bound_seconds"), "{:.3f}"),
                       number(broadcast.at("predicted_seconds"), "{:.3f}"), bytes(broadcast.at("learner_bytes_sent"))));
  if (const json& parts = broadcast.value("t_b_parts", json()); parts.is_object()) {
    std::string text;
    for (const char* part : {"encode", "seal", "send", "verify", "install", "acknowledge"})
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", part, number(parts.value(part, json()), "{:.3f}"));
    line("", fmt::format("of T_b: {} s", text));
  }
  line("", broadcast.at("topology").get<std::string>());
  if (const json& memory = r.value("memory", json::object()); memory.value("learner_bytes_max", json()).is_number())
    line("memory", fmt::format("learner {} at most, a worker {}", bytes(memory.at("learner_bytes_max")),
                               bytes(memory.at("worker_bytes_max"))));
  line("fleet", fmt::format("planned {}, started {}, lost {}, replaced {}", fleet.at("workers_planned").get<int>(),
                            fleet.at("workers_started").get<int>(), fleet.at("workers_lost").get<int>(),
                            fleet.at("workers_replaced").get<int>()));
  line("rollouts/s",
       fmt::format("target {}, provisioned {}, measured {}", number(plan.at("target_rollouts_per_s"), "{:.1f}"),
                   number(plan.at("provisioned_rollouts_per_s"), "{:.1f}"),
                   number(plan.at("measured_rollouts_per_s"), "{:.1f}")));
  line("weights", weights_text(weights));
  line("cost",
       fmt::format("${}{} in all, ${} per 1000 rollouts, fleet ${} per hour", number(cost.at("usd_total"), "{:.4f}"),
                   cost.at("prices_known").get<bool>() ? "" : " and what is not stated",
                   number(cost.at("usd_per_1k_rollouts"), "{:.5f}"), number(cost.at("plan_usd_per_hour"), "{:.3f}")));
  out += fmt::format("\n  {:>6}  {:<22}{:>8}{:>10}{:>10}{:>11}{:>9}\n", "worker", "offer", "$/h", "rollouts", "in",
                     "forwarded", "version");
  for (const json& w : r.at("workers"))
    out += fmt::format("  {:>6}  {:<22}{:>8}{:>10}{:>10}{:>11}{:>9}{}\n", w.at("id").get<std::uint64_t>(),
                       w.at("offer").get<std::string>(), number(w.at("price_usd_per_hour"), "{:.3f}"),
                       w.at("rollouts").get<std::uint64_t>(), bytes(w.at("bytes_in")), bytes(w.at("bytes_forwarded")),
                       w.at("version").is_null() ? "-" : std::to_string(w.at("version").get<std::uint64_t>()),
                       w.at("lost").get<bool>() ? "  lost" : "");
  return out;
}

}  // namespace echoline::learner
