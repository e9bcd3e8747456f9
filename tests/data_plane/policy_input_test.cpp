// Prompts and observations, as a text or as messages: read from JSON, stored in problems, and given back to tasks
// unchanged.
#include "data_plane/policy_input.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "data_plane/adapters/openenv/messages.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

const json kTalk = json::parse(R"([{"role":"system","content":"Be brief."},
  {"role":"user","content":[{"type":"text","text":"Who wrote "},{"type":"text","text":"Emma?"}]},
  {"role":"tool","content":"{\"found\": 3}","name":"search"}])");

TEST(PolicyInput, IsATextOrMessages) {
  EXPECT_EQ(read_policy_input("1+1=", 100).value(), PolicyInput("1+1="));
  const auto input = read_policy_input(kTalk, 100);
  ASSERT_TRUE(input) << input.error().message();
  EXPECT_EQ(input->messages, (std::vector<ChatMessage>{
                                 {"system", "Be brief."}, {"user", "Who wrote Emma?"}, {"tool", "{\"found\": 3}"}}));
  EXPECT_EQ(input->text, "Be brief.\n\nWho wrote Emma?\n\n{\"found\": 3}");
  EXPECT_EQ(read_policy_input(to_json(*input), 100).value(), *input);
  EXPECT_EQ(to_json(PolicyInput("1+1=")), "1+1=");

  Problem problem;
  set_prompt(problem, *input);
  EXPECT_EQ(problem.prompt(), input->text) << "the form for graders and readers";
  EXPECT_EQ(prompt_of(problem), *input);
  set_prompt(problem, "again");
  EXPECT_EQ(prompt_of(problem), PolicyInput("again"));
}

TEST(PolicyInput, InvalidFormsAreRefusedWithTheReason) {
  const auto problem_of = [](const char* text, std::size_t bytes_max = 100) {
    const auto input = read_policy_input(json::parse(text), bytes_max);
    EXPECT_FALSE(input) << text;
    return input ? "" : input.error().detail;
  };
  EXPECT_THAT(problem_of("7"), HasSubstr("a text or a list of 1 to 256 messages, found 7"));
  EXPECT_THAT(problem_of("[]"), HasSubstr("found []"));
  EXPECT_THAT(problem_of(R"(["hello"])"), HasSubstr("system, user, assistant, tool, found \"hello\""));
  EXPECT_THAT(problem_of(R"([{"content":"x"}])"), HasSubstr("the 'role'"));
  EXPECT_THAT(problem_of(R"([{"role":"root","content":"x"}])"), HasSubstr("root"));
  EXPECT_THAT(problem_of(R"([{"role":"user"}])"), HasSubstr("'content'"));
  EXPECT_THAT(problem_of(R"([{"role":"user","content":[{"type":"image"}]}])"), HasSubstr("texts only"));
  EXPECT_THAT(problem_of(R"([{"role":"user","content":"x"},{"role":"assistant","content":"y"}])"),
              HasSubstr("the role 'assistant', expected a user's or a tool's"));
  EXPECT_THAT(
      problem_of(R"([{"role":"assistant","content":"","tool_calls":[{"id":"1"}]},{"role":"tool","content":"3"}])"),
      HasSubstr("'tool_calls'"));
  EXPECT_THAT(problem_of(R"([{"role":"user","content":"123456"},{"role":"user","content":"123456"}])", 12),
              HasSubstr("14 bytes, at most 12"));
  json many = json::array();
  for (std::size_t i = 0; i <= kMessagesMax; ++i) many.push_back({{"role", "user"}, {"content", ""}});
  EXPECT_FALSE(read_policy_input(many, 100));
}

TEST(PolicyInput, EnvironmentsMayUseBothForms) {
  const auto input = [](const json& observation) {
    const json said = {{"type", "observation"}, {"data", {{"observation", observation}, {"done", false}}}};
    const auto read = openenv::read_message(said.dump(), "said");
    EXPECT_TRUE(read) << read.error().message();
    return read ? read->input : PolicyInput();
  };
  EXPECT_EQ(input({{"said", kTalk}}), *read_policy_input(kTalk, 1000));
  EXPECT_EQ(input({{"said", "a text"}}), PolicyInput("a text"));
  EXPECT_EQ(input({{"said", {1, 2}}}), PolicyInput("[1,2]"));
}

}  // namespace
}  // namespace echoline::data_plane
