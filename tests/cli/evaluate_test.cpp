// echoline evaluate, from the outside: policies of this program, and models behind servers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "tests/base/openai_server.hpp"
#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// Answers "37+58=" rightly, or one too high if the operands' sum is divisible by `errs`.
std::string sum_of(const std::string& text, std::uint64_t errs) {
  const std::size_t plus = text.find('+');
  const long sum = std::atol(text.c_str()) + std::atol(text.c_str() + plus + 1);
  return std::to_string(errs > 0 && static_cast<std::uint64_t>(sum) % errs == 0 ? sum + 1 : sum);
}

std::vector<std::string> evaluate(const OpenAiServer& server, std::vector<std::string> more = {}) {
  std::vector<std::string> words = {"evaluate", "--config", "configs/quickstart.yaml", "--url", server.url(), "--model",
                                    "tiny",     "--json"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST(Evaluate, ScoresAModelBehindAServer) {
  std::atomic<int> right = 0, all = 0;
  OpenAiServer server({.says = [&](const std::string& text, const json& body) {
    EXPECT_EQ(body["temperature"], 0.0);
    ++all, right += sum_of(text, 0) == sum_of(text, 4);
    return sum_of(text, 4);
  }});
  for (const char* what : {"status", "html", "disconnect"}) server.fault({what});
  const Outcome chat = run_program(evaluate(server, {"--api", "chat"}));
  ASSERT_EQ(chat.status, 0) << chat.err;
  const json r = json::parse(chat.out);
  EXPECT_EQ(r["problems"], 256);
  EXPECT_EQ(all, 256) << "every problem once, despite failures";
  EXPECT_DOUBLE_EQ(r["accuracy"], right / 256.0);
  EXPECT_GT(r["accuracy"], 0.6);
  EXPECT_LT(r["accuracy_low"], r["accuracy"]);
  EXPECT_GT(r["accuracy_high"], r["accuracy"]);
  EXPECT_GE(r["response_tokens"]["mean"], 1);
  const Outcome text = run_program(evaluate(server, {"--problems", "20", "--max-tokens", "1"}));
  ASSERT_EQ(text.status, 0) << text.err;
  EXPECT_EQ(json::parse(text.out)["problems"], 20);
  EXPECT_GT(json::parse(text.out)["truncated_fraction"], 0.5);
  EXPECT_THAT(server.last()["prompt"], HasSubstr("+")) << "completions: the run file has no chat";
}

TEST(Evaluate, ReportsHowOftenOneOfSeveralAnswersIsRight) {
  OpenAiServer server({.says = [](const std::string& text, const json& body) {
    EXPECT_EQ(body["temperature"], 1.0);
    return sum_of(text, body.at("seed").get<std::uint64_t>() % 2 == 0 ? 1 : 0);
  }});
  const Outcome outcome = run_program(evaluate(server, {"--samples", "4", "--problems", "64", "--seed", "0"}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json r = json::parse(outcome.out);
  EXPECT_NEAR(r["accuracy"].get<double>(), 0.5, 0.15);
  ASSERT_EQ(r["pass_at"].size(), 3u);
  EXPECT_EQ(r["pass_at"][0]["share"], r["accuracy"]);
  EXPECT_GT(r["pass_at"][2]["share"], 0.8);
  EXPECT_EQ(run_program(evaluate(server, {"--samples", "4", "--problems", "64", "--seed", "0"})).out.substr(0, 60),
            outcome.out.substr(0, 60))
      << "the same seeds";
}

TEST(Evaluate, AServerGetsSeedsOnlyIfOneIsGiven) {
  OpenAiServer server({.says = [](const std::string& text, const json& body) {
    EXPECT_FALSE(body.contains("seed"));
    return sum_of(text, 0);
  }});
  const Outcome outcome = run_program(evaluate(server, {"--samples", "2", "--problems", "8"}));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
}

TEST(Evaluate, ErrorsNameTheReason) {
  OpenAiServer server({.key = "secret", .says = [](const std::string&, const json&) { return "1"; }});
  const auto error_of = [&](std::vector<std::string> words) {
    const Outcome outcome = run_program(words);
    EXPECT_NE(outcome.status, 0);
    if (std::ranges::find(words, "--json") == words.end()) {
      EXPECT_EQ(outcome.out, "");
    } else {
      EXPECT_TRUE(json::parse(outcome.out).contains("error")) << outcome.out;
    }
    return outcome.err;
  };
  EXPECT_THAT(error_of(evaluate(server)), HasSubstr("refuses to answer without a key"));
  const TemporaryFolder folder;
  const std::string key = (folder.path() / "key").string();
  std::ofstream(key) << "wrong\n";
  std::filesystem::permissions(key, std::filesystem::perms::owner_read | std::filesystem::perms::others_read);
  EXPECT_THAT(error_of(evaluate(server, {"--key-file", key})), HasSubstr("chmod 600"));
  std::filesystem::permissions(key, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  EXPECT_THAT(error_of(evaluate(server, {"--key-file", key})), HasSubstr("refuses the key"));
  std::ofstream(key) << "secret\n";
  EXPECT_EQ(run_program(evaluate(server, {"--key-file", key, "--problems", "5"})).status, 0);
  EXPECT_THAT(error_of({"evaluate", "--config", "configs/quickstart.yaml", "--url", server.url(), "--model", "other",
                        "--key-file", key}),
              HasSubstr("no model 'other'"));
  EXPECT_THAT(error_of({"evaluate", "--config", "configs/quickstart.yaml", "--url", server.url()}),
              HasSubstr("--model"));
  EXPECT_THAT(error_of({"evaluate", "--config", "configs/quickstart.yaml"}), HasSubstr("no policy given"));
  EXPECT_THAT(error_of({"evaluate", "nowhere"}), HasSubstr("nowhere"));
  EXPECT_THAT(error_of(evaluate(server, {"--samples", "3", "--temperature", "0"})), HasSubstr("equal answers"));
}

TEST(Evaluate, ScoresAPolicyWithTheBuiltInEngine) {
  const TemporaryFolder folder;
  const std::string policy = (folder.path() / "policy").string();
  ASSERT_EQ(run_program({"model", "init", "--preset", "tiny-64", "-o", policy}).status, 0);
  const std::vector<std::string> words = {
      "evaluate", "--config", "configs/quickstart.yaml", "--policy", policy, "--samples", "2", "--problems", "50"};
  const Outcome outcome = run_program(words);
  if (!kWithTorch) {
    EXPECT_EQ(outcome.status, 2);
    EXPECT_THAT(outcome.err, HasSubstr("ECHOLINE_TORCH=ON"));
    return;
  }
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("on 50 held-out problems of 'arithmetic'"));
  EXPECT_THAT(outcome.out, HasSubstr("pass@2"));
}

}  // namespace
}  // namespace echoline::testing
