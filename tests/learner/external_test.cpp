// The interface of an external trainer: batches as bytes, leases, policies, and HTTP.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "data_plane/routed_experts.hpp"
#include "delta/safetensors.hpp"
#include "learner/external/api.hpp"
#include "learner/external/batch_file.hpp"
#include "learner/external/http_server.hpp"
#include "learner/external/recent_calls.hpp"
#include "learner/external/trainer_link.hpp"
#include "model/finite.hpp"
#include "model/policy.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;
using std::chrono::seconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class TestClock final : public Clock {
 public:
  TimePoint now() const override { return time; }
  double unix_seconds() const override { return 0; }
  TimePoint time{seconds(1000)};
};

std::shared_ptr<const std::string> batch_bytes(const char* text) { return std::make_shared<const std::string>(text); }

delta::OwnedState tiny_policy() {
  static const std::vector<std::byte> value_bytes(2, std::byte{1});  // of one bf16 value
  auto state = delta::copy_of({{"w", delta::DType::kBF16, {1}, value_bytes}});
  return *std::move(state);
}

std::string scores_file(const std::vector<float>& logprobs, const std::vector<float>& entropies = {}) {
  delta::StateView tensors{
      {"logprobs", delta::DType::kF32, {std::ssize(logprobs)}, std::as_bytes(std::span(logprobs))}};
  if (!entropies.empty())
    tensors.push_back({"entropies", delta::DType::kF32, {std::ssize(entropies)}, std::as_bytes(std::span(entropies))});
  return *delta::safetensors_bytes(tensors);
}

schema::Trajectory trajectory(std::uint64_t group, std::vector<std::uint32_t> prompt,
                              std::vector<std::uint32_t> response) {
  schema::Trajectory result;
  result.set_problem_id(fmt::format("p{}", group));
  result.set_group(group);
  for (const auto token : prompt) result.add_prompt_tokens(token);
  for (const auto token : response) result.add_response_tokens(token), result.add_logprobs(-0.5f);
  schema::VersionSpan* span = result.add_spans();
  span->set_end(static_cast<std::uint32_t>(response.size()));
  span->set_version(3);
  result.set_reward(0.25);
  return result;
}

TEST(BatchFile, IsASafetensorsFileOfTheTrajectoriesInTheirOrder) {
  const auto file = pack_batch({trajectory(7, {1, 2}, {3}), trajectory(8, {4}, {5, 6})});
  ASSERT_TRUE(file.has_value());
  const auto content = delta::parse_safetensors(std::as_bytes(std::span(*file)), "batch");
  ASSERT_TRUE(content.has_value()) << content.error().message();
  const auto values = [&]<class T>(const char* name, T) {  // of the tensor; the second argument gives their type
    for (const delta::TensorView& tensor : content->tensors)
      if (tensor.name == name) {
        std::vector<T> elements(tensor.bytes.size() / sizeof(T));
        std::memcpy(elements.data(), tensor.bytes.data(), tensor.bytes.size());
        return elements;
      }
    return std::vector<T>();
  };
  EXPECT_THAT(values("prompt_tokens", std::int32_t{}), ElementsAre(1, 2, 4));
  EXPECT_THAT(values("prompt_ends", std::int64_t{}), ElementsAre(2, 3));
  EXPECT_THAT(values("response_tokens", std::int32_t{}), ElementsAre(3, 5, 6));
  EXPECT_THAT(values("response_ends", std::int64_t{}), ElementsAre(1, 3));
  EXPECT_THAT(values("logprobs", 0.0f), ElementsAre(-0.5f, -0.5f, -0.5f));
  EXPECT_THAT(values("versions", std::int64_t{}), ElementsAre(3, 3, 3));
  EXPECT_THAT(values("loss_mask", std::uint8_t{}), ElementsAre(1, 1, 1));
  EXPECT_THAT(values("group", std::int64_t{}), ElementsAre(7, 8));
  EXPECT_THAT(values("reward", 0.0), ElementsAre(0.25, 0.25));
  EXPECT_EQ(content->metadata.at("problems"), R"(["p7","p8"])");
  EXPECT_FALSE(pack_batch({}).has_value());
}

TEST(BatchFile, HasTheExpertsOfTheTrajectoriesThatHaveThem) {
  std::vector<schema::Trajectory> batch{trajectory(7, {1, 2}, {3}), trajectory(8, {4}, {5}), trajectory(9, {6}, {7})};
  batch[1].set_routed_experts(data_plane::pack_experts({2, 1, {0, 1, 2, 3}}));
  batch[2].set_routed_experts(data_plane::pack_experts({1, 1, {5, 5}}));  // of another shape
  const auto file = pack_batch(batch);
  ASSERT_TRUE(file.has_value());
  const auto content = delta::parse_safetensors(std::as_bytes(std::span(*file)), "batch");
  ASSERT_TRUE(content.has_value()) << content.error().message();
  for (const delta::TensorView& tensor : content->tensors) {
    if (tensor.name != "routed_experts") continue;
    EXPECT_EQ(tensor.dtype, delta::DType::kI16);
    EXPECT_THAT(tensor.shape, ElementsAre(7, 2, 1));
    std::vector<std::int16_t> values(tensor.bytes.size() / 2);
    std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    EXPECT_THAT(values, ElementsAre(-1, -1, -1, -1, -1, -1, 0, 1, 2, 3, -1, -1, -1, -1));
    return;
  }
  FAIL() << "no routed_experts";
}

