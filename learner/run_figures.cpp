// Aggregates metrics.jsonl, for the report.
#include "learner/run_figures.hpp"

#include <charconv>

#include "learner/row_file.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;

constexpr std::uint64_t kNumbersMax = 10'000'000;  // most learner steps of a run file
constexpr std::size_t kAgesMax = 4096, kTasksMax = 1024, kPartsMax = 64;

std::optional<double> number(const json& row, const char* key) {
  const auto it = row.find(key);
  return it != row.end() && it->is_number() ? std::optional(it->get<double>()) : std::nullopt;
}

std::string text(const json& row, const char* key) {
  const auto it = row.find(key);
  return it != row.end() && it->is_string() ? it->get<std::string>() : std::string();
}

bool is_snapshot(const json& row) {
  const auto it = row.find("snapshot");
  return it != row.end() && *it == true;
}

void add(Totals& totals, const json& row, const char* key) {
  if (const auto value = number(row, key)) totals.add(*value);
}
void add(Distribution& values, const json& row, const char* key) {
  if (const auto value = number(row, key)) values.add(*value);
}
void add(Figure& figure, std::uint64_t n, const json& row, const char* key) {
  if (const auto value = number(row, key)) figure.add(n, *value);
}

}  // namespace

void Figure::add(std::uint64_t number, double value) {
  totals.add(value);
  if (!first || number <= first->first) first = {number, value};
  if (!last || number >= last->first) last = {number, value};
}

void ThinnedRows::set(std::uint64_t number, json row) {
  const auto is_kept = [&](std::uint64_t entry) { return entry % every_ == 0 || entry == rows_.rbegin()->first; };
  const std::optional<std::uint64_t> newest_before =
      rows_.empty() ? std::nullopt : std::optional(rows_.rbegin()->first);
  rows_[number] = std::move(row);
  for (const std::uint64_t entry : {newest_before.value_or(number), number})
    if (!is_kept(entry)) rows_.erase(entry);
  while (rows_.size() > rows_max_) {
    every_ *= 2;
    const std::uint64_t newest = rows_.rbegin()->first;
    std::erase_if(rows_, [&](const auto& entry) { return entry.first % every_ != 0 && entry.first != newest; });
  }
}

void FigureFold::Repeats::add(std::uint64_t number) {
  if (rows_left_.size() <= number) rows_left_.resize(number + 1);
  if (rows_left_[number] < UINT16_MAX) ++rows_left_[number];
}

bool FigureFold::Repeats::is_last(std::uint64_t number) {
  return number < rows_left_.size() && rows_left_[number] > 0 && --rows_left_[number] == 0;
}

std::optional<std::pair<FigureFold::Kind, std::uint64_t>> FigureFold::kind_and_number(const json& row) {
  const std::string kind = text(row, "kind");
  const auto with_number = [&](Kind k, const char* key) -> std::optional<std::pair<Kind, std::uint64_t>> {
    const auto n = number(row, key);
    if (!n || !(*n >= 0 && *n <= kNumbersMax)) return std::nullopt;
    return std::pair(k, static_cast<std::uint64_t>(*n));
  };
  if (kind == "step") return with_number(kStep, "step");
  if (kind == "evaluation")
    return row.contains("step") ? with_number(kEvaluation, "step") : std::pair(kEvaluation, std::uint64_t{0});
  if (kind == "publication" && !is_snapshot(row)) return with_number(kDelta, "version");
  if (kind == "broadcast" && !is_snapshot(row)) return with_number(kBroadcast, "version");
  return std::nullopt;
}

void FigureFold::count(const json& row) {
  if (const auto found = kind_and_number(row)) repeats_[found->first].add(found->second);
}

