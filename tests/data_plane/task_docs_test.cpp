// The tasks of docs/tutorials/own-task.md and docs/how-to/write-a-task.md, extracted from the pages: each starts, has
// problems, and gives the scores that its page states.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/config.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/sandbox/sandbox.hpp"
#include "tests/data_plane/page_blocks.hpp"

namespace echoline::data_plane {
namespace {

class TaskDocs : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto pool = sandbox::Pool::start(); !pool) GTEST_SKIP() << pool.error().message();
    std::string name = (std::filesystem::temp_directory_path() / "echoline-docs-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    files_ = testing::page_blocks("docs/tutorials/own-task.md");
    files_.merge(testing::page_blocks("docs/how-to/write-a-task.md"));
    for (const auto& [file, text] : files_) std::ofstream(folder_ / file) << text;
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  std::unique_ptr<Adapter> make_valid(const std::string& script) {
    tested_.insert(script);
    auto adapter = make_adapter("process", nlohmann::json{{"script", (folder_ / script).string()}}.dump(), 3);
    EXPECT_TRUE(adapter) << script << ": " << adapter.error().message();
    return adapter ? *std::move(adapter) : nullptr;
  }
  // The first step of a new episode with this response, as a text.
  static std::string step_text(const Adapter& adapter, const Problem& problem, const std::string& response) {
    const auto step = step_and_wait(**adapter.begin(problem, 1), response);
    if (!step) return step.error().message();
    std::string text = fmt::format("{:.2f}{}", step->score.reward, step->score.correct ? " correct" : "");
    for (const auto& [name, value] : step->score.components) text += fmt::format(" {}={:.2f}", name, value);
    return text + (step->done ? "" : " " + step->observation.text);
  }
  // The problem with this prompt, wherever it is in the shuffled order.
  static Problem with_prompt(const Adapter& adapter, const std::string& wanted) {
    for (std::uint64_t i = 0; i < 64; ++i)
      if (const auto problem = adapter.problem(i); problem && problem->prompt() == wanted) return *problem;
    ADD_FAILURE() << "no problem '" << wanted << "'";
    return {};
  }

  std::filesystem::path folder_;
  std::map<std::string, std::string> files_;
  std::set<std::string> tested_;
};

TEST_F(TaskDocs, EveryTaskOnAPageBehavesAsDescribed) {
  const auto sort = make_valid("sort.py");
  ASSERT_TRUE(sort);
  EXPECT_LT(std::count(files_["sort.py"].begin(), files_["sort.py"].end(), '\n'), 30);
  EXPECT_EQ(sort->evaluation().size(), 256u);
  const Problem problem = *sort->problem(0);
  EXPECT_EQ(step_text(*sort, problem, *sort->demonstration(problem)), "1.00 correct in place=1.00");
  EXPECT_EQ(step_text(*sort, problem, ""), "0.00 in place=0.00");
  EXPECT_EQ(step_text(*sort, problem, problem.reference().substr(0, 2)), "0.25 in place=0.50");

  const auto guess = make_valid("guess.py");
  ASSERT_TRUE(guess);
  const auto episode = *guess->begin(*guess->problem(0), 1);
  const int wanted = std::stoi(guess->problem(0)->reference());
  EXPECT_EQ(step_and_wait(*episode, "0")->observation.text, "higher");
  EXPECT_EQ(step_and_wait(*episode, "10")->observation.text, "lower");
  EXPECT_EQ(episode->cut().reward, -0.1);
  const auto last = *step_and_wait(*episode, std::to_string(wanted));
  EXPECT_TRUE(last.done && last.score.correct);
  EXPECT_EQ(last.score.components.at("guesses left"), 1);

  const auto verl = make_valid("verl_task.py");
  ASSERT_TRUE(verl);
  EXPECT_EQ(step_text(*verl, *verl->problem(0), "It is\n#### 1,800"), "1.00 correct format=1.00");
  EXPECT_EQ(step_text(*verl, *verl->problem(0), "#### 5"), "0.10 format=1.00");
  EXPECT_EQ(step_text(*verl, *verl->problem(0), "1800"), "0.00 format=0.00");

  const auto trl = make_valid("trl_task.py");
  ASSERT_TRUE(trl);
  EXPECT_EQ(step_text(*trl, with_prompt(*trl, "2 + 2?"), "<think>hm</think> 4"), "1.00 correct");
  EXPECT_EQ(step_text(*trl, with_prompt(*trl, "2 + 2?"), "4"), "0.50");
  EXPECT_EQ(step_text(*trl, with_prompt(*trl, "anything"), "<think>hm</think>"), "0.00");

  const auto openrlhf = make_valid("openrlhf_task.py");
  ASSERT_TRUE(openrlhf);
  EXPECT_EQ(step_text(*openrlhf, *openrlhf->problem(0), " 4"), "1.00 correct length=1.00");
  EXPECT_EQ(step_text(*openrlhf, *openrlhf->problem(0), "five"), "-1.00 length=4.00");

  const auto agent = make_valid("openrlhf_agent.py");
  ASSERT_TRUE(agent);
  EXPECT_EQ(step_text(*agent, *agent->problem(0), "5"), "0.00 Once more.");
  EXPECT_EQ(step_text(*agent, *agent->problem(0), "4"), "1.00 correct");

  const auto rubric = make_valid("rubric_task.py");
  ASSERT_TRUE(rubric);
  EXPECT_EQ(step_text(*rubric, *rubric->problem(0), "4"), "1.20 correct brevity=1.00 correct_answer=1.00");
  EXPECT_EQ(step_text(*rubric, *rubric->problem(0), "it is 4"), "1.00 correct brevity=0.00 correct_answer=1.00");

  for (const auto& [file, text] : files_)
    EXPECT_TRUE(!file.ends_with(".py") || tested_.contains(file)) << file << " is on a page and in no test";
}

}  // namespace
}  // namespace echoline::data_plane
