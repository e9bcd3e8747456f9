// Responses verified by a resources server of NeMo Gym: its protocol, and servers that fail in every way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>

#include <fstream>
#include <future>
#include <nlohmann/json.hpp>
#include <thread>

#include "data_plane/adapters/adapter.hpp"
#include "tests/data_plane/spoilt.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// Compares the response's text with the row's expected_answer, in the session that /seed_session began, like NeMo Gym's
// servers.
class ResourcesServer {
 public:
  ResourcesServer() {
    // A connection that is kept alive keeps a thread.
    server_.new_task_queue = [] { return new httplib::ThreadPool(32); };
    server_.Post("/seed_session", [this](const httplib::Request& request, httplib::Response& response) {
      const json row = json::parse(request.body);
      if (misbehaves("/seed_session", response)) return;
      const std::lock_guard lock(mutex_);
      const std::string session = "s" + std::to_string(++sessions_);
      answers_[session] = row.at("expected_answer");
      response.headers.emplace("Set-Cookie", "session=" + session + "; Path=/; HttpOnly; SameSite=lax");
      response.headers.emplace("Set-Cookie", "extra=1; Path=/");
      response.set_content("{}", "application/json");
    });
    server_.Post("/verify", [this](const httplib::Request& request, httplib::Response& response) {
      ++verified_;
      json body = json::parse(request.body);
      if (misbehaves("/verify", response)) return;
      const json& policy_response = body.at("response");
      std::string text;
      for (const json& item : policy_response.at("output"))
        if (item.at("type") == "message" && item.at("role") == "assistant")
          for (const json& part : item.at("content")) text += part.at("text").get<std::string>();
      for (const char* key : {"id", "created_at", "model", "object", "parallel_tool_calls", "tool_choice", "tools"})
        EXPECT_TRUE(policy_response.contains(key)) << key;
      const std::string cookie = request.get_header_value("Cookie");
      std::string expected = body.at("expected_answer");
      {
        const std::lock_guard lock(mutex_);
        if (with_sessions_) {
          EXPECT_THAT(cookie, HasSubstr("extra=1"));
          const std::string key = "session=";
          const auto key_begin = cookie.find(key), value_begin = key_begin + key.size();
          const auto answer =
              key_begin == std::string::npos
                  ? answers_.end()
                  : answers_.find(cookie.substr(value_begin, cookie.find(';', value_begin) - value_begin));
          EXPECT_NE(answer, answers_.end()) << cookie;
          if (answer != answers_.end()) expected = answer->second;
        }
      }
      body["reward"] = text == expected ? 1.0 : 0.25;
      body["reward_components"] = {{"length", text.size()}};
      if (text == "mask") body["mask_sample"] = true, body["failure_reason"] = "the judge is away";
      response.set_content(body.dump(), "application/json");
    });
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
  }
  ~ResourcesServer() {
    server_.stop();
    thread_.join();
  }
  std::string url() const { return fmt::format("http://127.0.0.1:{}", port_); }
  // Sets the fault of the next `times` answers at this path, "/seed_session" or "/verify".
  void misbehave(std::string fault, std::string path, int times) {
    const std::lock_guard lock(mutex_);
    fault_ = std::move(fault), faulty_path_ = std::move(path), faults_left_ = times;
  }
  void without_sessions() { with_sessions_ = false; }
  int sessions() const { return sessions_; }
  int verified() const { return verified_; }

 private:
  // True if the response is a fault that misbehave() asked for.
  bool misbehaves(const std::string& path, httplib::Response& response) {
    std::unique_lock lock(mutex_);
    if (faults_left_ == 0 || path != faulty_path_) return false;
    --faults_left_;
    const std::string fault = fault_;
    lock.unlock();
    if (fault == "garbage") response.set_content("\x01{[", "application/json");
    if (fault == "no reward") response.set_content("{}", "application/json");
    if (fault == "nan") response.set_content(R"({"reward": NaN})", "application/json");
    if (fault == "huge") response.set_content(std::string(5u << 20, ' '), "application/json");
    if (fault == "busy") response.status = 503, response.set_content("come back", "text/plain");
    if (fault == "refused")
      response.status = 422, response.set_content(R"({"detail": "field required"})", "application/json");
    if (fault == "slow") std::this_thread::sleep_for(std::chrono::milliseconds(900));
    if (fault == "close")
      response.set_content_provider(100, "application/json",
                                    [](std::size_t, std::size_t, httplib::DataSink&) { return false; });
    return true;
  }