void FigureFold::fold(const json& row) {
  RunFigures& f = figures_;
  for (const Alarm& alarm : alarms_.add_row(row)) ++f.alarms[alarm.kind];
  const std::string kind = text(row, "kind");
  if (kind == "publication" && is_snapshot(row)) f.snapshot = row;
  if (kind == "warm_start") f.warm_start = row;
  if (kind == "setting_changed") {
    f.settings_changed.push_back(
        {{"key", row.at("key")}, {"old", row.at("old")}, {"new", row.at("new")}, {"step", row.at("step")}});
    if (f.settings_changed.size() > kSettingChangesReported) f.settings_changed.erase(f.settings_changed.begin());
  }
  if (kind == "evaluation") {
    if (text(row, "when") == "before") f.eval_before = row;
    if (text(row, "when") == "after") f.eval_after = row;
  }
  const auto found = kind_and_number(row);
  if (!found || !repeats_[found->first].is_last(found->second)) return;
  const std::uint64_t n = found->second;
  if (found->first == kStep) add_step(n, row);
  if (found->first == kBroadcast) add_broadcast(n, row);
  if (found->first == kEvaluation && row.contains("accuracy")) {
    json evaluation = {{"step", n}};
    for (const char* key : {"accuracy", "reward_mean", "components"})
      if (row.contains(key)) evaluation[key] = row.at(key);
    f.evaluations.set(n, std::move(evaluation));
  }
  if (found->first == kDelta) {
    ++f.deltas;
    add(f.patch_bytes, row, "patch_bytes");
    add(f.changed_fraction, row, "density");
  }
}

void FigureFold::add_step(std::uint64_t n, const json& row) {
  RunFigures& f = figures_;
  ++f.steps;
  for (const auto& [figure, key] :
       {std::pair(&f.reward, "reward_mean"), std::pair(&f.entropy, "entropy"),
        std::pair(&f.response_tokens_mean, "response_tokens_mean"),
        std::pair(&f.effective, "effective_sample_fraction"), std::pair(&f.gradient_norm, "gradient_norm"),
        std::pair(&f.zero_advantage, "zero_advantage_fraction"), std::pair(&f.clip, "clip_fraction"),
        std::pair(&f.behaviour_kl, "behaviour_kl"), std::pair(&f.reference_kl, "reference_kl")})
    add(*figure, n, row, key);
  add(f.wait_seconds, row, "wait_seconds");
  add(f.step_seconds, row, "step_seconds");
  add(f.train_seconds, row, "train_seconds");
  add(f.publish_seconds, row, "publish_seconds");
  if (const auto ages = row.find("staleness"); ages != row.end() && ages->is_object())
    for (const auto& [age, trajectories] : ages->items()) {
      std::uint64_t age_steps = 0;
      const auto [end, error] = std::from_chars(age.data(), age.data() + age.size(), age_steps);
      if (error != std::errc{} || end != age.data() + age.size() || !trajectories.is_number() ||
          !(trajectories.get<double>() >= 0))
        continue;
      if (f.staleness.size() < kAgesMax || f.staleness.contains(age_steps))
        f.staleness[age_steps] += trajectories.get<std::uint64_t>();
    }
  if (const auto tasks = row.find("by_task"); tasks != row.end() && tasks->is_object())
    for (const auto& [name, task_row] : tasks->items()) {
      if (!task_row.is_object() || !number(task_row, "reward_mean") ||
          (f.by_task.size() >= kTasksMax && !f.by_task.contains(name)))
        continue;
      RunFigures::OfTask& task = f.by_task[name];
      add(task.reward, n, task_row, "reward_mean");
      task.responses += static_cast<std::uint64_t>(number(task_row, "responses").value_or(0));
    }
}

void FigureFold::add_broadcast(std::uint64_t n, const json& row) {
  RunFigures& f = figures_;
  add(f.t_b, row, "t_b_seconds");
  add(f.lower_bound, row, "lower_bound_seconds");
  add(f.predicted, row, "predicted_seconds");
  add(f.workers, n, row, "workers");
  add(f.acknowledged, n, row, "acknowledged");
  const double t_b = number(row, "t_b_seconds").value_or(0);
  const auto parts = row.find("t_b_parts");
  if (!(t_b > 0) || parts == row.end() || !parts->is_object()) return;
  for (const auto& [part, seconds] : parts->items())
    if (seconds.is_number() && (f.part_share_sums.size() < kPartsMax || f.part_share_sums.contains(part)))
      f.part_share_sums[part] += seconds.get<double>() / t_b;
  ++f.broadcasts_with_parts;
}

Result<RunFigures> read_run_figures(const std::filesystem::path& metrics) {
  FigureFold fold;
  ECHO_TRY(each_row(metrics, [&](const json& row) { return fold.count(row), ok(); }));
  ECHO_TRY(each_row(metrics, [&](const json& row) { return fold.fold(row), ok(); }));
  return fold.take();
}

RunFigures run_figures(const std::vector<json>& rows) {
  FigureFold fold;
  for (const json& row : rows) fold.count(row);
  for (const json& row : rows) fold.fold(row);
  return fold.take();
}

}  // namespace echoline::learner
