// Finds signs of trouble in a run's measurements. RunRecord and the report call it for every row.
#include "learner/alarms.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace echoline::learner {
namespace {

constexpr std::size_t kWindow = 10;        // the first 10 steps are compared with the last 10
constexpr std::size_t kSkippedInARow = 3;  // an alarm begins after so many steps with a skipped update
// Alarms begin below kEntropyShareMin times the entropy of the first steps, and above kLengthFactor times their length.
constexpr double kEntropyShareMin = 0.1, kLengthFactor = 2;
// Alarms begin below these shares: of effective tokens, and of informative groups.
constexpr double kEffectiveShareMin = 0.3, kInformativeShareMin = 0.05;
constexpr double kTruncatedShareMax = 0.5;  // a larger share of truncated responses is not normal
// Above this accuracy, low entropy and few differences are normal.
constexpr double kSolvedAccuracyMin = 0.9;
// A larger gain in accuracy counts as learning.
constexpr double kAccuracyGainMin = 0.01;
// A reward has risen if it exceeds the first steps' mean by 5 of their standard deviations, and by a tenth of the mean.
constexpr double kRewardDeviationsMin = 5, kRewardRiseMin = 0.1;

// 0 if the row has no such number, because a trainer omits figures that it does not know.
double number_or_0(const nlohmann::json& row, const char* key) {
  const auto it = row.find(key);
  return it != row.end() && it->is_number() ? it->get<double>() : 0.0;
}

}  // namespace

std::optional<double> Alarms::mean(const Steps& steps, std::optional<double> (*value)(const Step&)) {
  double sum = 0;
  std::size_t count = 0;
  for (const Step& step : steps)
    if (const auto figure = value(step)) {
      sum += *figure;
      ++count;
    }
  return count ? std::optional(sum / static_cast<double>(count)) : std::nullopt;
}

std::vector<std::string> Alarms::active_kinds() const {
  std::vector<std::string> kinds;
  for (const auto& [kind, is_active] : active_)
    if (is_active) kinds.push_back(kind);
  return kinds;
}

std::vector<Alarm> Alarms::add_row(const nlohmann::json& row) {
  std::vector<Alarm> new_alarms;
  const auto kind = row.value("kind", "");
  if (kind == "evaluation") {
    std::optional<double>& accuracy = held_out_first_ ? held_out_last_ : held_out_first_;
    accuracy = number_or_0(row, "accuracy");
    return new_alarms;
  }
  const auto step = static_cast<std::uint64_t>(number_or_0(row, "step"));
  if (kind != "step" || step <= newest_step_) return new_alarms;  // steps repeated after a resume count once
  newest_step_ = step;
  Step measured;
  measured.reward = number_or_0(row, "reward_mean");
  measured.accuracy = number_or_0(row, "accuracy");
  measured.length_tokens = number_or_0(row, "response_tokens_mean");
  measured.truncated_share = number_or_0(row, "truncated_fraction");
  measured.informative_share = 1 - number_or_0(row, "zero_advantage_fraction");
  measured.skipped_update = number_or_0(row, "updates_skipped") > 0;
  // Without informative groups, these two figures may be 0 only because no token was trained on.
  if (measured.informative_share > 0 && row.contains("entropy")) measured.entropy = number_or_0(row, "entropy");
  if (measured.informative_share > 0 && row.contains("effective_sample_fraction"))
    measured.effective_share = number_or_0(row, "effective_sample_fraction");
  if (first_steps_.size() < kWindow) first_steps_.push_back(measured);
  last_steps_.push_back(measured);
  if (last_steps_.size() > kWindow) last_steps_.pop_front();
  find_new_alarms(step, new_alarms);
  return new_alarms;
}

