#include "learner/report.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "learner/alarms.hpp"
#include "learner/run_record.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;

json mean(const std::vector<double>& values) {
  if (values.empty()) return nullptr;
  double sum = 0;
  for (const double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

// The measurements of a run by kind. A step that was done again after a resume counts as it was done last.
struct Rows {
  std::map<std::uint64_t, json> steps, publications, broadcasts, evaluations;
  json settings_changed = json::array();
  json eval_before = nullptr, eval_after = nullptr, snapshot = nullptr, warm_start = nullptr;

  explicit Rows(const std::vector<json>& metrics) {
    for (const json& row : metrics) {
      const std::string kind = row.value("kind", "");
      if (kind == "step") steps[row.at("step").get<std::uint64_t>()] = row;
      if (kind == "publication") (row.value("snapshot", false) ? snapshot : publications[row.at("version")]) = row;
      if (kind == "broadcast" && !row.value("snapshot", false)) broadcasts[row.at("version")] = row;
      if (kind == "warm_start") warm_start = row;
      if (kind == "setting_changed")
        settings_changed.push_back({{"key", row.at("key")}, {"old", row.at("old")}, {"new", row.at("new")}, {"step", row.at("step")}});
      if (kind == "evaluation") {
        evaluations[row.value("step", std::uint64_t{0})] = row;
        if (row.value("when", "") == "before") eval_before = row;
        if (row.value("when", "") == "after") eval_after = row;
      }
    }
  }

  std::vector<double> values(const std::map<std::uint64_t, json>& rows, const char* key) const {
    std::vector<double> result;
    for (const auto& [id, row] : rows)
      if (row.contains(key) && row.at(key).is_number()) result.push_back(row.at(key));
    return result;
  }
};

json deviation(const std::vector<double>& values) {
  if (values.empty()) return nullptr;
  const double middle = mean(values).get<double>();
  double squares = 0;
  for (const double v : values) squares += (v - middle) * (v - middle);
  return std::sqrt(squares / static_cast<double>(values.size()));
}

// The median of T_b, shared out among its parts as the mean broadcast was: the parts add up to it.
json t_b_parts_json(const Rows& rows) {
  std::map<std::string, double> shares;
  double broadcasts = 0;
  for (const auto& [version, row] : rows.broadcasts) {
    const double t_b = row.value("t_b_seconds", 0.0);
    if (!(t_b > 0) || !row.contains("t_b_parts")) continue;
    for (const auto& [part, part_seconds] : row.at("t_b_parts").items()) shares[part] += part_seconds.get<double>() / t_b;
    ++broadcasts;
  }
  if (broadcasts == 0) return nullptr;
  const double median = quantile(rows.values(rows.broadcasts, "t_b_seconds"), 0.5).get<double>();
  json parts;
  for (const auto& [part, share] : shares) parts[part] = share / broadcasts * median;
  return parts;
}

json last(const std::vector<double>& counts) {
  return counts.empty() ? json(nullptr) : json(static_cast<std::uint64_t>(counts.back()));
}

double sum(const std::vector<double>& values) {
  double total = 0;
  for (const double v : values) total += v;
  return total;
}

json staleness_json(const ReportInput& input, const Rows& rows) {
  const StalenessSection& asked = input.config->staleness;
  const json& rejected = input.rejected;
  std::map<std::uint64_t, std::uint64_t> histogram;  // steps stale -> trajectories
  std::uint64_t count = 0;
  double total = 0;
  for (const auto& [step, row] : rows.steps)
    for (const auto& [age, n] : row.at("staleness").items()) {
      histogram[std::stoull(age)] += n.get<std::uint64_t>();
      count += n.get<std::uint64_t>();
      total += static_cast<double>(std::stoull(age)) * n.get<double>();
    }
  std::uint64_t rejections = 0;
  for (const auto& [reason, n] : rejected.items()) rejections += n.get<std::uint64_t>();
  return {{"budget", asked.budget},
          {"publish_every", asked.publish_every},
          {"lookahead", asked.lookahead_steps()},
          {"steps_bound_by_budget", input.bound.of(replay_buffer::Bound::kBudget)},
          {"steps_bound_by_lookahead", input.bound.of(replay_buffer::Bound::kLookahead)},
          {"mean", count ? json(total / static_cast<double>(count)) : json(nullptr)},
          {"p50", quantile(histogram, 0.5)},
          {"p90", quantile(histogram, 0.9)},
          {"p95", quantile(histogram, 0.95)},
          {"max", histogram.empty() ? json(nullptr) : json(histogram.rbegin()->first)},
          {"rejected", rejections},
          {"rejected_by_reason", rejected}};
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
          {"version", w.version ? json(w.version->value) : json(nullptr)},
          {"digest", w.version ? json(overlay::to_hex(w.digest)) : json(nullptr)},
          {"away", w.away},
          {"lost", w.lost}};
}

json regrading_json(const RegradingCounts& c) {
  json expelled = json::array();
  for (const auto& [worker, reason] : c.expelled) expelled.push_back({{"worker", worker.value}, {"reason", reason}});
  return {{"responses", c.responses},
          {"graded", c.graded},
          {"share", c.responses > 0 ? json(static_cast<double>(c.graded) / static_cast<double>(c.responses)) : json(nullptr)},
          {"seconds", c.seconds},
          {"different", c.different},
          {"unsettled", c.unsettled},
          {"late", c.late},
          {"impossible", c.impossible},
          {"left_out", c.left_out},
          {"expelled", std::move(expelled)}};
}

json learning_json(const std::vector<json>& metrics, const Rows& rows) {
  const auto ends = [&](const char* key) {
    const auto values = rows.values(rows.steps, key);
    return values.empty() ? json{{"first", nullptr}, {"last", nullptr}}
                          : json{{"first", values.front()}, {"last", values.back()}};
  };
  const auto effective = rows.values(rows.steps, "effective_sample_fraction");
  const auto norms = rows.values(rows.steps, "gradient_norm");
  Alarms alarms;
  std::map<std::string, std::uint64_t> begun;
  std::uint64_t all = 0;
  for (const json& row : metrics)
    for (const Alarm& alarm : alarms.hear(row)) ++begun[alarm.kind], ++all;
  return {{"entropy", ends("entropy")},
          {"response_tokens_mean", ends("response_tokens_mean")},
          {"effective_sample_fraction_mean", mean(effective)},
          {"gradient_norm_max", quantile(norms, 1.0)},
          {"zero_advantage_fraction_mean", mean(rows.values(rows.steps, "zero_advantage_fraction"))},
          {"clip_fraction_mean", mean(rows.values(rows.steps, "clip_fraction"))},
          {"behaviour_kl_mean", mean(rows.values(rows.steps, "behaviour_kl"))},
          {"reference_kl_last", ends("reference_kl").at("last")},
          {"alarms_begun", effective.empty() ? json(nullptr) : json(all)},
          {"alarms", begun}};
}

}  // namespace

