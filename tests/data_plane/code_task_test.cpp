// The adapter `code`: its files, its prompts, its scores, and HumanEval's own solutions.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;

json mbpp(int number) {
  return {{"task_id", number},
          {"text", fmt::format("Write a function f that adds {}.", number)},
          {"code", fmt::format("def f(x):\n  return x + {}\n", number)},
          {"test_list", {fmt::format("assert f(1) == {}", number + 1), fmt::format("assert f(2) == {}", number + 2)}},
          {"test_setup_code", ""}};
}

const json kHumanEval = {
    {"task_id", "x/0"},
    {"prompt", "from typing import List\n\n\ndef total(of: List[int]) -> int:\n    \"\"\" Their sum. \"\"\"\n"},
    {"entry_point", "total"},
    {"canonical_solution", "    return sum(of)\n"},
    {"test",
     "def check(candidate):\n    assert True, 'good'\n    for n in range(3):\n        assert candidate([n]) == n\n    "
     "assert candidate([]) == 0\n"}};

class CodeTask : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("code_task_test_{}", ::getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::vector<json>& rows) {
    std::ofstream file(folder_ / name);
    for (const json& row : rows) file << row.dump() << "\n";
    return (folder_ / name).string();
  }
  static std::unique_ptr<Adapter> make_valid(const json& options, AdapterUse use = AdapterUse::kProblems) {
    auto adapter = make_adapter("code", options.dump(), 1, use);
    EXPECT_TRUE(adapter) << adapter.error().message();
    return adapter ? std::move(*adapter) : nullptr;
  }
  static std::string error_of(const json& options) {
    const auto adapter = make_adapter("code", options.dump(), 1);
    EXPECT_FALSE(adapter) << options;
    return adapter ? "" : adapter.error().message();
  }
  // True if this machine can grade. sandbox_test distinguishes a kernel that allows no sandbox from a broken sandbox.
  static bool can_grade() {
    static const bool can = [] {
      const auto adapter = make_adapter("code", "{}", 1, AdapterUse::kScoring);
      return adapter.has_value() || adapter.error().code != Code::kUnavailable;
    }();
    return can;
  }
  static Score scored(const Adapter& adapter, const Problem& problem, const std::string& response) {
    const auto score = adapter.score(problem, response);
    EXPECT_TRUE(score) << score.error().message();
    return score ? *score : Score{};
  }
  std::filesystem::path folder_;
};

TEST_F(CodeTask, ProblemsComeFromFiles) {
  std::vector<json> rows;
  for (int i = 0; i < 20; ++i) rows.push_back(mbpp(i));
  const std::string train = write("train.jsonl", rows), test = write("test.jsonl", {mbpp(3), kHumanEval});
  const auto adapter = make_valid({{"train", train}, {"held_out", test}});
  EXPECT_EQ(adapter->evaluation().size(), 2u);
  std::set<std::string> seen;
  for (std::uint64_t i = 0; i < 19; ++i) {
    const Problem problem = *adapter->problem(i);
    seen.insert(problem.id());
    EXPECT_EQ(problem.prompt().find("adds 3."), std::string::npos);
    EXPECT_NE(problem.prompt().find("assert f(1) == "), std::string::npos) << problem.prompt();
    EXPECT_NE(adapter->demonstration(problem)->find("```python\ndef f(x):"), std::string::npos);
  }
  EXPECT_EQ(seen.size(), 19u);
  EXPECT_FALSE(adapter->demonstration(adapter->evaluation()[0]));
  EXPECT_NE(adapter->evaluation()[1].prompt().find("def total("), std::string::npos);

  const auto share = make_valid({{"train", train}, {"held_out_fraction", 0.25}, {"prompt", "{task} {tests} {task}"}});
  EXPECT_EQ(share->evaluation().size(), 5u);
  std::set<std::string> held_out, trained;
  for (const Problem& problem : share->evaluation()) held_out.insert(problem.prompt());
  for (std::uint64_t i = 0; i < 30; ++i) trained.insert(share->problem(i)->prompt());
  EXPECT_EQ(trained.size(), 15u);
  for (const std::string& prompt : trained) {
    EXPECT_FALSE(held_out.contains(prompt));
    EXPECT_TRUE(prompt.ends_with(" {task}")) << prompt;
  }
}