void Alarms::find_new_alarms(std::uint64_t step, std::vector<Alarm>& new_alarms) {
  const auto update_alarm = [&](const char* kind, bool applies, const std::string& detail, const char* advice) {
    bool& is_active = active_[kind];
    if (applies && !is_active) new_alarms.push_back({.kind = kind, .step = step, .detail = detail, .advice = advice});
    is_active = applies;
  };
  update_alarm("updates_skipped",
               last_steps_.size() >= kSkippedInARow &&
                   std::all_of(last_steps_.end() - kSkippedInARow, last_steps_.end(),
                               [](const Step& step_figures) { return step_figures.skipped_update; }),
               fmt::format("gradients of {} steps in a row were not finite and changed nothing", kSkippedInARow),
               "go back to a checkpoint (--resume) with a lower learner.learning_rate");
  // Before that many steps, the first and the last ones overlap.
  if (newest_step_ < 2 * kWindow || first_steps_.size() < kWindow) return;

  // Every step has a reward, an accuracy and a length, so their means are present.
  const auto reward = [](const Step& step_figures) { return std::optional(step_figures.reward); };
  const auto accuracy = [](const Step& step_figures) { return std::optional(step_figures.accuracy); };
  const auto length = [](const Step& step_figures) { return std::optional(step_figures.length_tokens); };
  const double reward_then = *mean(first_steps_, reward), reward_now = *mean(last_steps_, reward);
  const double accuracy_then = *mean(first_steps_, accuracy), accuracy_now = *mean(last_steps_, accuracy);
  const double length_then = *mean(first_steps_, length), length_now = *mean(last_steps_, length);
  const double truncated_now =
      *mean(last_steps_, [](const Step& step_figures) { return std::optional(step_figures.truncated_share); });
  const double informative_now =
      *mean(last_steps_, [](const Step& step_figures) { return std::optional(step_figures.informative_share); });
  const auto entropy_then = mean(first_steps_, [](const Step& step_figures) { return step_figures.entropy; });
  const auto entropy_now = mean(last_steps_, [](const Step& step_figures) { return step_figures.entropy; });
  const auto effective_now = mean(last_steps_, [](const Step& step_figures) { return step_figures.effective_share; });
  double variance = 0;
  for (const Step& first : first_steps_)
    variance += (first.reward - reward_then) * (first.reward - reward_then) / kWindow;
  const double reward_rise_min =
      std::max(kRewardDeviationsMin * std::sqrt(variance), kRewardRiseMin * std::abs(reward_then));

  update_alarm("entropy_collapse",
               entropy_then && entropy_now && *entropy_now < kEntropyShareMin * *entropy_then &&
                   accuracy_now < kSolvedAccuracyMin,
               fmt::format("entropy {:.3g}, at first {:.3g}; accuracy {:.3f}", entropy_now.value_or(0),
                           entropy_then.value_or(0), accuracy_now),
               "the policy has stopped exploring: raise learner.clip_high, or keep it near the reference "
               "(learner.kl_coefficient), and lower learner.learning_rate");
  update_alarm(
      "length_explosion",
      length_now > kLengthFactor * length_then && (reward_now <= reward_then || truncated_now > kTruncatedShareMax),
      fmt::format("{:.1f} tokens a response, at first {:.1f}; {:.0f} % cut; reward {:.3f}, at first {:.3f}", length_now,
                  length_then, 100 * truncated_now, reward_now, reward_then),
      "the reward favours long responses, or success is cut off: set learner.truncated to mask or penalty, or use "
      "learner.loss dr_grpo");
  update_alarm(
      "weights_collapse", effective_now && *effective_now < kEffectiveShareMin,
      fmt::format("an effective sample of {:.0f} % of the tokens", 100 * effective_now.value_or(0)),
      "the policy is far from the one that drew the tokens: lower staleness.budget or learner.learning_rate, or use "
      "learner.loss m2po. If it happens with a budget of 0, workers compute other probabilities than the learner");
  const bool held_out_does_not_rise = held_out_last_ && *held_out_last_ <= *held_out_first_ + kAccuracyGainMin;
  const bool reward_rises = reward_now > reward_then + reward_rise_min;
  update_alarm(
      "reward_without_learning",
      reward_rises && (accuracy_now <= accuracy_then + kAccuracyGainMin || held_out_does_not_rise),
      fmt::format("reward {:.3f}, at first {:.3f}; accuracy {:.3f}, at first {:.3f}{}", reward_now, reward_then,
                  accuracy_now, accuracy_then,
                  held_out_last_ ? fmt::format("; held out {:.3f}, at first {:.3f}", *held_out_last_, *held_out_first_)
                                 : std::string()),
      "the reward rises without more solved problems: read the model's responses (echoline model generate) and "
      "correct the reward");
  update_alarm("nothing_to_learn", informative_now < kInformativeShareMin && accuracy_now < kSolvedAccuracyMin,
               fmt::format("{:.1f} % of the groups have rewards that differ; accuracy {:.3f}", 100 * informative_now,
                           accuracy_now),
               "problems are too hard or too easy for this policy: choose others, raise rollout.group_size or "
               "rollout.temperature, or begin with a warm start");
}

}  // namespace echoline::learner
