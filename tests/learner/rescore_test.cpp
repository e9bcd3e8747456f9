// Stored rollouts graded again: the same problem, the same turns, and reports of rollouts that cannot be graded.
#include "learner/rescore.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/data_plane/trajectories.hpp"

namespace echoline::learner {
namespace {

using ::testing::HasSubstr;

struct Rescore : ::testing::Test {
  static std::unique_ptr<data_plane::Adapter> adapter(const char* name, const char* options = "{}") {
    return *data_plane::make_adapter(name, options, 3);
  }
  RescoreTask grader(const data_plane::Adapter& task, const data_plane::Adapter* own = nullptr) {
    return {.seed = 3, .task = &task, .problems = own, .phrasing = [this]() -> Result<const model::Phrasing*> {
              if (!phrasing_) {
                ECHO_ASSIGN(const auto files, model::ModelFiles::of_preset("tiny-64"));
                ECHO_ASSIGN(phrasing_, model::Phrasing::make(files, {}));
              }
              return &*phrasing_;
            }};
  }
  static schema::Trajectory rollout(const data_plane::Adapter& task, std::uint64_t group, const std::string& text) {
    schema::Trajectory trajectory = data_plane::sound_trajectory(group, 0, 1, group);
    trajectory.set_problem_id(task.problem(group)->id());
    trajectory.set_text(text);
    trajectory.clear_components();
    const auto score = *task.score(*task.problem(group), text);
    trajectory.set_reward(score.reward);
    trajectory.set_correct(score.correct);
    for (const auto& [name, value] : score.components) (*trajectory.mutable_components())[name] = value;
    return trajectory;
  }
  std::optional<model::Phrasing> phrasing_;
};

TEST_F(Rescore, TheSameTaskAgrees) {
  const auto task = adapter("arithmetic");
  RescoreTally tally;
  for (std::uint64_t group = 0; group < 20; ++group) {
    const auto trajectory = rollout(*task, group, group % 2 == 0 ? task->problem(group)->reference() : "x");
    EXPECT_EQ(tally.add(trajectory, grade_again(grader(*task), trajectory)), true);
  }
  const RescoreResult result = tally.result();
  EXPECT_EQ(result.graded, 20u);
  EXPECT_EQ(result.agree, 20u);
  EXPECT_EQ(result.components_differ, 0u);
  EXPECT_DOUBLE_EQ(result.reward_old, 0.5);
  EXPECT_DOUBLE_EQ(result.correct_new, 0.5);
  EXPECT_DOUBLE_EQ(result.parts.at("exact").mean_new, 0.5);
}

TEST_F(Rescore, AnotherTaskGradesTheRunsProblems) {
  const auto own = adapter("arithmetic");
  const auto rule =
      *data_plane::make_adapter("jsonl", R"({"rule": "last_number"})", 3, data_plane::AdapterUse::kScoring);
  const auto trajectory = rollout(*own, 4, "it is " + own->problem(4)->reference() + ".");
  EXPECT_FALSE(trajectory.correct());
  RescoreTally tally;
  EXPECT_EQ(tally.add(trajectory, grade_again(grader(*rule, own.get()), trajectory)), false);
  EXPECT_DOUBLE_EQ(tally.result().reward_new, 1);
  EXPECT_EQ(tally.result().parts.at("exact").rollouts_new, 0u);
}

TEST_F(Rescore, NamesTheReasonForAMissingGrade) {
  const auto task = adapter("arithmetic");
  auto trajectory = rollout(*task, 4, "1");
  trajectory.set_problem_id("arithmetic/of another run");
  RescoreTally tally;
  EXPECT_FALSE(tally.add(trajectory, grade_again(grader(*task), trajectory)));
  EXPECT_EQ(tally.result().graded, 0u);
  EXPECT_THAT(tally.result().ungraded.begin()->first, HasSubstr("its problem is not known"));
  for (int i = 0; i < 100; ++i) (void)tally.add(trajectory, fail(Code::kUnavailable, "task", "reason {}", i));
  EXPECT_LE(tally.result().ungraded.size(), 17u);
  EXPECT_EQ(tally.result().ungraded.at("others"), 85u);
}

TEST_F(Rescore, EpisodesGoTurnByTurn) {
  const auto task = adapter("guess");
  RescoreTask rescore_task = grader(*task);
  const auto& phrasing = **rescore_task.phrasing();
  schema::Trajectory trajectory = rollout(*adapter("arithmetic"), 2, "");
  trajectory.set_problem_id(task->problem(2)->id());
  const std::string number = task->problem(2)->reference();
  trajectory.clear_response_tokens(), trajectory.clear_loss_mask(), trajectory.clear_logprobs();
  const auto add_turn = [&](const std::string& text, std::uint32_t mask) {
    std::vector<model::Token> tokens = *phrasing.tokenizer().encode(text);
    if (mask == 1) tokens.push_back(phrasing.eos().front());
    for (const model::Token token : tokens)
      trajectory.add_response_tokens(static_cast<std::uint32_t>(token)), trajectory.add_loss_mask(mask),
          trajectory.add_logprobs(0);
  };
  add_turn("999", 1), add_turn("-", 0), add_turn(number, 1);
  auto grade = grade_again(rescore_task, trajectory);
  ASSERT_TRUE(grade) << grade.error().message();
  EXPECT_EQ(grade->turns, 2u);
  EXPECT_TRUE(grade->score.correct);
  EXPECT_DOUBLE_EQ(grade->score.reward, 0.95);
  add_turn("-", 0), add_turn("1", 1);
  grade = grade_again(rescore_task, trajectory);
  ASSERT_TRUE(grade);
  EXPECT_TRUE(grade->ended_early) << "the episode ended after two of three";
  add_turn("-", 0);
  EXPECT_THAT(grade_again(rescore_task, trajectory).error().message(), HasSubstr("loss mask"));
}

}  // namespace
}  // namespace echoline::learner