TEST_F(CodeTask, FaultsOfAFileAreNamed) {
  const std::string good = write("good.jsonl", {mbpp(1), mbpp(2)});
  json no_code = mbpp(1), no_tests = mbpp(1), wrong_tests = mbpp(1), wrong_entry = kHumanEval, large = mbpp(1);
  no_code.erase("code");
  no_tests["test_list"] = json::array();
  wrong_tests["test_list"] = {1};
  wrong_entry["entry_point"] = "other";
  large["code"] = std::string(70'000, '#');
  for (const auto& [row, expected] : std::vector<std::pair<json, std::string>>{
           {no_code, ":2: expected a string 'code'"},
           {no_tests, ":2: 'test_list' is empty"},
           {wrong_tests, ":2: expected a list of strings 'test_list'"},
           {wrong_entry, ":2: the prompt does not contain the head of function 'other'"},
           {json::array(), ":2: expected a JSON object"},
           {large, "at most 65536"}}) {
    const std::string message = error_of({{"train", write("bad.jsonl", {mbpp(1), row})}, {"held_out", good}});
    EXPECT_NE(message.find(expected), std::string::npos) << message;
  }
  EXPECT_NE(error_of({{"train", good}, {"held_out", good}}).find("held out"), std::string::npos);
  EXPECT_NE(error_of({{"train", good}}).find("leaves none to evaluate with"), std::string::npos);
  EXPECT_NE(error_of({{"train", good}, {"held_out", good}, {"held_out_fraction", 0.5}}).find("not both"),
            std::string::npos);
  EXPECT_NE(error_of({{"train", good}, {"prompt", "write"}}).find("{task}"), std::string::npos);
  EXPECT_NE(error_of({{"train", (folder_ / "none.jsonl").string()}}).find("none.jsonl"), std::string::npos);
  std::ofstream(folder_ / "rows.jsonl.gz") << "\x1f\x8b\x08";
  EXPECT_NE(error_of({{"train", (folder_ / "rows.jsonl.gz").string()}}).find("gunzip"), std::string::npos);
}

TEST_F(CodeTask, AResponseIsWorthItsParts) {
  if (!can_grade()) GTEST_SKIP() << "sandboxes do not work here; sandbox_test names the reason";
  const std::string file = write("rows.jsonl", {mbpp(1), mbpp(2)});
  const auto problems = make_valid({{"train", file}, {"held_out_fraction", 0.5}});
  const auto pulse = make_valid(json::object(), AdapterUse::kScoring),
             fraction = make_valid({{"reward", "fraction"}}, AdapterUse::kScoring);
  EXPECT_EQ(pulse->repeatable({}), Repeatable::kCostly);
  EXPECT_EQ(pulse->problem(0).error().code, Code::kUnavailable);
  const Problem problem = *problems->problem(0);
  const std::string right = *problems->demonstration(problem);
  struct Case {
    std::string response;
    double tests, syntax, format, thinking;
  };
  for (const Case& c : std::vector<Case>{{"<think>well</think>" + right, 1, 1, 1, 1},
                                         {right, 1, 1, 1, 0},
                                         {right.substr(10, right.size() - 14), 1, 1, 0, 0},
                                         {"```python\ndef f(x):\n  return 2 if x == 1 else 3 if x == 1 else 0\n```",
                                          problem.reference().find("== 2\"") != std::string::npos ? 0.5 : 0, 1, 1, 0},
                                         {"```python\ndef f(x) return\n```", 0, 0, 1, 0},
                                         {"```python\n```", 0, 0, 1, 0},
                                         {"", 0, 0, 0, 0}}) {
    const Score score = scored(*pulse, problem, c.response);
    EXPECT_EQ(score.components,
              (std::map<std::string, double>{
                  {"tests", c.tests}, {"syntax", c.syntax}, {"format", c.format}, {"thinking", c.thinking}}))
        << c.response;
    EXPECT_NEAR(score.reward, 0.7 * c.tests + 0.1 * (c.syntax + c.format + c.thinking), 1e-12) << c.response;
    EXPECT_EQ(score.correct, c.tests == 1) << c.response;
    EXPECT_EQ(scored(*fraction, problem, c.response).reward, c.tests) << c.response;
  }
  Problem broken = problem;
  broken.set_reference("no tests");
  EXPECT_EQ(pulse->score(broken, "x = 1").error().code, Code::kInvalid);  // not the fault of the answer
}

TEST_F(CodeTask, AFunctionIsCompletedOrWrittenWhole) {
  if (!can_grade()) GTEST_SKIP() << "sandboxes do not work here; sandbox_test names the reason";
  const auto problems =
      make_valid({{"train", write("rows.jsonl", {mbpp(1), mbpp(2)})}, {"held_out", write("test.jsonl", {kHumanEval})}});
  const auto adapter = make_valid({{"reward", "fraction"}}, AdapterUse::kScoring);
  const Problem problem = problems->evaluation()[0];
  for (const char* right :
       {"    return sum(of)\n", "```python\n    return sum(of)\n```",
        "```python\ndef total(of):\n  return sum(of)\n```", "def total(of: List[int]):\n  return sum(of)",
        "```\nfrom functools import reduce\ntotal = lambda of: reduce(int.__add__, of, 0)\n```"})
    EXPECT_EQ(scored(*adapter, problem, right).reward, 1) << right;
  EXPECT_EQ(scored(*adapter, problem, "    return of[0]\n").reward, 0.5);
  EXPECT_EQ(scored(*adapter, problem, "    return 7\n").reward, 0);
}

TEST_F(CodeTask, EpisodesAreGradedOnOtherThreads) {
  if (!can_grade()) GTEST_SKIP() << "sandboxes do not work here; sandbox_test names the reason";
  const auto problems = make_valid({{"train", write("rows.jsonl", {mbpp(1), mbpp(2)})}, {"held_out_fraction", 0.5}});
  const Problem problem = *problems->problem(0);
  auto adapter = make_valid({{"parallel", 2}}, AdapterUse::kScoring);
  std::vector<std::unique_ptr<Episode>> episodes;
  std::mutex mutex;
  std::condition_variable changed;
  int right = 0;
  for (int i = 0; i < 6; ++i) {
    episodes.push_back(std::move(*adapter->begin(problem, 0)));
    episodes.back()->step(*problems->demonstration(problem), [&, i](Result<Step> step) {
      const std::lock_guard lock(mutex);
      episodes[static_cast<std::size_t>(i)].reset();  // as one does who needs no more of it
      right += step && step->done && step->score.correct;
      changed.notify_one();
    });
  }
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return right == 6; });
  lock.unlock();
  // A destroyed episode reports nothing, and a destroyed adapter waits for no program.
  auto episode = std::move(*adapter->begin(problem, 0));
  episode->step("import time\ntime.sleep(1000)", [](Result<Step>) { FAIL() << "the episode was destroyed"; });
  episode.reset();
  adapter.reset();
}

