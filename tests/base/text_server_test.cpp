// Texts from servers with OpenAI's interface, over loopback, and the handling of their faults.
#include "base/text_server.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "base/random.hpp"
#include "openai_server.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using ::testing::HasSubstr;

std::string reversed(const std::string& text, const json&) { return {text.rbegin(), text.rend()}; }

class TextServerTest : public ::testing::Test {
 protected:
  void start(OpenAiServerOptions options = {}) {
    if (!options.says) options.says = reversed;
    server_.emplace(std::move(options));
    options_.url = server_->url();
    options_.model = "tiny";
    options_.first_retry_delay = milliseconds(1);
    options_.retry_delay_max = milliseconds(20);
  }
  TextServerClient client() { return *TextServerClient::make(options_, clock_); }
  Result<TextAnswer> ask(const std::string& text, std::int64_t tokens_max = 64) {
    TextServerClient client = this->client();
    return client.ask(question(7, text, tokens_max));
  }
  TextQuestion question(std::uint64_t id, const std::string& text, std::int64_t tokens_max = 64) const {
    TextQuestion q;
    q.id = id;
    (options_.chat ? q.messages.emplace_back(ChatMessage{"user", ""}).content : q.prompt) = text;
    q.tokens_max = tokens_max;
    q.seed = 5;
    return q;
  }
  std::string text_or_error(const std::string& text = "abc") {
    const auto answer = ask(text);
    return answer ? "an answer: " + answer->text : answer.error().message();
  }

  SystemClock clock_;
  TextServerOptions options_;
  std::optional<OpenAiServer> server_;
};

TEST_F(TextServerTest, SupportsChatAndCompletions) {
  start();
  const auto chat = ask("abc");
  ASSERT_TRUE(chat) << chat.error().message();
  EXPECT_EQ(chat->text, "cba");
  EXPECT_TRUE(chat->finished);
  EXPECT_EQ(chat->tokens, 3);
  EXPECT_EQ(server_->last()["messages"], (json::array({{{"role", "user"}, {"content", "abc"}}})));
  EXPECT_EQ(server_->last()["seed"], 5);
  options_.chat = false;
  const auto cut = ask("abcdef", 2);
  ASSERT_TRUE(cut) << cut.error().message();
  EXPECT_EQ(cut->text, "fe");
  EXPECT_FALSE(cut->finished);
  EXPECT_EQ(server_->last()["prompt"], "abcdef");
}

TEST_F(TextServerTest, RetriesAfterTemporaryErrors) {
  start();
  for (const OpenAiFault& fault : std::vector<OpenAiFault>{{"status", 2, 503},
                                                           {"status", 1, 429},
                                                           {"status", 1, 500},
                                                           {"html"},
                                                           {"disconnect"},
                                                           {"half"},
                                                           {"null_reason"},
                                                           {"no_choices"},
                                                           {"error"}}) {
    const int before = server_->requests();
    server_->fault(fault);
    EXPECT_EQ(text_or_error(), "an answer: cba") << fault.what << " " << fault.status;
    EXPECT_EQ(server_->requests() - before, fault.times + 1) << fault.what;
  }
}

TEST_F(TextServerTest, GivesUpAfterItsTriesAndNamesTheReason) {
  start();
  options_.tries_max = 3;
  server_->fault({"status", 3, 503});
  EXPECT_THAT(text_or_error(), HasSubstr("HTTP 503: it is not so well (3 times)"));
  server_->fault({"html", 3});
  EXPECT_THAT(text_or_error(), HasSubstr("502 Bad Gateway"));
  server_->fault({"null_reason", 3});
  EXPECT_THAT(text_or_error(), HasSubstr("the answer is incomplete"));
  server_->fault({.what = "hang", .times = 3, .hangs = std::chrono::seconds(60)});
  options_.timeout = milliseconds(30);
  EXPECT_THAT(text_or_error(), HasSubstr("imeout"));
  options_.timeout = std::chrono::minutes(1);
  EXPECT_EQ(text_or_error(), "an answer: cba") << "and the next one is served";
}

TEST_F(TextServerTest, RetriesAfterTheServersDelay) {
  start();
  options_.retry_delay_max = std::chrono::seconds(2);
  server_->fault({.what = "status", .status = 429, .retry_after_s = 1});
  const TimePoint begin = clock_.now();
  EXPECT_EQ(text_or_error(), "an answer: cba");
  EXPECT_GE(clock_.now() - begin, milliseconds(900));
}

