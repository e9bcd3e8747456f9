// Aggregates metrics.jsonl, for the report.
#include "learner/run_figures.hpp"

#include <charconv>

#include "learner/row_file.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;

constexpr std::uint64_t kNumbersMax = 10'000'000;                                    // most learner steps of a run file
constexpr std::size_t kStalenessValuesMax = 4096, kTasksMax = 1024, kPartsMax = 64;  // bound memory for damaged files

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
// `row_number`: the row's step or version.
void add(MetricSummary& figure, std::uint64_t row_number, const json& row, const char* key) {
  if (const auto value = number(row, key)) figure.add(row_number, *value);
}

}  // namespace

void MetricSummary::add(std::uint64_t number, double value) {
  totals.add(value);
  if (!first || number <= first->first) first = {number, value};
  if (!last || number >= last->first) last = {number, value};
}

void ThinnedRows::set(std::uint64_t number, json row) {
  // A row is kept if its number is a multiple of every_, or the newest.
  const auto is_kept = [&](std::uint64_t entry) { return entry % every_ == 0 || entry == rows_.rbegin()->first; };
  const std::optional<std::uint64_t> newest_before =
      rows_.empty() ? std::nullopt : std::optional(rows_.rbegin()->first);
  rows_[number] = std::move(row);
  // Other rows were multiples before, and still are.
  for (const std::uint64_t entry : {newest_before.value_or(number), number})
    if (!is_kept(entry)) rows_.erase(entry);
  while (rows_.size() > rows_max_) {
    every_ *= 2;
    const std::uint64_t newest = rows_.rbegin()->first;
    std::erase_if(rows_, [&](const auto& entry) { return entry.first % every_ != 0 && entry.first != newest; });
  }
}

void FigureAggregator::Repeats::add(std::uint64_t number) {
  if (rows_left_.size() <= number) rows_left_.resize(number + 1);
  if (rows_left_[number] < UINT16_MAX) ++rows_left_[number];  // no run repeats a step more often
}

bool FigureAggregator::Repeats::is_last(std::uint64_t number) {
  return number < rows_left_.size() && rows_left_[number] > 0 && --rows_left_[number] == 0;
}

std::optional<std::pair<FigureAggregator::Kind, std::uint64_t>> FigureAggregator::kind_and_number(const json& row) {
  const std::string kind = text(row, "kind");
  const auto with_number = [&](Kind row_kind, const char* key) -> std::optional<std::pair<Kind, std::uint64_t>> {
    const auto row_number = number(row, key);
    if (!row_number || !(*row_number >= 0 && *row_number <= kNumbersMax)) return std::nullopt;
    return std::pair(row_kind, static_cast<std::uint64_t>(*row_number));
  };
  if (kind == "step") return with_number(kStep, "step");
  if (kind == "evaluation")  // without a step: before the first one
    return row.contains("step") ? with_number(kEvaluation, "step") : std::pair(kEvaluation, std::uint64_t{0});
  if (kind == "publication" && !is_snapshot(row)) return with_number(kDelta, "version");
  if (kind == "broadcast" && !is_snapshot(row)) return with_number(kBroadcast, "version");
  return std::nullopt;
}

void FigureAggregator::count_row(const json& row) {
  if (const auto numbered = kind_and_number(row)) repeats_[numbered->first].add(numbered->second);
}

void FigureAggregator::add_row(const json& row) {
  RunFigures& figures = figures_;
  for (const Alarm& alarm : alarms_.add_row(row)) ++figures.alarms[alarm.kind];
  const std::string kind = text(row, "kind");
  if (kind == "publication" && is_snapshot(row)) figures.snapshot = row;
  if (kind == "warm_start") figures.warm_start = row;
  if (kind == "setting_changed") {
    figures.settings_changed.push_back(
        {{"key", row.at("key")}, {"old", row.at("old")}, {"new", row.at("new")}, {"step", row.at("step")}});
    if (figures.settings_changed.size() > kSettingChangesReported)
      figures.settings_changed.erase(figures.settings_changed.begin());
  }
  if (kind == "evaluation") {
    if (text(row, "when") == "before") figures.eval_before = row;
    if (text(row, "when") == "after") figures.eval_after = row;
  }
  // Only the last of several rows with one number counts.
  const auto numbered = kind_and_number(row);
  if (!numbered || !repeats_[numbered->first].is_last(numbered->second)) return;
  const auto [numbered_kind, row_number] = *numbered;
  if (numbered_kind == kStep) add_step(row_number, row);
  if (numbered_kind == kBroadcast) add_broadcast(row_number, row);
  if (numbered_kind == kEvaluation && row.contains("accuracy")) {
    json evaluation = {{"step", row_number}};
    for (const char* key : {"accuracy", "reward_mean", "components"})
      if (row.contains(key)) evaluation[key] = row.at(key);
    figures.evaluations.set(row_number, std::move(evaluation));
  }
  if (numbered_kind == kDelta) {
    ++figures.deltas;
    add(figures.patch_bytes, row, "patch_bytes");
    add(figures.changed_fraction, row, "density");
  }
}