// The file's solutions pass. With another returned value, or none, each of them fails.
TEST_F(CodeTask, HumanEvalsSolutionsPassAndTheirMutantsFail) {
  const std::filesystem::path data = "../shared/data/humaneval/HumanEval.jsonl.gz";
  if (!std::filesystem::exists(data)) GTEST_SKIP() << "no " << data;
  if (!can_grade()) GTEST_SKIP() << "sandboxes do not work here; sandbox_test names the reason";
  const std::string rows = (folder_ / "HumanEval.jsonl").string();
  ASSERT_EQ(std::system(fmt::format("gzip -dc {} > {}", data.string(), rows).c_str()), 0);
  const auto problems = make_valid({{"train", write("rows.jsonl", {mbpp(1)})}, {"held_out", rows}});
  const auto adapter =
      make_valid({{"reward", "fraction"}, {"test_time", "60 s"}, {"time", "300 s"}}, AdapterUse::kScoring);
  std::ifstream file(rows);
  std::string line;
  int passed = 0, changed = 0, emptied = 0;
  for (const Problem& problem : problems->evaluation()) {
    ASSERT_TRUE(std::getline(file, line));
    const json row = json::parse(line);
    const auto solution = row["canonical_solution"].get<std::string>(), entry = row["entry_point"].get<std::string>();
    const Score right = scored(*adapter, problem, solution);
    passed += right.correct;
    EXPECT_EQ(right.reward, 1) << problem.id() << "\n" << solution;
    // The same function with another returned value.
    const Score wrong =
        scored(*adapter, problem,
               solution + fmt::format("\n\n_right = {0}\ndef {0}(*args):\n    return (_right(*args), 0)\n", entry));
    changed += !wrong.correct;
    EXPECT_FALSE(wrong.correct) << problem.id();
    const Score none = scored(*adapter, problem, "    return None\n");
    emptied += !none.correct;
    EXPECT_FALSE(none.correct) << problem.id();
  }
  EXPECT_EQ(passed, 164);
  EXPECT_EQ(changed, 164);
  EXPECT_EQ(emptied, 164);
}

}  // namespace
}  // namespace echoline::data_plane
