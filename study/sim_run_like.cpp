// `echoline sim run --like`: reads an ended run, and compares it with its simulation.
#include "study/sim_run_like.hpp"

#include <algorithm>
#include <map>

#include "learner/distribution.hpp"
#include "learner/row_file.hpp"
#include "learner/run_config.hpp"
#include "learner/run_figures.hpp"
#include "learner/run_record.hpp"
#include "overlay/sizes.hpp"
#include "worker/agent.hpp"

namespace echoline::study {
namespace {

using nlohmann::json;

constexpr std::size_t kStepsMin = 5;  // a shorter run has measured too little
// The simulation gets at most this many delta sizes and step times, spread over the whole run.
constexpr std::size_t kSamplesMax = 10'000;
constexpr double kBytesPerValue = 2;  // because the policy is bf16
// These limits bound the memory for files that are damaged or that another program wrote.
constexpr std::size_t kDistinctAgesMax = 4096, kRentalsMax = 65'536;
constexpr double kNumberMax = 1e15;   // of a step or version
constexpr double kSecondsMin = 1e-6;  // the shortest time that a scenario file can state: it has six decimals

// A value of another type counts as absent, because the file may be damaged.
double number(const json& row, const char* key) {
  return row.contains(key) && row.at(key).is_number() ? row.at(key).get<double>() : 0;
}
std::string text(const json& row, const char* key) {
  return row.contains(key) && row.at(key).is_string() ? row.at(key).get<std::string>() : "";
}

double median(const learner::Distribution& values) { return values.quantile(0.5).value_or(0); }

// The shares of the rollouts trained on, by age in learner steps.
class StalenessShares {
 public:
  void add_row(const json& row) {
    if (text(row, "kind") != "step" || !row.contains("staleness") || !row.at("staleness").is_object()) return;
    for (const auto& [age, rollouts] : row.at("staleness").items()) {
      if (!rollouts.is_number() || (rollouts_.size() >= kDistinctAgesMax && !rollouts_.contains(age))) continue;
      rollouts_[age] += rollouts.get<double>();
      total_ += rollouts.get<double>();
    }
  }
  std::map<std::string, double> shares() const {
    std::map<std::string, double> by_age = rollouts_;
    for (auto& [age, share] : by_age) share /= std::max(total_, 1.0);
    return by_age;
  }

 private:
  std::map<std::string, double> rollouts_;  // by age
  double total_ = 0;
};

// Times from a machine's "rented" event to its "joined" event. Both name its offer.
class BootTimes {
 public:
  void add_row(const json& event) {
    const std::string event_name = text(event, "event"), offer = text(event, "offer");
    if (event_name == "rented" && (rented_.size() < kRentalsMax || rented_.contains(offer)))
      rented_[offer] = number(event, "unix_s");
    if (const auto rental = rented_.find(offer); event_name == "joined" && rental != rented_.end()) {
      seconds_.add(number(event, "unix_s") - rental->second);
      rented_.erase(rental);
    }
  }
  const learner::Distribution& seconds() const { return seconds_; }