  httplib::Server server_;
  int port_ = 0;
  std::thread thread_;
  std::mutex mutex_;
  std::string fault_, faulty_path_;             // guarded by mutex_
  int faults_left_ = 0;                         // guarded by mutex_
  std::map<std::string, std::string> answers_;  // guarded by mutex_
  std::atomic<int> sessions_ = 0, verified_ = 0;
  std::atomic<bool> with_sessions_ = true;
};

class NemoGymTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "echoline-nemo-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    std::ofstream train(folder_ / "train.jsonl");
    for (int i = 0; i < 40; ++i)
      train << json{{"responses_create_params",
                     {{"input", json::array({{{"role", "user"}, {"content", fmt::format("{} + 1?", i)}}})}}},
                    {"expected_answer", std::to_string(i + 1)}}
                   .dump()
            << "\n";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string options(const std::string& url, const json& more = json::object()) const {
    json all{{"url", url},
             {"train", (folder_ / "train.jsonl").string()},
             {"held_out_fraction", 0.2},
             {"deadline", "500 ms"},
             {"tries", 1}};
    all.update(more);
    return all.dump();
  }
  std::unique_ptr<Adapter> make_valid(const std::string& url, const json& more = json::object()) const {
    auto adapter = make_adapter("nemo_gym", options(url, more), 3);
    EXPECT_TRUE(adapter) << adapter.error().message();
    return adapter ? *std::move(adapter) : nullptr;
  }
  static std::string outcome_of(const Adapter& adapter, const Problem& problem, const std::string& response) {
    const auto step = step_and_wait(**adapter.begin(problem, 1), response);
    if (!step) return step.error().message();
    return fmt::format("{}{} length={}", step->score.reward, step->score.correct ? " correct" : "",
                       step->score.components.at("length"));
  }
  static std::string answer_of(const Problem& problem) {
    return json::parse(problem.reference()).at("expected_answer");
  }

  std::filesystem::path folder_;
};

TEST_F(NemoGymTest, ResponsesAreVerified) {
  ResourcesServer server;
  const auto adapter = make_valid(server.url() + "/");
  ASSERT_TRUE(adapter);
  EXPECT_EQ(adapter->repeatable({}), Repeatable::kNot);
  EXPECT_FALSE(adapter->evaluation().empty());
  const Problem problem = *adapter->problem(3);
  EXPECT_THAT(problem.prompt(), HasSubstr(" + 1?"));
  EXPECT_FALSE(adapter->demonstration(problem));
  EXPECT_EQ(outcome_of(*adapter, problem, answer_of(problem)),
            fmt::format("1 correct length={}", answer_of(problem).size()));
  EXPECT_EQ(outcome_of(*adapter, problem, "wrong"), "0.25 length=5");
  EXPECT_THAT(outcome_of(*adapter, problem, "mask"), HasSubstr("the judge is away"));
  EXPECT_THAT(outcome_of(*adapter, problem, "\xff"), HasSubstr("0.25")) << "bytes that are no UTF-8";
  EXPECT_EQ(server.sessions(), 4);
  // A worker gets the problem and the server's address, and no file.
  const auto worker =
      make_adapter("nemo_gym", adapter->options_for_workers(options(server.url())), 3, AdapterUse::kScoring);
  ASSERT_TRUE(worker) << worker.error().message();
  EXPECT_THAT(outcome_of(**worker, problem, answer_of(problem)), HasSubstr("1 correct"));
  server.without_sessions();
  const auto adapter_without_sessions = make_valid(server.url(), {{"sessions", false}});
  EXPECT_THAT(outcome_of(*adapter_without_sessions, problem, answer_of(problem)), HasSubstr("1 correct"));
  EXPECT_EQ(server.sessions(), 5) << "no session was begun";
}

TEST_F(NemoGymTest, ManyAtATime) {
  ResourcesServer server;
  const auto adapter = make_valid(server.url(), {{"deadline", "20 s"}});
  ASSERT_TRUE(adapter);
  std::vector<std::unique_ptr<Episode>> episodes;
  std::vector<std::future<double>> rewards;
  for (std::uint64_t i = 0; i < 100; ++i) {
    const Problem problem = *adapter->problem(i);
    episodes.push_back(*adapter->begin(problem, 1));
    auto promise = std::make_shared<std::promise<double>>();
    rewards.push_back(promise->get_future());
    episodes.back()->step(i % 2 == 0 ? answer_of(problem) : "x",
                          [promise](Result<Step> step) { promise->set_value(step ? step->score.reward : -1); });
  }
  for (std::size_t i = 0; i < 100; ++i) EXPECT_EQ(rewards[i].get(), i % 2 == 0 ? 1 : 0.25) << i;
  episodes.clear();
  const auto abandoned = *adapter->begin(*adapter->problem(0), 1);
  abandoned->step("x", [](Result<Step>) {});  // its result is never waited for
}

