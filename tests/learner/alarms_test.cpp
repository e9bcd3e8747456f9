// Alarm rules for training that goes wrong, on made-up runs.
#include "learner/alarms.hpp"

#include <gtest/gtest.h>

namespace echoline::learner {
namespace {

using nlohmann::json;

json healthy_row(int step) {
  return {{"kind", "step"},
          {"step", step},
          {"reward_mean", 0.3 + 0.01 * (step % 3)},
          {"accuracy", 0.3 + 0.01 * (step % 3)},
          {"entropy", 1.0},
          {"effective_sample_fraction", 0.9},
          {"response_tokens_mean", 100.0},
          {"truncated_fraction", 0.05},
          {"zero_advantage_fraction", 0.4},
          {"updates_skipped", 0}};
}

// Feeds the rows of steps `first` to `last` with these fields, and returns the alarms. If `first` is 11, it feeds ten
// healthy steps before.
std::vector<Alarm> alarms_of(Alarms& alarms, const json& changed_fields, int first = 11, int last = 25) {
  std::vector<Alarm> raised;
  for (int step = first == 11 ? 1 : first; step <= last; ++step) {
    json row = healthy_row(step);
    if (step > 10) row.update(changed_fields);
    for (Alarm& alarm : alarms.add_row(row)) raised.push_back(std::move(alarm));
  }
  return raised;
}

TEST(Alarms, EachRuleHasItsRunAndAHealthyOneHasNone) {
  const std::pair<const char*, json> cases[] = {
      {"", json::object()},
      {"", {{"entropy", 0.05}, {"accuracy", 0.97}, {"reward_mean", 0.97}}},  // certain, because it can do the task
      {"entropy_collapse", {{"entropy", 0.05}}},
      {"", {{"response_tokens_mean", 250.0}, {"reward_mean", 0.6}, {"accuracy", 0.6}}},  // longer and better
      {"length_explosion", {{"response_tokens_mean", 250.0}, {"reward_mean", 0.3}}},
      {"length_explosion",
       {{"response_tokens_mean", 250.0}, {"reward_mean", 0.6}, {"accuracy", 0.6}, {"truncated_fraction", 0.6}}},
      {"weights_collapse", {{"effective_sample_fraction", 0.1}}},
      {"reward_without_learning", {{"reward_mean", 0.8}}},
      {"nothing_to_learn", {{"zero_advantage_fraction", 0.99}}},
      {"", {{"zero_advantage_fraction", 0.99}, {"accuracy", 0.99}, {"reward_mean", 0.99}}},
      {"updates_skipped", {{"updates_skipped", 1}}},
      {"", {{"zero_advantage_fraction", 1.0}, {"entropy", 0.0}, {"effective_sample_fraction", 0.0}, {"accuracy", 1.0}}},
  };
  for (const auto& [kind, changed_fields] : cases) {
    Alarms alarms;
    const auto raised = alarms_of(alarms, changed_fields);
    ASSERT_EQ(raised.size(), *kind ? 1u : 0u) << changed_fields.dump();
    if (!*kind) continue;
    EXPECT_EQ(raised[0].kind, kind);
    EXPECT_FALSE(raised[0].detail.empty() || raised[0].advice.empty());
    EXPECT_GE(raised[0].step, raised[0].kind == "updates_skipped" ? 13u : 20u);
    EXPECT_EQ(alarms.active_kinds(), std::vector<std::string>{kind});
    // An alarm is raised once, ends with its cause, and is raised again if the cause returns.
    EXPECT_TRUE(alarms_of(alarms, changed_fields, 26, 40).empty());
    EXPECT_TRUE(alarms_of(alarms, json::object(), 41, 60).empty());
    EXPECT_TRUE(alarms.active_kinds().empty());
    EXPECT_EQ(alarms_of(alarms, changed_fields, 61, 80).size(), 1u);
  }
}

TEST(Alarms, HeldOutAccuracyThatStaysWhileTheRewardRises) {
  const json better{{"reward_mean", 0.8}, {"accuracy", 0.8}};
  for (const double after : {0.3, 0.7}) {
    Alarms alarms;
    for (const double accuracy : {0.3, after}) alarms.add_row({{"kind", "evaluation"}, {"accuracy", accuracy}});
    EXPECT_EQ(alarms_of(alarms, better).size(), after == 0.3 ? 1u : 0u);
  }
}

// Another trainer's rows contain only its own measurements, and a step repeated after a crash does not count twice.
TEST(Alarms, MissingMeasurementsRaiseNoAlarm) {
  Alarms alarms;
  for (int step = 1; step <= 40; ++step) {
    EXPECT_TRUE(alarms.add_row({{"kind", "step"}, {"step", step}, {"reward_mean", 0.5}}).empty());
    EXPECT_TRUE(alarms.add_row({{"kind", "step"}, {"step", step}, {"updates_skipped", 1}}).empty());
    EXPECT_TRUE(alarms.add_row({{"kind", "publication"}}).empty());
  }
}

}  // namespace
}  // namespace echoline::learner
