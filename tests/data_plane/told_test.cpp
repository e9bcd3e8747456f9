// Prompts and observations, as a text or as messages: read from JSON, stored in problems, and given back to tasks
// unchanged.
#include "data_plane/told.hpp"

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

TEST(Told, IsATextOrMessages) {
  EXPECT_EQ(read_told("1+1=", 100).value(), Told("1+1="));
  const auto told = read_told(kTalk, 100);
  ASSERT_TRUE(told) << told.error().message();
  EXPECT_EQ(told->messages, (std::vector<ChatMessage>{
                                {"system", "Be brief."}, {"user", "Who wrote Emma?"}, {"tool", "{\"found\": 3}"}}));
  EXPECT_EQ(told->text, "Be brief.\n\nWho wrote Emma?\n\n{\"found\": 3}");
  EXPECT_EQ(read_told(to_json(*told), 100).value(), *told);
  EXPECT_EQ(to_json(Told("1+1=")), "1+1=");

  Problem problem;
  set_prompt(problem, *told);
  EXPECT_EQ(problem.prompt(), told->text) << "the form for graders and readers";
  EXPECT_EQ(prompt_of(problem), *told);
  set_prompt(problem, "again");
  EXPECT_EQ(prompt_of(problem), Told("again"));
}

TEST(Told, InvalidFormsAreRefusedWithTheReason) {
  const auto refused = [](const char* text, std::size_t bytes_max = 100) {
    const auto told = read_told(json::parse(text), bytes_max);
    EXPECT_FALSE(told) << text;
    return told ? "" : told.error().detail;
  };
  EXPECT_THAT(refused("7"), HasSubstr("a text or a list of 1 to 256 messages, found 7"));
  EXPECT_THAT(refused("[]"), HasSubstr("found []"));
  EXPECT_THAT(refused(R"(["hello"])"), HasSubstr("system, user, assistant, tool, found \"hello\""));
  EXPECT_THAT(refused(R"([{"content":"x"}])"), HasSubstr("the 'role'"));
  EXPECT_THAT(refused(R"([{"role":"root","content":"x"}])"), HasSubstr("root"));
  EXPECT_THAT(refused(R"([{"role":"user"}])"), HasSubstr("'content'"));
  EXPECT_THAT(refused(R"([{"role":"user","content":[{"type":"image"}]}])"), HasSubstr("texts only"));
  EXPECT_THAT(refused(R"([{"role":"user","content":"x"},{"role":"assistant","content":"y"}])"),
              HasSubstr("the role 'assistant', expected a user's or a tool's"));
  EXPECT_THAT(refused(R"([{"role":"assistant","content":"","tool_calls":[{"id":"1"}]},{"role":"tool","content":"3"}])"),
              HasSubstr("'tool_calls'"));
  EXPECT_THAT(refused(R"([{"role":"user","content":"123456"},{"role":"user","content":"123456"}])", 12),
              HasSubstr("14 bytes, at most 12"));
  json many = json::array();
  for (std::size_t i = 0; i <= kMessagesMax; ++i) many.push_back({{"role", "user"}, {"content", ""}});
  EXPECT_FALSE(read_told(many, 100));
}

TEST(Told, EnvironmentsMayUseBothForms) {
  const auto told = [](const json& observation) {
    const json said = {{"type", "observation"}, {"data", {{"observation", observation}, {"done", false}}}};
    const auto read = openenv::read_message(said.dump(), "said");
    EXPECT_TRUE(read) << read.error().message();
    return read ? read->told : Told();
  };
  EXPECT_EQ(told({{"said", kTalk}}), *read_told(kTalk, 1000));
  EXPECT_EQ(told({{"said", "a text"}}), Told("a text"));
  EXPECT_EQ(told({{"said", {1, 2}}}), Told("[1,2]"));
}

}  // namespace
}  // namespace echoline::data_plane