TEST(TrainerLink, ABatchIsOneTrainersUntilItsLeaseEnds) {
  TestClock clock;
  TrainerLink trainer_link({.publish_every = 1, .steps_total = 10}, clock, 0);
  EXPECT_FALSE(trainer_link.take({}, seconds(10), false)->has_value()) << "there is none yet";
  trainer_link.offer(1, batch_bytes("one"), 2);
  const auto first = *trainer_link.take({}, seconds(10), false);
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(*first->bytes, "one");
  EXPECT_EQ(trainer_link.take({}, seconds(10), false).error().code, Code::kUnavailable);
  clock.time += seconds(8);
  ASSERT_TRUE(trainer_link.renew(first->lease, seconds(10)).has_value());
  clock.time += seconds(8);
  EXPECT_EQ(trainer_link.take({}, seconds(10), false).error().code, Code::kUnavailable);
  clock.time += seconds(3);
  const auto second = *trainer_link.take({}, seconds(10), false);
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(trainer_link.consume(first->lease, {}).error().code, Code::kStale);
  const auto third = *trainer_link.take({}, seconds(10), true);
  ASSERT_TRUE(third.has_value()) << "taken over";
  EXPECT_EQ(trainer_link.return_batch(second->lease).error().code, Code::kStale);
  ASSERT_TRUE(trainer_link.return_batch(third->lease).has_value());
  const auto fourth = *trainer_link.take({}, seconds(10), false);
  ASSERT_TRUE(fourth.has_value());
  EXPECT_FALSE(trainer_link.wait_consumed({}).has_value());
  EXPECT_EQ(*trainer_link.consume(fourth->lease, {{"loss", 0.5}}), 1u);
  EXPECT_EQ(trainer_link.consume(fourth->lease, {}).error().code, Code::kStale) << "once";
  EXPECT_EQ(trainer_link.wait_consumed({})->figures, (json{{"loss", 0.5}}));
}

TEST(TrainerLink, TakesThePolicyOfTheStepDoneOrUnderWay) {
  TestClock clock;
  TrainerLink trainer_link({.publish_every = 2, .steps_total = 5}, clock, 0);
  EXPECT_EQ(trainer_link.publish(Version{0}, tiny_policy()).error().code, Code::kStale) << "known from the start";
  EXPECT_THAT(trainer_link.publish(Version{2}, tiny_policy()).error().message(), HasSubstr("consume a batch"));
  const auto train = [&](std::uint64_t step) {
    trainer_link.offer(step, batch_bytes("b"), 0);
    EXPECT_TRUE(trainer_link.consume((*trainer_link.take({}, seconds(10), false))->lease, {}).has_value());
    EXPECT_TRUE(trainer_link.wait_consumed({}).has_value());
  };
  train(1);
  EXPECT_THAT(trainer_link.publish(Version{1}, tiny_policy()).error().message(), HasSubstr("publish_every"));
  trainer_link.offer(2, batch_bytes("b"), 0);
  ASSERT_TRUE(trainer_link.publish(Version{2}, tiny_policy()).has_value()) << "before the batch is consumed";
  EXPECT_FALSE(trainer_link.wait_policy(Version{4}, {}).has_value());
  EXPECT_TRUE(trainer_link.wait_policy(Version{2}, {}).has_value());
  EXPECT_TRUE(trainer_link.publish(Version{2}, tiny_policy()).has_value()) << "the same bytes again";
  EXPECT_FALSE(trainer_link.wait_policy(Version{2}, {}).has_value()) << "once";
  EXPECT_TRUE(trainer_link.consume((*trainer_link.take({}, seconds(10), false))->lease, {}).has_value());
  EXPECT_TRUE(trainer_link.wait_consumed({}).has_value());
  train(3);
  train(4);
  EXPECT_EQ(trainer_link.status()["version_wanted"], 4);
  train(5);
  EXPECT_TRUE(trainer_link.publish(Version{5}, tiny_policy()).has_value()) << "the last one always is";
}