void FigureAggregator::add_step(std::uint64_t step, const json& row) {
  RunFigures& figures = figures_;
  ++figures.steps;
  for (const auto& [figure, key] :
       {std::pair(&figures.reward, "reward_mean"), std::pair(&figures.entropy, "entropy"),
        std::pair(&figures.response_tokens_mean, "response_tokens_mean"),
        std::pair(&figures.effective, "effective_sample_fraction"), std::pair(&figures.gradient_norm, "gradient_norm"),
        std::pair(&figures.zero_advantage, "zero_advantage_fraction"), std::pair(&figures.clip, "clip_fraction"),
        std::pair(&figures.behaviour_kl, "behaviour_kl"), std::pair(&figures.reference_kl, "reference_kl")})
    add(*figure, step, row, key);
  add(figures.wait_seconds, row, "wait_seconds");
  add(figures.step_seconds, row, "step_seconds");
  add(figures.train_seconds, row, "train_seconds");
  add(figures.publish_seconds, row, "publish_seconds");
  if (const auto counts = row.find("staleness"); counts != row.end() && counts->is_object())
    for (const auto& [staleness_text, trajectories] : counts->items()) {
      std::uint64_t staleness = 0;
      const auto [end, error] =
          std::from_chars(staleness_text.data(), staleness_text.data() + staleness_text.size(), staleness);
      if (error != std::errc{} || end != staleness_text.data() + staleness_text.size() || !trajectories.is_number() ||
          !(trajectories.get<double>() >= 0))
        continue;
      if (figures.staleness.size() < kStalenessValuesMax || figures.staleness.contains(staleness))
        figures.staleness[staleness] += trajectories.get<std::uint64_t>();
    }
  if (const auto tasks = row.find("by_task"); tasks != row.end() && tasks->is_object())
    for (const auto& [name, task_row] : tasks->items()) {
      if (!task_row.is_object() || !number(task_row, "reward_mean") ||
          (figures.by_task.size() >= kTasksMax && !figures.by_task.contains(name)))
        continue;
      RunFigures::TaskSeries& task = figures.by_task[name];
      add(task.reward, step, task_row, "reward_mean");
      task.responses += static_cast<std::uint64_t>(number(task_row, "responses").value_or(0));
    }
}

void FigureAggregator::add_broadcast(std::uint64_t version, const json& row) {
  RunFigures& figures = figures_;
  add(figures.t_b, row, "t_b_seconds");
  add(figures.lower_bound, row, "lower_bound_seconds");
  add(figures.predicted, row, "predicted_seconds");
  add(figures.workers, version, row, "workers");
  add(figures.acknowledged, version, row, "acknowledged");
  const double t_b = number(row, "t_b_seconds").value_or(0);
  const auto parts = row.find("t_b_parts");
  if (!(t_b > 0) || parts == row.end() || !parts->is_object()) return;
  for (const auto& [part, seconds] : parts->items())
    if (seconds.is_number() && (figures.part_share_sums.size() < kPartsMax || figures.part_share_sums.contains(part)))
      figures.part_share_sums[part] += seconds.get<double>() / t_b;
  ++figures.broadcasts_with_parts;
}

Result<RunFigures> read_run_figures(const std::filesystem::path& metrics) {
  FigureAggregator aggregator;
  ECHO_TRY(each_row(metrics, [&](const json& row) {
    aggregator.count_row(row);
    return ok();
  }));
  ECHO_TRY(each_row(metrics, [&](const json& row) {
    aggregator.add_row(row);
    return ok();
  }));
  return aggregator.take_figures();
}

RunFigures run_figures(const std::vector<json>& rows) {
  FigureAggregator aggregator;
  for (const json& row : rows) aggregator.count_row(row);
  for (const json& row : rows) aggregator.add_row(row);
  return aggregator.take_figures();
}

}  // namespace echoline::learner
