// An opponent played by a model behind a server: training asks it for each of its actions, evaluation does not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "data_plane/adapters/adapter.hpp"
#include "tests/base/openai_server.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// Calls if that is possible, and checks otherwise, as the player "caller" does.
std::string passive_answer(std::string_view prompt) {
  return prompt.substr(prompt.rfind("Your choices: ")).find("call") != std::string_view::npos
             ? "<action>call</action>"
             : "<action>check</action>";
}

std::unique_ptr<Adapter> poker(json options) {
  options.update({{"hands", 3}, {"evaluation_opponent", "caller"}, {"evaluation_problems", 4}});
  auto made = make_adapter("poker", options.dump(), 1, AdapterUse::kScoring);
  EXPECT_TRUE(made) << made.error().message();
  return made ? std::move(*made) : nullptr;
}
json server_options(const OpenAiServer& server, const char* api = "chat") {
  return {{"opponent", "server"}, {"server", {{"url", server.url()}, {"model", "tiny"}, {"api", api}}}};
}

double reward(const Adapter& adapter, const Problem& problem) {
  const auto episode = *adapter.begin(problem, 5);
  Score score;
  std::string prompt = problem.prompt();
  for (bool done = false; !done;) {
    const auto step = step_and_wait(*episode, passive_answer(prompt));
    EXPECT_TRUE(step) << step.error().message();
    if (!step) return -1e9;
    EXPECT_FALSE(step->side_prompt);
    add(score, step->score);
    done = step->done;
    prompt = step->observation.text;
  }
  return score.reward;
}

TEST(SidePromptServer, AModelBehindAServerSitsOpposite) {
  std::atomic<int> asked = 0;
  OpenAiServer server({.says = [&](const std::string& text, const json&) {
    ++asked;
    EXPECT_THAT(text, HasSubstr("You play heads-up"));
    return passive_answer(text);
  }});
  for (const char* api : {"chat", "completions"}) {
    const auto served = poker(server_options(server, api)), caller = poker({{"opponent", "caller"}});
    for (std::uint64_t index = 0; index < 10; ++index)
      EXPECT_EQ(reward(*served, *served->problem(index)), reward(*caller, *caller->problem(index)))
          << "it plays like the caller";
    EXPECT_GT(asked.exchange(0), 20);
    for (const Problem& problem : served->evaluation()) reward(*served, problem);
    reward(**make_adapter("poker", server_options(server, api).dump(), 1),
           *served->problem(0));  // as the learner has it
    EXPECT_EQ(asked, 0) << "an evaluation does not ask the server";
  }
}

TEST(SidePromptServer, OneThatFailsIsAnErrorOfTheTask) {
  OpenAiServer server({.says = [](const std::string& text, const json&) { return passive_answer(text); }});
  const auto served = poker(server_options(server));
  server.fault({.what = "status", .times = 100, .status = 404});
  const Problem problem = *served->problem(0);
  const auto episode = *served->begin(problem, 1);
  auto step = step_and_wait(*episode, passive_answer(problem.prompt()));
  while (step && !step->done) step = step_and_wait(*episode, passive_answer(step->observation.text));
  ASSERT_FALSE(step);
  EXPECT_THAT(step.error().message(), HasSubstr("the server that plays another player failed"));
  // An episode does not wait for a server that never answers.
  server.fault({.what = "hang", .times = 100, .hangs = std::chrono::milliseconds(2000)});
  json impatient = server_options(server);
  impatient["server"].update({{"deadline", "20 ms"}, {"tries", 1}});
  const auto hangs = poker(impatient);
  const auto waits = *hangs->begin(problem, 1);
  step = step_and_wait(*waits, passive_answer(problem.prompt()));
  while (step && !step->done) step = step_and_wait(*waits, passive_answer(step->observation.text));
  ASSERT_FALSE(step);
  EXPECT_THAT(step.error().message(), HasSubstr("the server that plays another player failed"));
}

// An episode that ends while the server is asked receives no answer.
TEST(SidePromptServer, EpisodesEndWhileItThinks) {
  OpenAiServer server({.says = [](const std::string& text, const json&) { return passive_answer(text); }});
  auto served = poker(server_options(server));
  server.fault({.what = "hang", .times = 8, .hangs = std::chrono::milliseconds(200)});
  std::atomic<int> answers = 0;
  for (int i = 0; i < 8; ++i) {
    const Problem problem = *served->problem(static_cast<std::uint64_t>(i));
    const auto episode = *served->begin(problem, 1);
    episode->step(passive_answer(problem.prompt()),
                  [&](const Result<Step>& step) { answers += !step || !step->side_prompt ? 1 : 0; });
  }
  const int before = answers;
  const Problem problem = *served->problem(100);
  reward(*served, problem);
  EXPECT_EQ(answers, before);
  const auto last = *served->begin(problem, 1);
  last->step(passive_answer(problem.prompt()), [](const Result<Step>&) {});
}

TEST(SidePromptServer, MissingOptionsAreNamed) {
  const auto why = [](const json& options) {
    const auto made = make_adapter("poker", options.dump(), 1);
    return made ? "made" : made.error().message();
  };
  EXPECT_THAT(why({{"opponent", "server"}}), HasSubstr("expected url and model, because opponent is 'server'"));
  EXPECT_THAT(why({{"opponent", "server"}, {"server", {{"url", "nowhere"}, {"model", "m"}}}}), HasSubstr("nowhere"));
  EXPECT_THAT(why({{"opponent", "sevrer"}}), HasSubstr("server"));
}

}  // namespace
}  // namespace echoline::data_plane
