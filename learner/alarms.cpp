// Finds signs of trouble in a run's measurements. RunRecord and the report call it for every row.
#include "learner/alarms.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace echoline::learner {
namespace {

constexpr std::size_t kWindow = 10;                            // steps
constexpr std::size_t kSkippedInARow = 3;                      // updates
constexpr double kEntropyShare = 0.1, kLengthFactor = 2;       // of the first steps' means
constexpr double kEffectiveMin = 0.3, kInformativeMin = 0.05;  // shares of the tokens and of the groups
constexpr double kTruncatedMany = 0.5;                         // of the responses
constexpr double kSolved = 0.9;       // above this accuracy, low entropy and few differences are normal
constexpr double kLearned = 0.01;     // a larger gain in accuracy counts as learning
constexpr double kRewardSpreads = 5;  // the rise of a reward, in spreads of the first steps, that counts as risen

double number(const nlohmann::json& row, const char* key) {
  const auto it = row.find(key);
  return it != row.end() && it->is_number() ? it->get<double>() : 0.0;
}

}  // namespace

std::optional<double> Alarms::mean(const Steps& steps, std::optional<double> (*value)(const Step&)) {
  double sum = 0;
  std::size_t count = 0;
  for (const Step& step : steps)
    if (const auto v = value(step)) sum += *v, ++count;
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
    (held_out_first_ ? held_out_last_ : held_out_first_) = number(row, "accuracy");
    return new_alarms;
  }
  const auto step = static_cast<std::uint64_t>(number(row, "step"));
  if (kind != "step" || step <= newest_step_) return new_alarms;
  newest_step_ = step;
  Step s;
  s.reward = number(row, "reward_mean");
  s.accuracy = number(row, "accuracy");
  s.length = number(row, "response_tokens_mean");
  s.truncated = number(row, "truncated_fraction");
  s.informative = 1 - number(row, "zero_advantage_fraction");
  s.skipped = number(row, "updates_skipped") > 0;
  if (s.informative > 0 && row.contains("entropy")) s.entropy = number(row, "entropy");
  if (s.informative > 0 && row.contains("effective_sample_fraction"))
    s.effective = number(row, "effective_sample_fraction");
  if (first_.size() < kWindow) first_.push_back(s);
  last_.push_back(s);
  if (last_.size() > kWindow) last_.pop_front();
  find_new_alarms(step, new_alarms);
  return new_alarms;
}

void Alarms::find_new_alarms(std::uint64_t step, std::vector<Alarm>& new_alarms) {
  const auto apply_rule = [&](const char* kind, bool applies, const std::string& detail, const char* advice) {
    bool& is_active = active_[kind];
    if (applies && !is_active) new_alarms.push_back({kind, step, detail, advice});
    is_active = applies;
  };
  const auto skipped = std::min(last_.size(), kSkippedInARow);
  apply_rule("updates_skipped",
             skipped == kSkippedInARow &&
                 std::all_of(last_.end() - kSkippedInARow, last_.end(), [](const Step& s) { return s.skipped; }),
             fmt::format("gradients of {} steps in a row were not finite and changed nothing", kSkippedInARow),
             "go back to a checkpoint (--resume) with a lower learner.learning_rate");
  if (newest_step_ < 2 * kWindow || first_.size() < kWindow) return;

  const auto reward = [](const Step& s) { return std::optional(s.reward); };
  const auto accuracy = [](const Step& s) { return std::optional(s.accuracy); };
  const auto length = [](const Step& s) { return std::optional(s.length); };
  const double reward_then = *mean(first_, reward), reward_now = *mean(last_, reward);
  const double accuracy_then = *mean(first_, accuracy), accuracy_now = *mean(last_, accuracy);
  const double length_then = *mean(first_, length), length_now = *mean(last_, length);
  const double truncated_now = *mean(last_, [](const Step& s) { return std::optional(s.truncated); });
  const double informative_now = *mean(last_, [](const Step& s) { return std::optional(s.informative); });
  const auto entropy_then = mean(first_, [](const Step& s) { return s.entropy; });
  const auto entropy_now = mean(last_, [](const Step& s) { return s.entropy; });
  const auto effective_now = mean(last_, [](const Step& s) { return s.effective; });
  double spread = 0;
  for (const Step& s : first_) spread += (s.reward - reward_then) * (s.reward - reward_then) / kWindow;
  const double risen_by = std::max(kRewardSpreads * std::sqrt(spread), 0.1 * std::abs(reward_then));

  apply_rule("entropy_collapse",
             entropy_then && entropy_now && *entropy_now < kEntropyShare * *entropy_then && accuracy_now < kSolved,
             fmt::format("entropy {:.3g}, at first {:.3g}; accuracy {:.3f}", entropy_now.value_or(0),
                         entropy_then.value_or(0), accuracy_now),
             "the policy has stopped exploring: raise learner.clip_high, or keep it near the reference "
             "(learner.kl_coefficient), and lower learner.learning_rate");
  apply_rule(
      "length_explosion",
      length_now > kLengthFactor * length_then && (reward_now <= reward_then || truncated_now > kTruncatedMany),
      fmt::format("{:.1f} tokens a response, at first {:.1f}; {:.0f} % cut; reward {:.3f}, at first {:.3f}", length_now,
                  length_then, 100 * truncated_now, reward_now, reward_then),
      "the reward favours long responses, or success is cut off: set learner.truncated to mask or penalty, or use "
      "learner.loss dr_grpo");
  apply_rule(
      "weights_collapse", effective_now && *effective_now < kEffectiveMin,
      fmt::format("an effective sample of {:.0f} % of the tokens", 100 * effective_now.value_or(0)),
      "the policy is far from the one that drew the tokens: lower staleness.budget or learner.learning_rate, or use "
      "learner.loss m2po. If it happens with a budget of 0, workers compute other probabilities than the learner");
  const bool held_out_does_not_rise = held_out_last_ && *held_out_last_ <= *held_out_first_ + kLearned;
  const bool reward_rises = reward_now > reward_then + risen_by;
  apply_rule(
      "reward_without_learning", reward_rises && (accuracy_now <= accuracy_then + kLearned || held_out_does_not_rise),
      fmt::format("reward {:.3f}, at first {:.3f}; accuracy {:.3f}, at first {:.3f}{}", reward_now, reward_then,
                  accuracy_now, accuracy_then,
                  held_out_last_ ? fmt::format("; held out {:.3f}, at first {:.3f}", *held_out_last_, *held_out_first_)
                                 : std::string()),
      "the reward rises without more solved problems: read the model's responses (echoline model generate) and "
      "correct the reward");
  apply_rule("nothing_to_learn", informative_now < kInformativeMin && accuracy_now < kSolved,
             fmt::format("{:.1f} % of the groups have rewards that differ; accuracy {:.3f}", 100 * informative_now,
                         accuracy_now),
             "problems are too hard or too easy for this policy: choose others, raise rollout.group_size or "
             "rollout.temperature, or begin with a warm start");
}

}  // namespace echoline::learner