class ApiTest : public testing::Test {
 protected:
  void start(const std::string& listen) {
    std::filesystem::create_directories(folder_);
    std::ofstream(folder_ / "metrics.jsonl") << "{\"a\":1}\n{\"a\":2}\n";
    TrainerServerOptions options;
    options.listen = listen;
    options.folder = folder_;
    options.body_max = {1 << 20};
    options.run_facts = {{"run", "x"}};
    options.idle_max = idle_max_;
    options.transfer_time_base = transfer_time_base_;
    options.parse_policy = [](Version, const overlay::Slice& body) -> Result<delta::OwnedState> {
      ECHO_ASSIGN(const auto content, delta::parse_safetensors(body.bytes(), "policy"));
      return delta::copy_of(content.tensors);
    };
    options.read_policy = [](Version, const std::filesystem::path& path,
                             const std::string&) -> Result<delta::OwnedState> {
      return fail(Code::kNotFound, "read policy", "{}", path.string());
    };
    options.held_out = [] { return json{{"problems", json::array()}}; };
    options.grade = [](const json& body) -> Result<PolicyEvaluation> {
      if (!body.is_object()) return fail(Code::kInvalid, "evaluate", "no object");
      return PolicyEvaluation{
          .version = {}, .accuracy = body.value("accuracy", 0.0), .reward_mean = {}, .problems = 10};
    };
    auto api = TrainerServer::start(std::move(options), trainer_link_);
    ASSERT_TRUE(api.has_value()) << api.error().message();
    api_ = *std::move(api);
  }
  void TearDown() override {
    api_.reset();
    std::filesystem::remove_all(folder_);
  }

  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() / fmt::format("api_test_{}", ::getpid());
  std::string socket_path() const { return api_->address()["socket"]; }
  static constexpr int kUnusedPort = 1;  // because httplib asks for one, and a socket has none
  httplib::Client client() const {
    httplib::Client connected(socket_path(), kUnusedPort);
    connected.set_address_family(AF_UNIX);
    return connected;
  }
  // A connection that sends exactly the caller's bytes.
  class RawConnection {
   public:
    explicit RawConnection(const std::string& path) : socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
      EXPECT_EQ(::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    }
    bool send(const std::string& bytes) const {
      return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == std::ssize(bytes);
    }
    // Everything until the server ends the connection.
    std::string read_to_end() const {
      std::string received;
      char chunk[4096];
      for (ssize_t chunk_bytes = 0; (chunk_bytes = ::recv(socket_.get(), chunk, sizeof chunk, 0)) > 0;)
        received.append(chunk, static_cast<std::size_t>(chunk_bytes));
      return received;
    }

   private:
    Descriptor socket_;
  };
  static constexpr const char* kRequestWithHalfABody =
      "POST /v1/policy/1 HTTP/1.1\r\nContent-Length: 500000\r\n\r\nhalf of it";

  Duration idle_max_ = seconds(600), transfer_time_base_ = seconds(60);
  TestClock clock_;
  TrainerLink trainer_link_{{.publish_every = 1, .steps_total = 10, .evaluate_every = 4}, clock_, 0};
  std::unique_ptr<TrainerServer> api_;
};

TEST_F(ApiTest, ACallThatIsSentAgainWithItsIdIsDoneOnce) {
  start("socket");
  httplib::Client client = this->client();
  const auto post = [&](const std::string& path, const char* id, const std::string& body = "") {
    auto result = client.Post(path, httplib::Headers{{"Idempotency-Key", id}}, body, "application/json");
    EXPECT_TRUE(result) << httplib::to_string(result.error());
    return result;
  };
  trainer_link_.offer(1, batch_bytes("bytes of a batch"), 2);
  const auto lease_answer = post("/v1/batch", "a"), lease_answer_again = post("/v1/batch", "a");
  ASSERT_EQ(lease_answer->status, 200);
  ASSERT_EQ(lease_answer_again->status, 200) << lease_answer_again->body;
  const std::string lease = lease_answer->get_header_value("X-Echoline-Lease");
  EXPECT_EQ(lease_answer_again->get_header_value("X-Echoline-Lease"), lease);
  EXPECT_EQ(lease_answer_again->body, lease_answer->body);
  EXPECT_EQ(post("/v1/batch", "b")->status, 409) << "another call gets its own batch";
  const std::string consume_path = "/v1/batch/" + lease + "/consume";
  EXPECT_EQ(post(consume_path, "a")->status, 400) << "the id of another call";
  EXPECT_EQ(post(consume_path, "c", "[]")->status, 400);
  const auto consume_answer = post(consume_path, "c", R"({"figures": {"loss": 0.5}})");
  ASSERT_EQ(consume_answer->status, 200) << "a refused call has no effect: " << consume_answer->body;
  trainer_link_.wait_consumed({});
  const auto consume_answer_again = post(consume_path, "c", R"({"figures": {"loss": 0.5}})");
  EXPECT_EQ(consume_answer_again->status, 200);
  EXPECT_EQ(consume_answer_again->body, consume_answer->body);
  EXPECT_EQ(post(consume_path, "d")->status, 409);
  EXPECT_EQ(post("/v1/batch", "a")->status, 204) << "its batch is consumed";
  EXPECT_EQ(post("/v1/batch", std::string(65, 'x').c_str())->status, 400);
}

