// Environments behind a server of OpenEnv: episodes of many turns, and servers that fail in every way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>

#include <future>
#include <nlohmann/json.hpp>
#include <thread>

#include "data_plane/adapters/adapter.hpp"
#include "data_plane/adapters/openenv/messages.hpp"
#include "tests/data_plane/openenv_server.hpp"
#include "tests/data_plane/spoilt.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr const char* kAccepted = "accepted";  // instead of the reason for a refusal

std::string options(const std::string& url, const json& more = json::object()) {
  json all{{"url", url},     {"observation", "prompt"}, {"evaluation_problems", 4},
           {"problems", 20}, {"sessions", 3},           {"deadline", "500 ms"},
           {"tries", 1}};
  all.update(more);
  return all.dump();
}

std::unique_ptr<Adapter> make_valid(const std::string& url, const json& more = json::object()) {
  auto adapter = make_adapter("openenv", options(url, more), 3);
  EXPECT_TRUE(adapter) << adapter.error().message();
  return adapter ? *std::move(adapter) : nullptr;
}

std::string refusal(const std::string& url, const json& more = json::object()) {
  const auto adapter = make_adapter("openenv", options(url, more), 3);
  return adapter ? kAccepted : adapter.error().message();
}

std::string outcome_of(Episode& episode, const std::string& response) {
  const auto step = step_and_wait(episode, response);
  if (!step) return step.error().message();
  return fmt::format("{}{}{}", step->score.reward, step->score.correct ? " correct" : "",
                     step->done ? "" : " " + step->observation.text);
}

TEST(OpenEnv, EpisodesOfManyTurns) {
  OpenEnvServer server;
  const auto adapter = make_valid(server.url(), {{"reset", {{"level", 2}}}});
  ASSERT_TRUE(adapter);
  EXPECT_EQ(adapter->repeatable({}), Repeatable::kNot);
  const auto held_out = adapter->evaluation();
  ASSERT_EQ(held_out.size(), 4u);
  EXPECT_EQ(held_out[3].prompt(), "Guess 3, level 2");
  std::set<std::string> ids{held_out[0].id(), held_out[1].id(), held_out[2].id(), held_out[3].id()};
  for (std::uint64_t i = 0; i < 20; ++i) ids.insert(adapter->problem(i)->id());
  EXPECT_EQ(ids.size(), 24u) << "each once, none held out";
  const Problem problem = held_out[2];
  const int number = server.number(2);
  const auto episode = *adapter->begin(problem, 1);
  EXPECT_EQ(outcome_of(*episode, std::to_string(number - 1)), "0 higher");
  EXPECT_EQ(outcome_of(*episode, std::to_string(number + 1)), "0 lower");
  EXPECT_EQ(outcome_of(*episode, std::to_string(number)), "1 correct");
  const auto lost_episode = *adapter->begin(problem, 1);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(outcome_of(*lost_episode, "99"), "0 lower");
  EXPECT_EQ(outcome_of(*lost_episode, "99"), "0") << "done";
  EXPECT_LE(server.sessions_at_once_max, 3) << "as many as configured; an ending session still counts";
}

TEST(OpenEnv, ManyEpisodesShareAFewSessions) {
  OpenEnvServer server;
  const auto adapter = make_valid(server.url(), {{"deadline", "20 s"}});
  ASSERT_TRUE(adapter);
  const Problem problem = adapter->evaluation()[0];
  std::vector<std::unique_ptr<Episode>> episodes;
  std::vector<std::future<std::string>> outcomes;
  constexpr std::size_t kEpisodes = 40, kAbandoned = 5;
  for (std::size_t i = 0; i < kEpisodes; ++i) episodes.push_back(*adapter->begin(problem, 1));
  episodes[kAbandoned]->step("1", [](Result<Step>) {});
  episodes[kAbandoned].reset();  // whether it has a session or waits for one
  for (std::size_t i = 0; i < kEpisodes; ++i) {
    if (i == kAbandoned) continue;
    auto promise = std::make_shared<std::promise<std::string>>();
    outcomes.push_back(promise->get_future());
    episodes[i]->step(std::to_string(server.number(0)), [promise](Result<Step> step) {
      promise->set_value(step ? fmt::format("{}", step->score.reward) : step.error().message());
    });
  }
  // The end of an episode frees its session.
  std::size_t next_outcome = 0;
  for (std::size_t i = 0; i < kEpisodes; ++i) {
    if (i == kAbandoned) continue;
    EXPECT_EQ(outcomes[next_outcome++].get(), "1");
    episodes[i].reset();
  }
  EXPECT_LE(server.sessions_at_once_max, 4) << "3, and the abandoned one";
}

