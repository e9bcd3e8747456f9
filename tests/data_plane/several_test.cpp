// Several tasks as one: each task's share, the task of a problem, and the tasks that workers see.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

const WeightedTask kSums{"sums", "arithmetic", R"({"operations": ["+"]})", 3, "Sum: {prompt}!", true};
const WeightedTask kGames{"games", "guess", "{}", 1, "{prompt}", true};
const WeightedTask kSecret{"secret", "arithmetic", R"({"operations": ["*"]})", 2, "{prompt}", false};

std::unique_ptr<Adapter> make_valid(const std::vector<WeightedTask>& tasks, std::uint64_t seed = 1,
                                    AdapterUse use = AdapterUse::kProblems) {
  auto adapter = make_adapter(kSeveralTasksAdapter, several_tasks_options(tasks), seed, use);
  EXPECT_TRUE(adapter) << adapter.error().message();
  return adapter ? *std::move(adapter) : nullptr;
}

TEST(Several, ProblemsAreDrawnByWeightAndFollowFromSeedAndIndexAlone) {
  const auto adapter = make_valid({kSums, kGames, kSecret}), again = make_valid({kSums, kGames, kSecret}),
             other = make_valid({kSums, kGames, kSecret}, 2);
  std::map<std::string, int> drawn;
  std::set<std::string> orders;
  bool differs = false;
  for (std::uint64_t round = 0; round < 50; ++round) {
    std::map<std::string, int> in_round;
    std::string order;
    for (std::uint64_t index = 6 * round; index < 6 * round + 6; ++index) {
      const Problem problem = *adapter->problem(index);
      EXPECT_EQ(problem.SerializeAsString(), again->problem(index)->SerializeAsString());
      differs = differs || problem.id() != other->problem(index)->id();
      const std::string task(task_of(problem.id()));
      ++drawn[task], ++in_round[task];
      order += task.substr(0, 2);
    }
    orders.insert(order);
    EXPECT_EQ(in_round, (std::map<std::string, int>{{"sums", 3}, {"games", 1}, {"secret", 2}}))
        << "every round has the weights";
  }
  EXPECT_TRUE(differs);
  EXPECT_GT(orders.size(), 10u) << "rounds have orders of their own";
  EXPECT_EQ(drawn["sums"], 150);
}

// Every problem of a task comes once before any comes again.
TEST(Several, EveryTaskGoesThroughItsProblems) {
  const auto alone = *make_adapter("arithmetic", R"({"operations": ["+"], "operand_max": 30})", 7);
  WeightedTask few = kSums;
  few.options_json = R"({"operations": ["+"], "operand_max": 30})", few.weight = 400, few.prompt = "{prompt}";
  WeightedTask half = kGames;
  half.weight = 600;  // 2 to 3, once the common divisor is out
  const auto adapter = make_valid({few, half}, 7);
  std::multiset<std::string> expected, found;
  for (std::uint64_t i = 0; i < 200; ++i) expected.insert("sums:" + alone->problem(i)->id());
  for (std::uint64_t i = 0; i < 500; ++i)
    if (const Problem problem = *adapter->problem(i); task_of(problem.id()) == "sums") found.insert(problem.id());
  EXPECT_EQ(found, expected);
}

TEST(Several, EachTaskScoresItsOwn) {
  const auto adapter = make_valid({kSums, kGames});
  bool sum = false, game = false;
  for (std::uint64_t i = 0; i < 8; ++i) {
    const Problem problem = *adapter->problem(i);
    const auto episode = *adapter->begin(problem, 3);
    const Step step = *step_and_wait(*episode, problem.reference());
    EXPECT_TRUE(step.score.correct) << problem.id();
    EXPECT_EQ(adapter->repeatable(problem), Repeatable::kCheaply);
    if (task_of(problem.id()) == "sums") {
      sum = true;
      EXPECT_THAT(problem.prompt(), ::testing::StartsWith("Sum: "));
      EXPECT_THAT(problem.prompt(), ::testing::EndsWith("=!"));
      EXPECT_EQ(adapter->score(problem, problem.reference())->reward, 1);
      EXPECT_EQ(adapter->demonstration(problem), problem.reference());
    } else {
      game = true;
      EXPECT_FALSE(adapter->score(problem, "1")) << "it has many turns";
    }
  }
  EXPECT_TRUE(sum && game);
  Problem stranger;
  stranger.set_id("other:1");
  EXPECT_EQ(adapter->begin(stranger, 1).error().code, Code::kInvalid);
  EXPECT_EQ(adapter->repeatable(stranger), Repeatable::kNot);
}