// The same call comes again, on another connection, in the middle of the first.
TEST_F(ApiTest, ACallThatIsSentAgainWhileItIsBeingDoneWaitsForItsResult) {
  start("socket");
  const auto take = [&] {
    return client().Post("/v1/batch?wait_s=50", httplib::Headers{{"Idempotency-Key", "a"}}, "", "text/plain");
  };
  std::string leases[2];
  std::thread first([&] { leases[0] = take()->get_header_value("X-Echoline-Lease"); });
  std::thread second([&] { leases[1] = take()->get_header_value("X-Echoline-Lease"); });
  trainer_link_.offer(1, batch_bytes("b"), 0);
  first.join();
  second.join();
  EXPECT_FALSE(leases[0].empty());
  EXPECT_EQ(leases[0], leases[1]);
}

TEST(RecentCalls, TheOldestAreForgotten) {
  RecentCalls calls(2);
  for (const char* id : {"a", "b", "c"}) calls.begin(id, "x")->finish(id);
  EXPECT_FALSE(calls.begin("a", "x")->earlier_result().has_value());
  EXPECT_EQ(calls.begin("b", "x")->earlier_result(), "b");
  EXPECT_EQ(calls.begin("c", "x")->earlier_result(), "c");
  EXPECT_FALSE(calls.begin("", "x")->earlier_result().has_value());
}

TEST_F(ApiTest, AVersionIsAcceptedOnceAndNeverWithOtherBytes) {
  start("socket");
  trainer_link_.offer(1, batch_bytes("b"), 0);
  httplib::Client client = this->client();
  const auto publish = [&](int value) {
    const std::vector<std::byte> value_bytes(2, std::byte(value));
    const std::string file = *delta::safetensors_bytes({{"w", delta::DType::kBF16, {1}, value_bytes}});
    return client.Post("/v1/policy/1", file, "application/octet-stream")->status;
  };
  EXPECT_EQ(publish(1), 200);
  EXPECT_EQ(publish(1), 200);
  EXPECT_EQ(publish(2), 409) << "while the learner has not fetched it";
  EXPECT_EQ(trainer_link_.wait_policy(Version{1}, {})->bytes(0)[0], std::byte{1});
  EXPECT_EQ(publish(1), 200);
  EXPECT_EQ(publish(2), 409);
  EXPECT_FALSE(trainer_link_.wait_policy(Version{1}, {})) << "once";
}

TEST_F(ApiTest, SlowClientsDelayNoOtherClient) {
  transfer_time_base_ = std::chrono::milliseconds(500);
  start("socket");
  std::vector<std::unique_ptr<RawConnection>> slow_connections;
  for (int i = 0; i < 16; ++i) {
    slow_connections.push_back(std::make_unique<RawConnection>(socket_path()));
    ASSERT_TRUE(slow_connections.back()->send(i % 2 == 0 ? kRequestWithHalfABody : "POST /v1/batch HTT"));
  }
  trainer_link_.offer(1, batch_bytes("b"), 0);
  const auto answer = client().Post("/v1/batch?wait_s=1");
  ASSERT_TRUE(answer) << httplib::to_string(answer.error());
  EXPECT_EQ(answer->status, 200);
  EXPECT_THAT(slow_connections[0]->read_to_end(), AllOf(HasSubstr("HTTP/1.1 408"), HasSubstr("send it again")));
  for (const auto& connection : slow_connections)
    connection->read_to_end();  // returns, because the server ends the connection
  // A byte now and then does not reset the timeout.
  const RawConnection dripping(socket_path());
  ASSERT_TRUE(dripping.send(kRequestWithHalfABody));
  while (dripping.send("x")) std::this_thread::yield();
}

TEST_F(ApiTest, AConnectionMayBeIdleForLongButNotForever) {
  idle_max_ = std::chrono::milliseconds(100);
  start("socket");
  const RawConnection idle(socket_path());
  for (int i = 0; i < 9; ++i) ASSERT_TRUE(idle.send("GET /v1/status HTTP/1.1\r\n\r\n"));
  const std::string received = idle.read_to_end();  // until it is closed
  std::size_t answers = 0;
  for (std::size_t position = 0; (position = received.find("HTTP/1.1 200", position)) != std::string::npos; ++position)
    ++answers;
  EXPECT_EQ(answers, 9u);
}

TEST_F(ApiTest, EndsAtOnceBesideStalledClients) {
  start("socket");
  const RawConnection stalled(socket_path()), idle(socket_path());
  ASSERT_TRUE(stalled.send(kRequestWithHalfABody));
  httplib::Client served = client();
  served.set_keep_alive(true);
  EXPECT_EQ(served.Get("/v1/status")->status, 200);
  const auto began_at = std::chrono::steady_clock::now();
  api_.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - began_at, seconds(3));
}