TEST_F(TextServerTest, AnErrorOfTheServerEndsAllQuestions) {
  start({.key = "secret"});
  options_.key = "wrong";
  options_.requests_in_flight_max = 2;
  TextServerClient client = this->client();
  for (std::uint64_t id = 0; id < 100; ++id) ASSERT_TRUE(client.submit(question(id, "abc")));
  std::size_t ended = 0;
  while (client.pending_count() > 0)
    for (const TextServerClient::Outcome& one : client.poll(milliseconds(50))) {
      ++ended;
      EXPECT_EQ(one.answer.error().code, Code::kInvalid);
      EXPECT_FALSE(one.concerns_only_this_question);
      EXPECT_THAT(one.answer.error().message(), HasSubstr("refuses the key: Incorrect API key"));
      EXPECT_THAT(one.answer.error().message(), testing::Not(HasSubstr("wrong")));
    }
  EXPECT_EQ(ended, 100u);
  EXPECT_LE(server_->requests(), 4) << "it is not asked a hundred times";
  options_.key = "";
  EXPECT_THAT(text_or_error(), HasSubstr("without a key"));
  options_.key = "secret";
  EXPECT_EQ(text_or_error(), "an answer: cba");
  options_.model = "other";
  EXPECT_THAT(text_or_error(), HasSubstr("has no model 'other'"));
  options_.model = "tiny";
  server_->fault({"status", 1, 429, 0,
                  R"({"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}})"});
  EXPECT_THAT(text_or_error(), HasSubstr("no credit left: You exceeded"));
  server_->fault({"status", 1, 301});
  EXPECT_THAT(text_or_error(), HasSubstr("redirects"));
  server_->fault({"status", 1, 404, 0, R"({"object": "error", "message": "The model does not exist.", "code": 404})"});
  EXPECT_THAT(text_or_error(), HasSubstr("The model does not exist.")) << "as in vLLM";
  server_->fault({"status", 1, 404, 0, R"({"detail": "Not Found"})"});
  EXPECT_THAT(text_or_error(), HasSubstr("Not Found"));
}

TEST_F(TextServerTest, AnErrorOfOneQuestionEndsThatQuestionAlone) {
  start({.context_max = 10});
  TextServerClient client = this->client();
  ASSERT_TRUE(client.submit(question(1, "far too long for it")));
  ASSERT_TRUE(client.submit(question(2, "abc")));
  std::map<std::uint64_t, TextServerClient::Outcome> ended;
  while (client.pending_count() > 0)
    for (TextServerClient::Outcome& one : client.poll(milliseconds(50))) ended.emplace(one.id, std::move(one));
  EXPECT_TRUE(ended.at(1).concerns_only_this_question);
  EXPECT_THAT(ended.at(1).answer.error().message(), HasSubstr("maximum context length is 10"));
  EXPECT_EQ(ended.at(2).answer->text, "cba");
}

TEST_F(TextServerTest, FindsOutHowTheLimitIsCalled) {
  start({.wants_completion_tokens = true});
  TextServerClient client = this->client();
  for (std::uint64_t id = 0; id < 20; ++id) ASSERT_TRUE(client.submit(question(id, "abcdef", 4)));
  std::size_t right = 0;
  while (client.pending_count() > 0)
    for (const TextServerClient::Outcome& one : client.poll(milliseconds(50)))
      right += one.answer && one.answer->text == "fedc";
  EXPECT_EQ(right, 20u);
}

TEST_F(TextServerTest, LimitsQuestionsInFlightAndDropsCancelledOnes) {
  start();
  options_.requests_in_flight_max = 3;
  TextServerClient client = this->client();
  server_->fault({.what = "hang", .times = 3, .hangs = milliseconds(20)});
  for (std::uint64_t id = 0; id < 40; ++id) ASSERT_TRUE(client.submit(question(id, fmt::format("{}", 100 + id))));
  client.cancel(39);
  std::map<std::uint64_t, std::string> texts;
  while (client.pending_count() > 0)
    for (TextServerClient::Outcome& one : client.poll(milliseconds(50))) texts[one.id] = one.answer->text;
  EXPECT_EQ(texts.size(), 39u);
  for (const auto& [id, text] : texts) EXPECT_EQ(text, reversed(fmt::format("{}", 100 + id), {}));
  EXPECT_LE(server_->requests_at_once_max(), 3);
  EXPECT_GE(server_->requests_at_once_max(), 2);
}

TEST_F(TextServerTest, AnUnreachableAddressIsGivenUpSoon) {
  start();
  server_.reset();
  const auto answer = ask("abc");
  EXPECT_EQ(answer.error().code, Code::kUnavailable);
  EXPECT_THAT(answer.error().message(), HasSubstr("(3 times)"));
}

TEST_F(TextServerTest, InvalidOptionsAreRefused) {
  start();
  for (const char* url : {"", "127.0.0.1:8000", "ftp://x"}) {
    TextServerOptions options = options_;
    options.url = url;
    EXPECT_EQ(TextServerClient::make(options, clock_).error().code, Code::kInvalid) << url;
  }
  options_.model = "";
  EXPECT_THAT(TextServerClient::make(options_, clock_).error().message(), HasSubstr("/v1/models lists them"));
}

TEST(TextServerParser, SurvivesAnyBytes) {
  const std::string answers[] = {
      std::string(R"({"choices":[{"index":0,"message":{"role":"assistant","content":"abc"},)") +
          R"("text":"abc","finish_reason":"stop"}],"usage":{"completion_tokens":3}})",
      R"({"error":{"message":"no","type":"t","param":"max_tokens","code":"insufficient_quota"}})"};
  Random random(1);
  for (const std::string& answer : answers) {
    for (int i = 0; i < 3000; ++i) {
      std::string body = answer;
      for (std::uint64_t n = random.below(5); n > 0; --n) {
        const std::size_t at = random.below(body.size());
        if (random.below(3) == 0)
          body.erase(at, 1 + random.below(10));
        else
          body[at] = static_cast<char>(random.below(256));
        if (body.empty()) break;
      }
      test::fuzz_input(body);
    }
  }
  EXPECT_EQ(
      parse_text_answer(R"({"choices":[{"message":{"content":null,"refusal":"no"},"finish_reason":"stop"}]})", true)
          ->text,
      "");
  EXPECT_FALSE(parse_text_answer(R"({"choices":[{"text":null,"finish_reason":"stop"}]})", false));
}

}  // namespace
}  // namespace echoline