 private:
  std::map<std::string, double> rented_;  // offers that have not joined yet, and when they were rented
  learner::Distribution seconds_;
};

std::uint64_t row_number(const json& row, const char* key) {
  return static_cast<std::uint64_t>(std::clamp(number(row, key), 0.0, kNumberMax));
}

// The values that the simulation takes from the steps and publications of a run.
class RunMeasurements {
 public:
  void add_row(const json& row) {
    ages.add_row(row);
    const std::string kind = text(row, "kind");
    if (kind == "publication") {
      parameters = std::max(parameters, number(row, "state_bytes") / kBytesPerValue);
      const bool is_snapshot = row.contains("snapshot") && row.at("snapshot") == true;
      // A resumed run may publish a version twice; the later one counts.
      if (is_snapshot)
        snapshot_bytes = number(row, "patch_bytes");
      else
        delta_bytes_by_version.set(row_number(row, "version"), number(row, "patch_bytes"));
    } else if (kind == "broadcast" && row.contains("t_b_parts") && row.at("t_b_parts").is_object() &&
               row.value("snapshot", false) == false) {
      // The parts of T_b, the broadcast time: from publishing a version until the quorum has acknowledged it.
      const json& parts = row.at("t_b_parts");
      encode_seconds.add(number(parts, "encode") + number(parts, "seal"));
      acknowledge_seconds.add(number(parts, "acknowledge"));
    } else if (kind == "step") {
      const double train_s = std::max(kSecondsMin, number(row, "step_seconds") - number(row, "wait_seconds"));
      train_seconds.add(train_s);
      seconds_by_step.set(row_number(row, "step"), train_s);
      const double tokens_per_rollout = number(row, "response_tokens_mean");
      if (tokens_per_rollout > 0) {
        rollouts += number(row, "response_tokens") / tokens_per_rollout;
        tokens += number(row, "response_tokens");
      }
    }
  }
  StalenessShares ages;
  learner::Distribution train_seconds, encode_seconds, acknowledge_seconds;
  learner::ThinnedRows delta_bytes_by_version{kSamplesMax};
  learner::ThinnedRows seconds_by_step{kSamplesMax};
  double parameters = 0, snapshot_bytes = 0, tokens = 0, rollouts = 0;
};

}  // namespace

Result<MeasuredRun> read_measured_run(const std::filesystem::path& folder) {
  MeasuredRun run;
  run.config = folder / "config.yaml";
  RunMeasurements measurements;
  ECHO_TRY(
      learner::each_row(folder / "metrics.jsonl", [&](const json& row) { return measurements.add_row(row), ok(); }));
  run.ages = measurements.ages.shares();
  auto report = learner::read_json_object(folder / "report.json");
  if (!report && report.error().code == Code::kNotFound)
    return fail(Code::kNotFound, "sim run", "{} has no report.json, so the run has not ended; see `echoline status`",
                folder.string());
  if (!report) return report.error();
  run.report = std::move(*report);
  BootTimes boot_times;
  ECHO_TRY(learner::each_row(folder / "events.jsonl", [&](const json& row) { return boot_times.add_row(row), ok(); }));

  const auto& delta_bytes_by_version = measurements.delta_bytes_by_version.rows();
  const double parameters = measurements.parameters;
  if (const std::uint64_t steps = measurements.train_seconds.totals().count();
      steps < kStepsMin || parameters == 0 || delta_bytes_by_version.empty() || measurements.rollouts == 0)
    return fail(Code::kInvalid, "sim run",
                "{}: the run has {} steps and {} deltas; expected at least {} steps and one delta", folder.string(),
                steps, delta_bytes_by_version.size(), kStepsMin);
  const auto set_key = [&](const char* key, std::string value) {
    run.world.emplace_back(std::string("simulation.") + key, std::move(value));
  };
  const auto time_text = [](double time_s) { return fmt::format("{:.6f} s", std::max(time_s, kSecondsMin)); };
  set_key("parameters", fmt::format("{:.0f}", parameters));
  if (measurements.snapshot_bytes >= 1) set_key("snapshot_bytes", fmt::format("{:.0f}", measurements.snapshot_bytes));
  // The simulation computes a delta's size as density x parameters x bytes_per_change. With these densities it gets the
  // measured sizes.
  set_key("bytes_per_change", fmt::format("{}", kBytesPerValue));
  set_key("wire_overhead", fmt::format("{}", overlay::kWireOverhead));
  std::string densities;
  for (const auto& [version, bytes] : delta_bytes_by_version)
    densities += fmt::format("{}{:.9f}", densities.empty() ? "" : ", ",
                             std::clamp(bytes.get<double>() / (parameters * kBytesPerValue), 0.0, 1.0));
  set_key("densities", "[" + densities + "]");
  set_key("step_time", time_text(median(measurements.train_seconds)));
  std::string steps;
  for (const auto& [step, step_s] : measurements.seconds_by_step.rows())
    steps += fmt::format("{}{:.6f}", steps.empty() ? "" : ", ", step_s.get<double>());
  set_key("step_seconds", "[" + steps + "]");
  if (measurements.encode_seconds.totals().count() > 0) {
    set_key("encode_time", time_text(median(measurements.encode_seconds)));
    set_key("acknowledge_time", time_text(median(measurements.acknowledge_seconds)));
  }
  // The run has recorded only means, so the mean stands for the median.
  set_key("tokens.median", fmt::format("{:.3f}", std::max(1.0, measurements.tokens / measurements.rollouts)));
  // A local worker is limited to the speed of its offer, and asks for this much work ahead.
  ECHO_ASSIGN(const learner::RunConfig config, learner::load_run_config(run.config));
  if (config.fleet.is_local()) set_key("work_ahead", time_text(worker::kAheadSeconds));
  learner::Distribution install_seconds;
  if (run.report.contains("workers") && run.report.at("workers").is_array())
    for (const json& worker : run.report.at("workers"))
      if (worker.is_object() && worker.contains("install_seconds_mean") &&
          worker.at("install_seconds_mean").is_number())
        install_seconds.add(number(worker, "install_seconds_mean"));
  if (install_seconds.totals().count() > 0) set_key("install_time", time_text(median(install_seconds)));
  if (boot_times.seconds().totals().count() > 0) set_key("boot", time_text(median(boot_times.seconds())));
  return run;
}

std::vector<std::pair<std::string, std::string>> overrides_like(
    const MeasuredRun& run, const std::vector<std::pair<std::string, std::string>>& given) {
  auto overrides = run.world;
  // A simulation.step_time of the user replaces simulation.step_seconds, the measured time of each step.
  if (std::ranges::any_of(given, [](const auto& key_value) { return key_value.first == "simulation.step_time"; }))
    std::erase_if(overrides, [](const auto& key_value) { return key_value.first == "simulation.step_seconds"; });
  overrides.insert(overrides.end(), given.begin(), given.end());
  return overrides;
}

json compare(const MeasuredRun& real, const json& report, const std::vector<json>& metrics) {
  json comparison = json::object();
  for (const auto& [section, key] : {std::pair{"broadcast", "t_b_seconds_median"},
                                     {"learner", "idle_fraction"},
                                     {"learner", "step_seconds_median"},
                                     {"cost", "usd_fleet"},
                                     {"cost", "usd_per_1k_rollouts"},
                                     {"fleet", "workers_started"},
                                     {"staleness", "mean"},
                                     {"staleness", "p95"}}) {
    const auto value_in = [&, section = section, key = key](const json& a_report) {
      if (!a_report.contains(section) || !a_report.at(section).is_object()) return json(nullptr);
      const json& fields = a_report.at(section);
      return fields.contains(key) ? fields.at(key) : json(nullptr);
    };
    comparison[std::string(section) + "." + key] = {{"real", value_in(real.report)}, {"simulated", value_in(report)}};
  }
  StalenessShares simulated;
  for (const json& row : metrics) simulated.add_row(row);
  std::map<std::string, double> difference = real.ages;
  for (const auto& [age, share] : simulated.shares()) difference[age] -= share;
  double variation = 0;  // total variation distance: half the sum of the absolute differences
  for (const auto& [age, share_difference] : difference) variation += std::abs(share_difference) / 2;
  comparison["staleness.total_variation"] = variation;
  return comparison;
}

std::string comparison_table(const json& comparison) {
  const auto cell = [](const json& value) {
    return value.is_number() ? fmt::format("{:.4g}", value.get<double>()) : std::string("-");
  };
  std::string out = fmt::format("\n{:<28}{:>14}{:>14}\n", "", "real", "simulated");
  for (const auto& [key, entry] : comparison.items()) {
    if (entry.is_object())
      out += fmt::format("{:<28}{:>14}{:>14}\n", key, cell(entry.at("real")), cell(entry.at("simulated")));
    else
      out += fmt::format("{:<28}{:>28}\n", key, cell(entry));
  }
  return out;
}

}  // namespace echoline::study