TEST(Several, TheFirstHeldOutProblemsAreOfAllTasks) {
  const auto adapter = make_valid({kSums, kGames, kSecret});
  const auto problems = adapter->evaluation();
  std::set<std::string> ids, first;
  for (const Problem& problem : problems) EXPECT_TRUE(ids.insert(problem.id()).second);
  for (std::size_t i = 0; i < 3; ++i) first.emplace(task_of(problems[i].id()));
  EXPECT_EQ(first.size(), 3u);
  std::set<std::string> trained;
  for (std::uint64_t i = 0; i < 600; ++i) EXPECT_FALSE(ids.contains(adapter->problem(i)->id()));
}

TEST(Several, WorkersGetOnlyTheTasksTheyScore) {
  WeightedTask secret = kSecret;
  secret.options_json = R"({"operations": ["*"], "operand_max": 54321})";
  const auto learner = make_valid({kSums, secret});
  const std::string worker_options = learner->options_for_workers("");
  EXPECT_EQ(worker_options.find("secret"), std::string::npos) << worker_options;
  EXPECT_EQ(worker_options.find("54321"), std::string::npos) << worker_options;
  const auto worker = make_valid({kSums}, 1, AdapterUse::kScoring);
  auto from_options = make_adapter(kSeveralTasksAdapter, worker_options, 1, AdapterUse::kScoring);
  ASSERT_TRUE(from_options) << from_options.error().message();
  for (std::uint64_t i = 0; i < 5; ++i) {
    const Problem problem = *learner->problem(i);
    const auto score = (*from_options)->begin(problem, 1);
    EXPECT_EQ(score.has_value(), task_of(problem.id()) == "sums");
    if (score) {
      EXPECT_TRUE(step_and_wait(**score, problem.reference())->score.correct);
    }
  }
}

TEST(Several, FaultsAreNamed) {
  const auto error = [](const std::string& options) {
    const auto adapter = make_adapter(kSeveralTasksAdapter, options, 1);
    return adapter ? std::string() : adapter.error().message();
  };
  EXPECT_THAT(error("{}"), HasSubstr("at least one"));
  EXPECT_THAT(error("[]"), HasSubstr("expected an object"));
  EXPECT_THAT(error(R"({"tasks": [{"name": "a", "adapter": "arithmetik"}]})"),
              HasSubstr("task 'a': unknown adapter 'arithmetik'"));
  EXPECT_THAT(error(R"({"tasks": [{"name": "a", "adapter": "arithmetic", "weight": 0}]})"), HasSubstr("weight"));
  EXPECT_THAT(error(R"({"tasks": [{"name": "a", "adapter": "arithmetic", "prompt": "x"}]})"), HasSubstr("{prompt}"));
  WeightedTask game = kGames;
  game.scored_by_workers = false;
  EXPECT_THAT(error(several_tasks_options({game})), HasSubstr("many turns"));
  EXPECT_THAT(error(several_tasks_options(std::vector<WeightedTask>(65, kSums))), HasSubstr("at most 64"));
  EXPECT_TRUE(has_many_turns("guess") && has_many_turns("poker"));
  EXPECT_FALSE(has_many_turns("arithmetic") || has_many_turns("nothing"));
}

}  // namespace
}  // namespace echoline::data_plane
