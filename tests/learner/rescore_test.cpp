// Stored rollouts graded again: the same problem, the same turns, and reports of rollouts that cannot be graded.
#include "learner/rescore.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/data_plane/trajectories.hpp"

namespace echoline::learner {
namespace {

using ::testing::HasSubstr;

struct Rescore : ::testing::Test {
  static std::unique_ptr<data_plane::Adapter> made(const char* name, const char* options = "{}") {
    return *data_plane::make_adapter(name, options, 3);
  }
  RescoreTask grader(const data_plane::Adapter& task, const data_plane::Adapter* own = nullptr) {
    return {3, &task, own, [this]() -> Result<const model::Phrasing*> {
              if (!phrasing_) {
                ECHO_ASSIGN(const auto files, model::ModelFiles::of_preset("tiny-64"));
                ECHO_ASSIGN(phrasing_, model::Phrasing::make(files, {}));
              }
              return &*phrasing_;
            }};
  }
  static schema::Trajectory rollout(const data_plane::Adapter& task, std::uint64_t group, const std::string& text) {
    schema::Trajectory t = data_plane::sound_trajectory(group, 0, 1, group);
    t.set_problem_id(task.problem(group)->id());
    t.set_text(text);
    t.clear_components();
    const auto score = *task.score(*task.problem(group), text);
    t.set_reward(score.reward);
    t.set_correct(score.correct);
    for (const auto& [name, value] : score.components) (*t.mutable_components())[name] = value;
    return t;
  }
  std::optional<model::Phrasing> phrasing_;
};

TEST_F(Rescore, TheSameTaskAgrees) {
  const auto task = made("arithmetic");
  RescoreSums sums;
  for (std::uint64_t group = 0; group < 20; ++group) {
    const auto t = rollout(*task, group, group % 2 == 0 ? task->problem(group)->reference() : "x");
    EXPECT_EQ(sums.add(t, grade_again(grader(*task), t)), true);
  }
  const RescoreSum sum = sums.sum();
  EXPECT_EQ(sum.graded, 20u);
  EXPECT_EQ(sum.agree, 20u);
  EXPECT_EQ(sum.components_differ, 0u);
  EXPECT_DOUBLE_EQ(sum.reward_old, 0.5);
  EXPECT_DOUBLE_EQ(sum.correct_new, 0.5);
  EXPECT_DOUBLE_EQ(sum.parts.at("exact").mean_new, 0.5);
}

TEST_F(Rescore, AnotherTaskGradesTheRunsProblems) {
  const auto own = made("arithmetic");
  const auto rule =
      *data_plane::make_adapter("jsonl", R"({"rule": "last_number"})", 3, data_plane::AdapterUse::kScoring);
  const auto t = rollout(*own, 4, "it is " + own->problem(4)->reference() + ".");
  EXPECT_FALSE(t.correct());
  RescoreSums sums;
  EXPECT_EQ(sums.add(t, grade_again(grader(*rule, own.get()), t)), false);
  EXPECT_DOUBLE_EQ(sums.sum().reward_new, 1);
  EXPECT_EQ(sums.sum().parts.at("exact").rollouts_new, 0u);
}

TEST_F(Rescore, NamesTheReasonForAMissingGrade) {
  const auto task = made("arithmetic");
  auto t = rollout(*task, 4, "1");
  t.set_problem_id("arithmetic/of another run");
  RescoreSums sums;
  EXPECT_FALSE(sums.add(t, grade_again(grader(*task), t)));
  EXPECT_EQ(sums.sum().graded, 0u);
  EXPECT_THAT(sums.sum().ungraded.begin()->first, HasSubstr("its problem is not known"));
  for (int i = 0; i < 100; ++i) (void)sums.add(t, fail(Code::kUnavailable, "task", "reason {}", i));
  EXPECT_LE(sums.sum().ungraded.size(), 17u);
  EXPECT_EQ(sums.sum().ungraded.at("others"), 85u);
}

TEST_F(Rescore, EpisodesGoTurnByTurn) {
  const auto task = made("guess");
  RescoreTask g = grader(*task);
  const auto& phrasing = **g.phrasing();
  schema::Trajectory t = rollout(*made("arithmetic"), 2, "");
  t.set_problem_id(task->problem(2)->id());
  const std::string wanted = task->problem(2)->reference();
  t.clear_response_tokens(), t.clear_loss_mask(), t.clear_logprobs();
  const auto say = [&](const std::string& text, std::uint32_t mask) {
    std::vector<model::Token> tokens = *phrasing.tokenizer().encode(text);
    if (mask == 1) tokens.push_back(phrasing.eos().front());
    for (const model::Token token : tokens)
      t.add_response_tokens(static_cast<std::uint32_t>(token)), t.add_loss_mask(mask), t.add_logprobs(0);
  };
  say("999", 1), say("-", 0), say(wanted, 1);
  auto again = grade_again(g, t);
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(again->turns, 2u);
  EXPECT_TRUE(again->score.correct);
  EXPECT_DOUBLE_EQ(again->score.reward, 0.95);
  say("-", 0), say("1", 1);
  again = grade_again(g, t);
  ASSERT_TRUE(again);
  EXPECT_TRUE(again->ended_early) << "the episode ended after two of three";
  say("-", 0);
  EXPECT_THAT(grade_again(g, t).error().message(), HasSubstr("loss mask"));
}

}  // namespace
}  // namespace echoline::learner
