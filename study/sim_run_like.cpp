#include "study/sim_run_like.hpp"

#include <algorithm>
#include <map>

#include "learner/report.hpp"
#include "learner/run_config.hpp"
#include "learner/run_record.hpp"
#include "overlay/sizes.hpp"
#include "worker/agent.hpp"

namespace echoline::study {
namespace {

using nlohmann::json;

constexpr std::size_t kStepsMin = 5;

// Files of a run may have been written by anybody: what is none counts as absent.
double number(const json& row, const char* key) { return row.contains(key) && row.at(key).is_number() ? row.at(key).get<double>() : 0; }
std::string text(const json& row, const char* key) {
  return row.contains(key) && row.at(key).is_string() ? row.at(key).get<std::string>() : "";
}

double median(std::vector<double> values) {
  const json m = learner::quantile(std::move(values), 0.5);
  return m.is_number() ? m.get<double>() : 0;
}

// Share of the rollouts trained on, by age.
std::map<std::string, double> ages(const std::vector<json>& metrics) {
  std::map<std::string, double> share;
  double all = 0;
  for (const json& row : metrics)
    if (text(row, "kind") == "step" && row.contains("staleness") && row.at("staleness").is_object())
      for (const auto& [age, n] : row.at("staleness").items())
        if (n.is_number()) share[age] += n.get<double>(), all += n.get<double>();
  for (auto& [age, n] : share) n /= std::max(all, 1.0);
  return share;
}

// From "rented" to "joined" of the same offer.
std::vector<double> boots(const std::vector<json>& events) {
  std::map<std::string, double> rented;
  std::vector<double> all;
  for (const json& e : events) {
    const std::string what = text(e, "event"), offer = text(e, "offer");
    if (what == "rented") rented[offer] = number(e, "unix_s");
    if (const auto at = rented.find(offer); what == "joined" && at != rented.end()) {
      all.push_back(number(e, "unix_s") - at->second);
      rented.erase(at);
    }
  }
  return all;
}

}  // namespace

Result<LikeRun> like_run(const std::filesystem::path& folder) {
  LikeRun run;
  run.config = folder / "config.yaml";
  ECHO_ASSIGN(run.metrics, learner::read_json_lines(folder / "metrics.jsonl"));
  auto report = learner::read_json_object(folder / "report.json");
  if (!report && report.error().code == Code::kNotFound)
    return fail(Code::kNotFound, "sim run", "{} has no report.json: the run has not ended; `echoline status` says how it stands", folder.string());
  if (!report) return report.error();
  run.report = std::move(*report);
  ECHO_ASSIGN(const auto events, learner::read_json_lines(folder / "events.jsonl"));

  std::vector<double> steps, encodes, acknowledgements;
  double parameters = 0, tokens = 0, rollouts = 0;
  std::map<std::uint64_t, double> deltas;  // a resumed run may have published a version twice
  for (const json& row : run.metrics) {
    const std::string kind = text(row, "kind");
    if (kind == "publication") {
      parameters = std::max(parameters, number(row, "state_bytes") / 2);
      const bool snapshot = row.contains("snapshot") && row.at("snapshot") == true;
      if (!snapshot) deltas[static_cast<std::uint64_t>(std::clamp(number(row, "version"), 0.0, 1e15))] = number(row, "patch_bytes");
    } else if (kind == "broadcast" && row.contains("t_b_parts") && row.at("t_b_parts").is_object() && row.value("snapshot", false) == false) {
      const json& parts = row.at("t_b_parts");
      encodes.push_back(number(parts, "encode") + number(parts, "seal"));
      acknowledgements.push_back(number(parts, "acknowledge"));
    } else if (kind == "step") {
      steps.push_back(std::max(1e-6, number(row, "step_seconds") - number(row, "wait_seconds")));
      if (const double mean = number(row, "response_tokens_mean"); mean > 0)
        rollouts += number(row, "response_tokens") / mean, tokens += number(row, "response_tokens");
    }
  }
  if (steps.size() < kStepsMin || parameters == 0 || deltas.empty() || rollouts == 0)
    return fail(Code::kInvalid, "sim run", "{}: {} steps and {} deltas are too little to go by, at least {} steps are needed",
                folder.string(), steps.size(), deltas.size(), kStepsMin);
  const auto set = [&](const char* key, std::string value) { run.world.emplace_back(std::string("simulation.") + key, std::move(value)); };
  const auto time = [](double s) { return fmt::format("{:.6f} s", std::max(s, 1e-6)); };
  set("parameters", fmt::format("{:.0f}", parameters));
  set("bytes_per_change", "1");
  set("wire_overhead", fmt::format("{}", overlay::kWireOverhead));
  std::string densities;
  for (const auto& [version, bytes] : deltas)
    densities += fmt::format("{}{:.9f}", densities.empty() ? "" : ", ", std::clamp(bytes / parameters, 0.0, 1.0));
  set("densities", "[" + densities + "]");
  set("step_time", time(median(steps)));
  set("step_seconds", fmt::format("[{:.6f}]", fmt::join(steps, ", ")));
  if (!encodes.empty()) {
    set("encode_time", time(median(std::move(encodes))));
    set("acknowledge_time", time(median(std::move(acknowledgements))));
  }
  set("tokens.median", fmt::format("{:.3f}", std::max(1.0, tokens / rollouts)));
  // Processes of this machine are held to the speed of their offers, and ask for that much ahead.
  ECHO_ASSIGN(const learner::RunConfig config, learner::load_run_config(run.config));
  if (config.fleet.provider == learner::ProviderKind::kLocal) set("work_ahead", time(worker::kAheadSeconds));
  std::vector<double> installs;
  if (run.report.contains("workers") && run.report.at("workers").is_array())
    for (const json& worker : run.report.at("workers"))
      if (worker.is_object() && worker.contains("install_seconds_mean") && worker.at("install_seconds_mean").is_number())
        installs.push_back(number(worker, "install_seconds_mean"));
  if (!installs.empty()) set("install_time", time(median(std::move(installs))));
  if (auto seconds = boots(events); !seconds.empty()) set("boot", time(median(std::move(seconds))));
  return run;
}

json compare(const LikeRun& real, const json& report, const std::vector<json>& metrics) {
  json both = json::object();
  for (const auto& [section, key] : {std::pair{"broadcast", "t_b_seconds_median"}, {"learner", "idle_fraction"},
                                     {"learner", "step_seconds_median"}, {"cost", "usd_fleet"}, {"cost", "usd_per_1k_rollouts"},
                                     {"fleet", "workers_started"}, {"staleness", "mean"}, {"staleness", "p95"}}) {
    const auto of = [&, section = section, key = key](const json& r) {
      return r.contains(section) && r.at(section).is_object() && r.at(section).contains(key) ? r.at(section).at(key) : json(nullptr);
    };
    both[std::string(section) + "." + key] = {{"real", of(real.report)}, {"simulated", of(report)}};
  }
  auto difference = ages(real.metrics);
  for (const auto& [age, share] : ages(metrics)) difference[age] -= share;
  double variation = 0;
  for (const auto& [age, d] : difference) variation += std::abs(d) / 2;
  both["staleness.total_variation"] = variation;
  return both;
}

std::string comparison_table(const json& comparison) {
  const auto cell = [](const json& v) { return v.is_number() ? fmt::format("{:.4g}", v.get<double>()) : std::string("-"); };
  std::string out = fmt::format("\n{:<28}{:>14}{:>14}\n", "", "real", "simulated");
  for (const auto& [key, both] : comparison.items()) {
    if (both.is_object())
      out += fmt::format("{:<28}{:>14}{:>14}\n", key, cell(both.at("real")), cell(both.at("simulated")));
    else
      out += fmt::format("{:<28}{:>28}\n", key, cell(both));
  }
  return out;
}

}  // namespace echoline::study