TEST_F(NemoGymTest, AServerThatFailsIsAnErrorOfTheTask) {
  ResourcesServer server;
  const auto adapter = make_valid(server.url());
  ASSERT_TRUE(adapter);
  const Problem problem = *adapter->problem(0);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"garbage", "expected a JSON object"},
      {"no reward", "expected a finite number 'reward', found none"},
      {"nan", "expected a JSON object"},
      {"huge", "longer than 4194304 bytes"},
      {"busy", "HTTP 503: come back"},
      {"refused", "expected HTTP 200, found 422: {\"detail\": \"field required\"}"},
      {"slow", "imeout"},
      {"close", "/verify"},
  };
  for (const auto& [fault, expected] : cases) {
    server.misbehave(fault, "/verify", 1);
    EXPECT_THAT(outcome_of(*adapter, problem, "x"), HasSubstr(expected)) << fault;
    server.misbehave("", "", 0);
    EXPECT_THAT(outcome_of(*adapter, problem, answer_of(problem)), HasSubstr("1 correct")) << "after " << fault;
  }
  server.misbehave("refused", "/seed_session", 1);
  EXPECT_THAT(outcome_of(*adapter, problem, "x"), HasSubstr("/seed_session: expected HTTP 200, found 422"));
}

TEST_F(NemoGymTest, TemporaryErrorsRestartTheSession) {
  ResourcesServer server;
  const auto adapter = make_valid(server.url(), {{"tries", 3}});
  ASSERT_TRUE(adapter);
  const Problem problem = *adapter->problem(0);
  for (const char* fault : {"busy", "close"})
    for (const char* path : {"/seed_session", "/verify"}) {
      server.misbehave(fault, path, 1);
      EXPECT_THAT(outcome_of(*adapter, problem, answer_of(problem)), HasSubstr("1 correct")) << fault << " " << path;
    }
  server.misbehave("busy", "/verify", 3);
  EXPECT_THAT(outcome_of(*adapter, problem, "x"), HasSubstr("tried 3 times"));
}

TEST_F(NemoGymTest, InvalidOptionsAreRefusedWithTheReason) {
  const auto refusal = [&](const std::string& url, const json& more = json::object()) {
    const auto adapter = make_adapter("nemo_gym", options(url, more), 3);
    return adapter ? "accepted" : adapter.error().message();
  };
  EXPECT_THAT(refusal("ftp://x"), HasSubstr("expected a URL such as"));
  EXPECT_THAT(refusal(""), HasSubstr("url"));
  std::ofstream(folder_ / "bad.jsonl") << R"({"responses_create_params": {"input": [{"role": "user", "content": "a"}, )"
                                       << R"({"role": "assistant", "content": "b"}]}})"
                                       << "\n";
  EXPECT_THAT(refusal("http://x", {{"train", (folder_ / "bad.jsonl").string()}}),
              HasSubstr("bad.jsonl:1: 'responses_create_params.input': the last message has the role 'assistant'"));
  const auto adapter = make_valid("http://127.0.0.1:9");
  EXPECT_THAT(outcome_of(*adapter, *adapter->problem(0), "x"), HasSubstr("http://127.0.0.1:9/seed_session: "));
  Problem invalid;
  invalid.set_reference("{}");
  EXPECT_THAT(outcome_of(*adapter, invalid, "x"), HasSubstr("expected a row of a data set"));
}

TEST(NemoGymMessages, SpoiltOnesAreRefusedOrRead) {
  const std::string seeds[] = {
      R"({"reward":0.5,"reward_components":{"a":1},"mask_sample":false,"failure_reason":null})",
      (R"({"responses_create_params":{"input":[{"role":"user","content":[{"type":"input_text","text":"t"}]}]},)"
       R"("expected_answer":"4"})")};
  feed_spoilt(seeds, 13);
}

}  // namespace
}  // namespace echoline::data_plane