json quantile(std::vector<double> values, double q) {
  if (values.empty()) return nullptr;
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(q * static_cast<double>(values.size()));
  return values[std::min(values.size() - 1, static_cast<std::size_t>(std::max(0.0, rank - 1)))];
}

json quantile(const std::map<std::uint64_t, std::uint64_t>& histogram, double q) {
  std::uint64_t count = 0, below = 0;
  for (const auto& [value, n] : histogram) count += n;
  for (const auto& [value, n] : histogram)
    if (n > 0 && static_cast<double>(below += n) >= q * static_cast<double>(count)) return value;
  return nullptr;
}

json make_report(const ReportInput& input) {
  const RunConfig& config = *input.config;
  const provisioner::Plan& plan = *input.plan;
  const Rows rows(input.metrics);
  const auto rewards = rows.values(rows.steps, "reward_mean");
  const auto waits = rows.values(rows.steps, "wait_seconds");
  const auto walls = rows.values(rows.steps, "step_seconds");
  const auto delta_bytes = rows.values(rows.publications, "patch_bytes"),
             densities = rows.values(rows.publications, "density");
  const json delta_mean = mean(delta_bytes);
  const json full = rows.snapshot.is_object() ? rows.snapshot.at("state_bytes") : json(nullptr);
  const double training_seconds = sum(walls);
  const double rollouts = static_cast<double>(rows.steps.size() * config.rollout.trajectories_per_step());
  const auto rate_of = [&](double seconds) { return seconds > 0 ? json(rollouts / seconds) : json(nullptr); };

  std::uint64_t alive = 0, acknowledged = 0;
  json differing = json::array();  // who acknowledged the last version with another digest
  for (const WorkerEntry& w : input.workers) {
    if (w.lost || w.away) continue;
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
  report["settings_changed"] = rows.settings_changed;
  report["reward"] = {{"first", rewards.empty() ? json(nullptr) : json(rewards.front())},
                      {"last", rewards.empty() ? json(nullptr) : json(rewards.back())}};
  const auto accuracy = [](const json& row) { return row.is_object() ? row.at("accuracy") : json(nullptr); };
  report["eval"] = {{"before", accuracy(rows.eval_before)},
                    {"after", accuracy(rows.eval_after)},
                    {"problems", rows.eval_before.is_object() ? rows.eval_before.at("problems") : json(nullptr)},
                    {"by_step", json::array()}};
  for (const auto& [step, row] : rows.evaluations) {
    json evaluation = {{"step", step}, {"accuracy", row.at("accuracy")}};
    for (const char* key : {"reward_mean", "components"})
      if (row.contains(key)) evaluation[key] = row.at(key);
    report["eval"]["by_step"].push_back(std::move(evaluation));
  }
  for (const auto& task : config.task.several) {
    const auto of = [&](const json& row, const char* figure) {
      const json by_task = row.is_object() ? row.value("by_task", json::object()) : json::object();
      return by_task.contains(task.name) ? by_task.at(task.name).at(figure) : json(nullptr);
    };
    report["eval"]["by_task"][task.name] = {{"before", of(rows.eval_before, "accuracy")},
                                            {"after", of(rows.eval_after, "accuracy")},
                                            {"problems", of(rows.eval_before, "problems")}};
    json first, last;  // a step may have none of a task
    std::uint64_t responses = 0;
    for (const auto& [step, row] : rows.steps) {
      const json reward = of(row, "reward_mean");
      if (reward.is_null()) continue;
      if (first.is_null()) first = reward;
      last = reward;
      responses += of(row, "responses").get<std::uint64_t>();
    }
    report["reward"]["by_task"][task.name] = {{"first", first}, {"last", last}, {"responses", responses}};
  }
  if (rows.warm_start.is_object())
    report["warm_start"] = {{"steps", rows.warm_start.at("steps")}, {"seconds", rows.warm_start.at("seconds")}};
  report["learner"] = {{"step_seconds_median", quantile(walls, 0.5)},
                       {"train_seconds_median", quantile(rows.values(rows.steps, "train_seconds"), 0.5)},
                       {"publish_seconds_median", quantile(rows.values(rows.steps, "publish_seconds"), 0.5)},
                       {"idle_fraction", training_seconds > 0 ? json(sum(waits) / training_seconds) : json(nullptr)}};
  report["learning"] = learning_json(input.metrics, rows);
  report["staleness"] = staleness_json(input, rows);
  std::uint64_t set_aside = 0;
  for (const auto& [reason, groups] : input.groups_set_aside) set_aside += groups;
  report["groups_set_aside"] = {{"count", set_aside}, {"by_reason", input.groups_set_aside}};
  report["regrading"] = regrading_json(input.regrading);
  report["scoring"] = {{"responses", input.scoring.responses}, {"failed_groups", input.scoring.failed_groups}, {"seconds", input.scoring.seconds}};
  report["broadcast"] = {
      {"publications", rows.publications.size() + (rows.snapshot.is_object() ? 1 : 0)},
      {"full_bytes", full},
      {"snapshot_bytes", rows.snapshot.is_object() ? rows.snapshot.at("patch_bytes") : json(nullptr)},
      {"delta_bytes_mean", delta_mean},
      {"compression_ratio", delta_mean.is_number() && full.is_number() && delta_mean.get<double>() > 0
                                ? json(full.get<double>() / delta_mean.get<double>())
                                : json(nullptr)},
      {"density_mean", mean(densities)},
      {"density_deviation", deviation(densities)},
      {"density_min", quantile(densities, 0)},
      {"density_max", quantile(densities, 1)},
      {"t_b_seconds_median", quantile(rows.values(rows.broadcasts, "t_b_seconds"), 0.5)},
      {"t_b_seconds_p95", quantile(rows.values(rows.broadcasts, "t_b_seconds"), 0.95)},
      {"t_b_parts", t_b_parts_json(rows)},
      {"workers", last(rows.values(rows.broadcasts, "workers"))},
      {"acknowledged", last(rows.values(rows.broadcasts, "acknowledged"))},
      {"lower_bound_seconds", quantile(rows.values(rows.broadcasts, "lower_bound_seconds"), 0.5)},
      {"predicted_seconds", quantile(rows.values(rows.broadcasts, "predicted_seconds"), 0.5)},
      {"learner_bytes_sent", input.bytes_sent},
      {"topology", input.topology}};
  report["fleet"] = {{"workers_planned", input.fleet.planned},
                     {"workers_started", input.fleet.started},
                     {"workers_lost", input.fleet.lost},
                     {"workers_replaced", input.fleet.replaced}};
  report["workers"] = workers;
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

// ", of 8 of 9 workers"; nothing where all had the last one when its T_b was taken.
std::string waited_for(const json& broadcast) {
  const json workers = broadcast.value("workers", json()), acknowledged = broadcast.value("acknowledged", json());
  if (!workers.is_number() || !acknowledged.is_number() || acknowledged >= workers) return "";
  return fmt::format(", of {} of {} workers", number(acknowledged, "{:.0f}"), number(workers, "{:.0f}"));
}

// Who has not answered yet is not alarming; another digest under the same version is.
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
  const json &eval = r.at("eval"), &learner = r.at("learner"), &stale = r.at("staleness"), &b = r.at("broadcast");
  const json &fleet = r.at("fleet"), &weights = r.at("weights"), &cost = r.at("cost"), &plan = r.at("plan");
  out += fmt::format("{}: {} of {} steps in {} s ({})\n", r.at("run").get<std::string>(),
                     r.at("steps").get<std::uint64_t>(), r.at("steps_planned").get<std::uint64_t>(),
                     number(r.at("wall_seconds"), "{:.0f}"), r.at("ended").get<std::string>());
  for (const json& change : r.value("settings_changed", json::array())) {
    const auto value = [&](const char* which) { return change.at(which).is_string() ? change.at(which).get<std::string>() : std::string("not given"); };
    line("changed", fmt::format("{}: {} -> {}, from step {} on", change.at("key").get<std::string>(), value("old"), value("new"),
                                change.at("step").get<std::uint64_t>()));
  }
  line("accuracy",
       fmt::format("{} -> {} on {} held-out problems;  reward {} -> {}", number(eval.at("before"), "{:.3f}"),
                   number(eval.at("after"), "{:.3f}"), number(eval.at("problems"), "{:.0f}"),
                   number(r.at("reward").at("first"), "{:.3f}"), number(r.at("reward").at("last"), "{:.3f}")));
  if (eval.contains("by_task"))
    for (const auto& [task, of] : eval.at("by_task").items()) {
      const json& reward = r.at("reward").at("by_task").at(task);
      line("", fmt::format("{}: {} -> {} on {};  reward {} -> {} in {} responses", task, number(of.at("before"), "{:.3f}"), number(of.at("after"), "{:.3f}"),
                           number(of.at("problems"), "{:.0f}"), number(reward.at("first"), "{:.3f}"), number(reward.at("last"), "{:.3f}"),
                           number(reward.at("responses"), "{:.0f}")));
    }
  line(
      "learner",
      fmt::format("step {} s (training {} s), idle {} of the time", number(learner.at("step_seconds_median"), "{:.2f}"),
                  number(learner.at("train_seconds_median"), "{:.2f}"), number(learner.at("idle_fraction"), "{:.3f}")));
  if (const json& learning = r.value("learning", json::object()); !learning.value("alarms", json::object()).empty())
    line("alarms", fmt::format("{}; events.jsonl says when, and what to do", learning.at("alarms").dump()));
  line("staleness",
       fmt::format("mean {}, p95 {}, max {} of budget {};  rejected {} {}", number(stale.at("mean"), "{:.2f}"),
                   number(stale.at("p95"), "{:.0f}"), number(stale.at("max"), "{:.0f}"), stale.at("budget").get<int>(),
                   stale.at("rejected").get<std::uint64_t>(),
                   stale.at("rejected_by_reason").empty() ? "" : stale.at("rejected_by_reason").dump()));
  if (const std::string bound = bound_text(stale); !bound.empty()) line("", bound);
  if (const json& aside = r.value("groups_set_aside", json::object()); aside.value("count", 0) > 0)
    line("set aside", fmt::format("{} groups that could not be generated {}", aside.at("count").get<std::uint64_t>(),
                                  aside.at("by_reason").dump()));
  if (const json& again = r.value("regrading", json::object()); again.value("responses", 0) > 0) {
    line("regraded", fmt::format("{} of {} responses ({:.1f} %) in {:.1f} s; {} differed, {} unsettled, {} late, {} impossible",
                                     again.at("graded").get<std::uint64_t>(), again.at("responses").get<std::uint64_t>(),
                                     100 * again.at("share").get<double>(), again.at("seconds").get<double>(),
                                     again.at("different").get<std::uint64_t>(), again.at("unsettled").get<std::uint64_t>(),
                                     again.at("late").get<std::uint64_t>(), again.at("impossible").get<std::uint64_t>()));
    for (const json& gone : again.at("expelled"))
      line("", fmt::format("worker {} expelled: {}", gone.at("worker").get<std::uint64_t>(), gone.at("reason").get<std::string>()));
  }
  if (const json& scoring = r.value("scoring", json::object()); scoring.value("responses", 0) + scoring.value("failed_groups", 0) > 0)
    line("scored here", fmt::format("{} responses in {:.1f} s; {} groups failed", scoring.at("responses").get<std::uint64_t>(),
                                    scoring.at("seconds").get<double>(), scoring.at("failed_groups").get<std::uint64_t>()));
  line("broadcast", fmt::format("{} publications; full {}, delta {} on average ({}x smaller)",
                                b.at("publications").get<std::uint64_t>(), bytes(b.at("full_bytes")),
                                bytes(b.at("delta_bytes_mean")), number(b.at("compression_ratio"), "{:.1f}")));
  line("", fmt::format("T_b {} s (p95 {} s){}; lower bound {} s, formula {} s; learner sent {}",
                       number(b.at("t_b_seconds_median"), "{:.3f}"), number(b.at("t_b_seconds_p95"), "{:.3f}"),
                       waited_for(b),
                       number(b.at("lower_bound_seconds"), "{:.3f}"), number(b.at("predicted_seconds"), "{:.3f}"),
                       bytes(b.at("learner_bytes_sent"))));
  if (const json& parts = b.value("t_b_parts", json()); parts.is_object()) {
    std::string text;
    for (const char* part : {"encode", "seal", "send", "verify", "install", "acknowledge"})
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", part, number(parts.value(part, json()), "{:.3f}"));
    line("", fmt::format("of T_b: {} s", text));
  }
  line("", b.at("topology").get<std::string>());
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