TEST(OpenEnv, AServerThatFailsIsAnErrorOfTheTask) {
  OpenEnvServer server;
  const auto adapter = make_valid(server.url());
  ASSERT_TRUE(adapter);
  const Problem problem = adapter->evaluation()[0];
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"garbage", "expected a JSON object"},
      {"huge", "longer than 1048576 bytes"},
      {"close", "cannot read"},
      {"slow", "no answer within 500 ms"},
      {"error", "it broke"},
      {"full", "CAPACITY_REACHED"},
      {"untyped", "expected 'type'"},
      {"no reward", "the reward is \"much\""},
      {"nan", "expected a JSON object"},
  };
  for (const auto& [fault, expected] : cases)
    for (const char* message_type : {"reset", "step"}) {
      server.misbehave(fault, message_type, 1);
      EXPECT_THAT(outcome_of(**adapter->begin(problem, 1), "x"), HasSubstr(expected))
          << fault << " on " << message_type;
      server.misbehave("", "", 0);
      EXPECT_EQ(outcome_of(**adapter->begin(problem, 1), std::to_string(server.number(0))), "1 correct")
          << "after " << fault;
    }
  server.misbehave("other start", "reset", 1);
  EXPECT_THAT(outcome_of(**adapter->begin(problem, 1), "x"),
              HasSubstr("it begins with 'Guess 1000, level 0' although the same seed began with 'Guess 0, level 0'"));
}

TEST(OpenEnv, AResetIsTriedAgain) {
  OpenEnvServer server;
  const auto adapter = make_valid(server.url(), {{"tries", 3}});
  ASSERT_TRUE(adapter);
  const Problem problem = adapter->evaluation()[0];
  for (const char* fault : {"close", "full", "error"}) {
    server.misbehave(fault, "reset", 1);
    EXPECT_EQ(outcome_of(**adapter->begin(problem, 1), std::to_string(server.number(0))), "1 correct") << fault;
  }
  server.misbehave("close", "step", 1);
  EXPECT_THAT(outcome_of(**adapter->begin(problem, 1), "x"), HasSubstr("cannot read"))
      << "a begun episode cannot be repeated";
}

TEST(OpenEnv, ActionsThatAreObjects) {
  OpenEnvServer server;
  const auto adapter = make_valid(server.url(), {{"action", ""}});
  ASSERT_TRUE(adapter);
  const Problem problem = adapter->evaluation()[0];
  EXPECT_EQ(outcome_of(**adapter->begin(problem, 1), fmt::format(R"({{"message": "{}"}})", server.number(0))),
            "1 correct");
  EXPECT_EQ(outcome_of(**adapter->begin(problem, 1), "no object"), "0") << "the policy's fault, and over";
}

TEST(OpenEnv, AnotherServerIsRefusedWithTheReason) {
  httplib::Server plain;
  const int port = plain.bind_to_any_port("127.0.0.1");
  std::thread thread([&] { plain.listen_after_bind(); });
  EXPECT_THAT(refusal(fmt::format("http://127.0.0.1:{}", port)),
              HasSubstr("expected the sessions of an OpenEnv server at ws://127.0.0.1"));
  EXPECT_THAT(refusal(fmt::format("https://127.0.0.1:{}", port)), HasSubstr("cannot agree on TLS"));
  plain.stop();
  thread.join();
  EXPECT_THAT(refusal(fmt::format("http://127.0.0.1:{}", port)), HasSubstr("cannot connect"));
  EXPECT_THAT(refusal("http://nobody.invalid:80"), HasSubstr("nobody.invalid"));
  EXPECT_THAT(refusal("ftp://x"), HasSubstr("expected a URL such as"));
  EXPECT_THAT(refusal(""), HasSubstr("url"));
  OpenEnvServer server;
  EXPECT_THAT(refusal(server.url(), {{"observation", "promt"}}), HasSubstr("the observation has no 'promt'"));
  EXPECT_THAT(refusal(server.url(), {{"observation", ""}}), kAccepted);
}

TEST(OpenEnvMessages, Endpoints) {
  const auto url = [](std::string_view text) {
    const auto endpoint = openenv::parse_endpoint(text);
    return endpoint ? endpoint->url() : "none";
  };
  EXPECT_EQ(url("http://a:8000"), "ws://a:8000/ws");
  EXPECT_EQ(url("https://a.b/x/"), "wss://a.b:443/x/ws");
  EXPECT_EQ(url("ws://a/ws"), "ws://a:80/ws");
  EXPECT_EQ(url("http://[::1]:9"), "ws://::1:9/ws");
  for (const char* wrong : {"a:8000", "http://", "http://a:", "http://a:99999", "http://a:8x", "http://u@a",
                            "http://a/?x", "http://[::1", "http://a b"})
    EXPECT_EQ(url(wrong), "none") << wrong;
}

TEST(OpenEnvMessages, SpoiltOnesAreRefusedOrRead) {
  const std::string seeds[] = {
      R"({"type":"observation","data":{"observation":{"a":{"b":"text"}},"reward":0.5,"done":true}})",
      R"({"type":"error","data":{"message":"m","code":"CAPACITY_REACHED"}})", "https://[::1]:8000/a/ws"};
  feed_spoilt(seeds, 11);
}

}  // namespace
}  // namespace echoline::data_plane