TEST(HttpServer, NamesTheReachedLimit) {
  const std::string path = (std::filesystem::temp_directory_path() / fmt::format("http_{}.sock", ::getpid())).string();
  HttpServer server({.connections_max = 2, .receiving_max = {2 << 20}});
  server.set_error_handler([](const httplib::Request&, httplib::Response& response) {
    if (const auto failure = HttpServer::request_failure())
      response.status = failure->status, response.set_content(failure->message, "text/plain");
  });
  server.Post("/", [](const httplib::Request& request, httplib::Response& response) {
    response.set_content(std::to_string(request.body.size()), "text/plain");
  });
  server.set_address_family(AF_UNIX);
  ASSERT_TRUE(server.bind_to_port(path, 1));
  std::thread thread([&] { server.listen_after_bind(); });
  while (!server.is_running()) std::this_thread::yield();
  const auto client = [&] {
    auto connected = std::make_unique<httplib::Client>(path, 1);
    connected->set_address_family(AF_UNIX);
    connected->set_keep_alive(true);
    return connected;
  };
  const auto first = client(), second = client(), third = client();
  EXPECT_EQ(first->Post("/", std::string(100'000, 'x'), "text/plain")->body, "100000");
  EXPECT_EQ(second->Post("/", "x", "text/plain")->body, "1");
  const auto refused = third->Post("/", "x", "text/plain");
  ASSERT_TRUE(refused) << httplib::to_string(refused.error());
  EXPECT_EQ(refused->status, 503);
  EXPECT_THAT(refused->body, HasSubstr("2 connections"));
  const auto too_large = second->Post("/", std::string(3'500'000, 'x'), "text/plain");
  ASSERT_TRUE(too_large) << httplib::to_string(too_large.error());
  EXPECT_EQ(too_large->status, 503);
  EXPECT_THAT(too_large->body, HasSubstr("arriving at once"));
  server.end_connections();
  server.stop();
  thread.join();
  std::filesystem::remove(path);
}

TEST_F(ApiTest, ASocketIsForItsOwnerAndCarriesBatchesAndPolicies) {
  start("socket");
  const std::string path = api_->address()["socket"];
  EXPECT_EQ(std::filesystem::status(std::filesystem::path(path).parent_path()).permissions(),
            std::filesystem::perms::owner_all);
  httplib::Client client(path, 1);
  client.set_address_family(AF_UNIX);
  EXPECT_EQ(client.Post("/v1/batch")->status, 204);
  trainer_link_.offer(1, batch_bytes("bytes of a batch"), 2);
  const auto lease_answer = client.Post("/v1/batch?wait_s=5&lease_s=30");
  ASSERT_EQ(lease_answer->status, 200);
  EXPECT_EQ(lease_answer->body, "bytes of a batch");
  EXPECT_EQ(lease_answer->get_header_value("X-Echoline-Step"), "1");
  EXPECT_EQ(client.Post("/v1/batch")->status, 409);
  const std::string lease = lease_answer->get_header_value("X-Echoline-Lease");
  const std::string consume_path = "/v1/batch/" + lease + "/consume", scores_path = "/v1/batch/" + lease + "/scores";
  EXPECT_EQ(client.Post("/v1/batch/00/scores", scores_file({-0.5f, -1.5f}), "application/octet-stream")->status, 409);
  EXPECT_EQ(client.Post(scores_path, scores_file({-0.5f}), "application/octet-stream")->status, 400)
      << "there are two tokens";
  EXPECT_EQ(client.Post(scores_path, scores_file({-0.5f, -1.5f}), "application/octet-stream")->status, 200);
  for (const char* wrong :
       {"[]", "{", R"({"figures": {"loss": "low"}})", R"({"figures": {"": 1}})", R"({"figures": [1]})"})
    EXPECT_EQ(client.Post(consume_path, wrong, "application/json")->status, 400) << wrong;
  const auto consume_answer = client.Post(consume_path, R"({"figures": {"loss": 0.5}})", "application/json");
  EXPECT_EQ(consume_answer->status, 200);
  EXPECT_EQ(json::parse(consume_answer->body)["steps"], 1);
  const auto second_consume_answer = client.Post(consume_path, "", "application/json");
  EXPECT_EQ(second_consume_answer->status, 409);
  EXPECT_EQ(json::parse(second_consume_answer->body)["error"]["code"], "stale");
  const auto consumed = trainer_link_.wait_consumed({});
  EXPECT_EQ(consumed->figures, (json{{"loss", 0.5}}));
  EXPECT_THAT(consumed->scores->logprobs, ElementsAre(-0.5f, -1.5f));

  const delta::OwnedState policy = tiny_policy();
  const std::string file = *delta::safetensors_bytes(policy.view());
  EXPECT_EQ(client.Post("/v1/policy/1", "no tensors", "application/octet-stream")->status, 400);
  EXPECT_EQ(client.Post("/v1/policy/1", R"({"path": "/nowhere"})", "application/json")->status, 404);
  EXPECT_EQ(client.Post("/v1/policy/2", file, "application/octet-stream")->status, 400) << "not that far";
  EXPECT_EQ(client.Post("/v1/policy/1", file, "application/octet-stream")->status, 200);
  EXPECT_TRUE(trainer_link_.wait_policy(Version{1}, {}).has_value());

  EXPECT_EQ(json::parse(client.Get("/v1/status")->body)["run"], "x");
  EXPECT_EQ(json::parse(client.Get("/v1/metrics?after=1")->body), (json::array({{{"a", 2}}})));
  EXPECT_EQ(client.Get("/v1/metrics?after=x")->status, 400);
  EXPECT_EQ(client.Get("/v1/metrics?last=-1")->status, 400);
  const auto first_rows = client.Get("/v1/metrics?limit=1");
  EXPECT_EQ(json::parse(first_rows->body), (json::array({{{"a", 1}}})));
  EXPECT_EQ(first_rows->get_header_value("X-Echoline-Next"), "1");
  EXPECT_EQ(first_rows->get_header_value("X-Echoline-More"), "1");
  EXPECT_EQ(client.Get("/v1/metrics?after=1")->get_header_value("X-Echoline-More"), "0");
  EXPECT_EQ(json::parse(client.Get("/v1/metrics?last=1")->body), (json::array({{{"a", 2}}})));
  EXPECT_EQ(client.Post("/v1/batch?wait_s=-1")->status, 400);
  EXPECT_EQ(client.Get("/v2/nothing")->status, 404);
  EXPECT_THAT(client.Get("/v2/nothing")->body, HasSubstr("docs/trainers.md"));
}

TEST_F(ApiTest, EvaluationsAreWantedBeforeTheFirstStepAndAtTheRunsInterval) {
  start("socket");
  httplib::Client client(api_->address()["socket"].get<std::string>(), 1);
  client.set_address_family(AF_UNIX);
  const auto status = [&] { return json::parse(client.Get("/v1/status")->body); };
  EXPECT_EQ(status()["evaluation_wanted"], 0);
  EXPECT_FALSE(trainer_link_.is_evaluation_expected(seconds(60))) << "the trainer has not announced an evaluation";
  EXPECT_EQ(client.Get("/v1/evaluation")->status, 200);
  EXPECT_TRUE(trainer_link_.is_evaluation_expected(seconds(60)));
  clock_.time += seconds(61);
  EXPECT_FALSE(trainer_link_.is_evaluation_expected(seconds(60))) << "the trainer made no call for 61 s";
  EXPECT_EQ(client.Post("/v1/evaluation/0", "[]", "application/json")->status, 400);
  EXPECT_EQ(client.Post("/v1/evaluation/1", R"({"accuracy": 0.5})", "application/json")->status, 400)
      << "no such policy yet";
  const auto answer = client.Post("/v1/evaluation/0", R"({"accuracy": 0.5})", "application/json");
  EXPECT_EQ(json::parse(answer->body)["accuracy"], 0.5);
  EXPECT_FALSE(trainer_link_.is_evaluation_expected(seconds(60)));
  EXPECT_TRUE(status()["evaluation_wanted"].is_null());
  const auto evaluations = trainer_link_.wait_evaluations({});
  ASSERT_EQ(evaluations.size(), 1u);
  EXPECT_EQ(evaluations[0].version, Version{0});
  EXPECT_EQ(evaluations[0].accuracy, 0.5);
  EXPECT_TRUE(trainer_link_.wait_evaluations({}).empty());
  for (std::uint64_t step = 1; step <= 10; ++step) {
    trainer_link_.offer(step, batch_bytes("b"), 0);
    ASSERT_TRUE(trainer_link_.consume((*trainer_link_.take({}, seconds(10), false))->lease, {}).has_value());
    ASSERT_TRUE(trainer_link_.wait_consumed({}).has_value());
    EXPECT_EQ(status()["evaluation_wanted"], step % 4 == 0 || step == 10 ? json(step) : json(nullptr)) << step;
  }
}

TEST(Scores, AreReadOnlyForTheBatchTheyAreOf) {
  const auto scores = parse_scores(scores_file({-1, NAN, -3}, {0.5f, NAN, 1}), 3);
  ASSERT_TRUE(scores.has_value()) << scores.error().message();
  EXPECT_EQ(scores->logprobs[2], -3);
  EXPECT_EQ(scores->entropies[0], 0.5f);
  EXPECT_TRUE(parse_scores(scores_file({-1, -INFINITY}), 2).has_value()) << "an impossible token";
  const std::pair<std::string, const char*> wrong[] = {{scores_file({-1}), "F32 [3]"},
                                                       {scores_file({-1, -1, 2}), "above 0"},
                                                       {scores_file({-1, -1, -1}, {1, 1}), "F32 [3]"},
                                                       {scores_file({-1, -1, -1}, {1, -1, 1}), "entropy"},
                                                       {*delta::safetensors_bytes({}), "logprobs is missing"},
                                                       {*delta::safetensors_bytes(tiny_policy().view()), "found 'w'"},
                                                       {"no tensors", "scores that were sent"}};
  for (const auto& [file, reason] : wrong) {
    const auto refused = parse_scores(file, 3);
    ASSERT_FALSE(refused.has_value()) << reason;
    EXPECT_EQ(refused.error().code, Code::kInvalid);
    EXPECT_THAT(refused.error().message(), HasSubstr(reason));
  }
}

// The scores of the trainer's model reveal a worker with invented responses, by the same rule as with the built-in
// trainer.
TEST(Scores, RevealTheWorkerWithForeignResponses) {
  std::vector<schema::Trajectory> batch;
  TokenScores scores;
  for (std::uint64_t worker = 1; worker <= 4; ++worker)
    for (int i = 0; i < 8; ++i) {
      schema::Trajectory sent = trajectory(1, {1}, {2, 3, 4});  // with log-probabilities -0.5
      sent.set_worker(worker);
      sent.add_loss_mask(1), sent.add_loss_mask(1), sent.add_loss_mask(0);
      batch.push_back(sent);
      for (const float logprob : {-0.5f, -0.6f})
        scores.logprobs.push_back(worker == 3 ? -9 : logprob), scores.entropies.push_back(0.5f);
      scores.logprobs.push_back(NAN), scores.entropies.push_back(NAN);  // not trained on, not needed
    }
  batch.push_back(trajectory(2, {1}, {5}));
  batch.back().set_worker(9);
  scores.logprobs.push_back(NAN), scores.entropies.push_back(NAN);
  const ScoreComparison comparison = compare_scores(batch, scores);
  EXPECT_EQ(comparison.figures["scored_responses"], 32);
  EXPECT_NEAR(comparison.figures["entropy"].get<double>(), 0.5, 1e-6);
  EXPECT_FALSE(comparison.scrutiny.contains(WorkerId{9})) << "its response has no scores";
  EXPECT_EQ(comparison.scrutiny.at(WorkerId{1}).responses, 8u);
  EXPECT_NEAR(comparison.scrutiny.at(WorkerId{1}).surprise, 8 * 0.05, 1e-5);
  EXPECT_NEAR(comparison.scrutiny.at(WorkerId{1}).dispute, 8 * 0.05, 1e-5);
  EXPECT_NEAR(comparison.scrutiny.at(WorkerId{3}).dispute, 8 * 8.5, 1e-4);
  Credibility credibility;
  std::vector<Credibility::Verdict> verdicts;
  for (std::uint64_t step = 1; step <= Credibility::kInARowMax; ++step) {
    EXPECT_TRUE(verdicts.empty());
    verdicts = credibility.judge(comparison.scrutiny, step);
  }
  ASSERT_EQ(verdicts.size(), 1u);
  EXPECT_EQ(verdicts[0].worker, WorkerId{3});
}

TEST_F(ApiTest, OnLoopbackATokenIsNeeded) {
  start("127.0.0.1:0");
  httplib::Client client(api_->address()["url"].get<std::string>());
  EXPECT_EQ(client.Get("/v1/status")->status, 401);
  client.set_bearer_token_auth("wrong");
  EXPECT_EQ(client.Get("/v1/status")->status, 401);
  client.set_bearer_token_auth(api_->address()["token"].get<std::string>());
  EXPECT_EQ(client.Get("/v1/status")->status, 200);
}

TEST_F(ApiTest, ListensAtOneAddressOnly) {
  for (const char* listen : {"0.0.0.0:0", "example.org:1", "127.0.0.1", "127.0.0.1:65536", "127.0.0.1:x", ""}) {
    const auto api = TrainerServer::start({.listen = listen,
                                           .folder = folder_,
                                           .body_max = {},
                                           .run_facts = {},
                                           .parse_policy = {},
                                           .read_policy = {},
                                           .check_policy = {},
                                           .held_out = {},
                                           .grade = {}},
                                          trainer_link_);
    ASSERT_FALSE(api.has_value()) << listen;
    EXPECT_THAT(api.error().message(), HasSubstr("127.0.0.1:PORT")) << listen;
  }
}

TEST_F(ApiTest, EndsWhileATrainerWaits) {
  start("socket");
  const std::string path = api_->address()["socket"];
  std::thread waiting([&] {
    httplib::Client client(path, 1);
    client.set_address_family(AF_UNIX);
    client.set_read_timeout(60);
    client.Post("/v1/batch?wait_s=60");
  });
  while (trainer_link_.status()["batch"] != "none") std::this_thread::yield();
  api_.reset();
  waiting.join();
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(PolicyOf, RoundsAndChecksATrainersTensors) {
  const auto config = model::preset("tiny-64");
  ASSERT_TRUE(config.has_value());
  const auto policy = model::init_policy(*config, 1);
  ASSERT_TRUE(policy.has_value());
  const delta::StateView view = policy->view();
  const auto same = model::policy_of(view, *config);
  ASSERT_TRUE(same.has_value());
  EXPECT_EQ(delta::OwnedState(*model::policy_of(view, *config)).digest(),
            delta::OwnedState(*model::init_policy(*config, 1)).digest());
  // fp32 values a bit above the middle of two bf16 values are rounded up.
  std::vector<std::vector<float>> values;
  delta::StateView wide = view;
  for (delta::TensorView& t : wide) {
    values.emplace_back(t.bytes.size() / 2, 1.0f + 0.0040f);
    t.dtype = delta::DType::kF32;
    t.bytes = std::as_bytes(std::span(values.back()));
  }
  const auto rounded = model::policy_of(wide, *config);
  ASSERT_TRUE(rounded.has_value());
  std::uint16_t bits = 0;
  std::memcpy(&bits, rounded->bytes(0).data(), 2);
  EXPECT_EQ(bits, 0x3f81);
  values[0][0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(model::policy_of(wide, *config).error().message(), HasSubstr("the first at index 0"));
  delta::StateView fewer = view;
  fewer.pop_back();
  EXPECT_THAT(model::policy_of(fewer, *config).error().message(), HasSubstr("is missing"));
}

// Checks one non-finite value of each kind in each type. Workers could not use a policy that contains one.
TEST(PolicyOf, RefusesValuesThatAreNotFinite) {
  const auto check = [](delta::DType type, auto zero, std::vector<decltype(zero)> bad) {
    using Bits = decltype(zero);
    for (const std::int64_t size : {5, 40'000})
      for (const Bits value : bad) {
        std::vector<Bits> values(static_cast<std::size_t>(size), Bits{1});
        const delta::StateView state{{"a", type, {size}, std::as_bytes(std::span(values))}};
        ASSERT_TRUE(model::check_finite(state));
        values[3] = values.back() = value;
        const Status refused = model::check_finite(state);
        ASSERT_FALSE(refused) << delta::dtype_name(type) << " " << std::uint64_t{value};
        EXPECT_EQ(refused.error().code, Code::kInvalid);
        EXPECT_THAT(refused.error().message(),
                    HasSubstr(fmt::format("tensor 'a' holds 2 values that are NaN, infinite or too large for bf16, "
                                          "the first at index 3 of {}",
                                          size)));
      }
  };
  check(delta::DType::kBF16, std::uint16_t{}, {0x7fc0, 0x7f80, 0xff80, 0xffff, 0x7f81});
  check(delta::DType::kF16, std::uint16_t{}, {0x7e00, 0x7c00, 0xfc00});
  check(delta::DType::kF32, std::uint32_t{}, {0x7fc00000, 0x7f800000, 0xff800000, 0x7f7fffff, 0x7f7f8000});
  check(delta::DType::kF64, std::uint64_t{}, {0x7ff8000000000000, 0x7ff0000000000000, 0xfff0000000000000});
  const std::uint16_t largest[] = {0x7f7f, 0xff7f, 0};
  EXPECT_TRUE(model::check_finite({{"a", delta::DType::kBF16, {3}, std::as_bytes(std::span(largest))}}));
  const std::uint32_t wide[] = {0x7f7f7fff, 0xff7f7fff};
  EXPECT_TRUE(model::check_finite({{"a", delta::DType::kF32, {2}, std::as_bytes(std::span(wide))}}));
  const std::int64_t whole[] = {-1};
  EXPECT_TRUE(model::check_finite({{"a", delta::DType::kI64, {1}, std::as_bytes(std::span(whole))}}));

  const auto config = model::preset("tiny-64");
  auto policy = model::init_policy(*config, 1);
  const std::uint16_t nan = 0x7fc0;
  std::memcpy(policy->mutable_bytes(1).data() + 2 * 7, &nan, sizeof nan);
  policy->seal();
  const auto refused = model::policy_of(policy->view(), *config);
  ASSERT_FALSE(refused.has_value());
  EXPECT_THAT(refused.error().message(), HasSubstr(fmt::format("tensor '{}' holds 1 values", policy->name(1))));
  EXPECT_THAT(refused.error().message(), HasSubstr("at index 7 of"));
}

}  // namespace
}  // namespace echoline::learner
