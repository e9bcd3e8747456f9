// Tinker's client against the learner's HTTP interface, with requests that the client 0.38.0 sent and the answers that
// it took (tests/real/tinker record). The order of operations, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/files.hpp"
#include "base/random.hpp"
#include "learner/external/tinker.pb.h"
#include "learner/external/tinker_link.hpp"
#include "learner/external/tinker_requests.hpp"
#include "learner/external/tinker_server.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline::learner::tinker {
namespace {

using nlohmann::json;
using testing::HasSubstr;
namespace fs = std::filesystem;
namespace wire = echoline::tinker_wire;

const fs::path kRecorded = fs::path(__FILE__).parent_path() / "tinker";

std::string recorded(const std::string& name) {
  auto text = read_file(kRecorded / name, 1 << 20);
  ECHO_CHECK(text.has_value(), "{}", text.error().message());
  return *text;
}

json recorded_json(const std::string& name) { return json::parse(recorded(name)); }

class TestClock final : public Clock {
 public:
  TimePoint now() const override { return time; }
  double unix_seconds() const override { return seconds(time.time_since_epoch()); }
  TimePoint time{std::chrono::seconds(1000)};
};

Numbered numbered(const std::string& model, std::uint64_t number) {
  Numbered request;
  request.model = model;
  request.number = number;
  request.operation = OptimStep{};
  return request;
}

Numbered new_model(const std::string& session, std::uint64_t number) {
  Numbered request;
  request.session = session;
  request.model_number = number;
  request.operation = CreateModel{};
  return request;
}

class TinkerLinkTest : public testing::Test {
 protected:
  std::optional<std::string> next() {
    const auto due = link.next_operation(Duration(0));
    return due ? std::optional(due->id) : std::nullopt;
  }
  // Makes a model of a new session.
  std::string make_model() {
    const std::string session = *link.create_session();
    EXPECT_TRUE(link.submit(new_model(session, 0)));
    const auto due = link.next_operation(Duration(0));
    EXPECT_TRUE(due && std::holds_alternative<CreateModel>(due->operation));
    link.set_model(due->model, due->session);
    return due->model;
  }
  std::string error_of(const std::string& id) {
    Answer answer;
    if (link.futures().wait(id, Duration(0), answer) != Futures::State::kAnswered) return "no answer";
    return json::parse(answer.bytes).value("error", "no error");
  }
  TestClock clock;
  TinkerLink link{clock, {.operations_max = 3}};
};

TEST_F(TinkerLinkTest, OperationsAreExecutedInTheClientsOrder) {
  const std::string model = make_model();
  // The client sends the later parts of a request first.
  EXPECT_EQ(link.submit(numbered(model, 2)).value(), model + ":2");
  EXPECT_EQ(next(), std::nullopt);
  EXPECT_TRUE(link.submit(numbered(model, 3)));
  EXPECT_TRUE(link.submit(numbered(model, 1)));
  EXPECT_EQ(link.submit(numbered(model, 4)).error().code, Code::kExhausted);
  EXPECT_EQ(next(), model + ":1");
  EXPECT_EQ(next(), model + ":2");
  EXPECT_EQ(next(), model + ":3");
  // A request that is sent again is executed once, before and after its answer.
  EXPECT_EQ(link.submit(numbered(model, 3)).value(), model + ":3");
  link.futures().answer(model + ":3", json_answer({{"a", 1}}));
  EXPECT_EQ(link.submit(numbered(model, 3)).value(), model + ":3");
  EXPECT_EQ(next(), std::nullopt);
}

TEST_F(TinkerLinkTest, AModelOfALiveSessionIsReplacedByItsOwnSessionOnly) {
  const std::string model = make_model();
  const std::string other = *link.create_session();
  const auto id = link.submit(new_model(other, 0));
  ASSERT_TRUE(id);
  EXPECT_EQ(next(), std::nullopt);
  clock.time += std::chrono::seconds(59);
  link.renew_session(other);
  EXPECT_EQ(next(), std::nullopt);
  clock.time += std::chrono::seconds(2);  // the first session has been silent for a minute
  EXPECT_EQ(next(), *id);
  link.set_model(model_id(other, 0), other);
  EXPECT_THAT(link.submit(numbered(model, 1)).error().message(), HasSubstr("does not train model"));
  // The same session makes another.
  EXPECT_TRUE(link.submit(numbered(model_id(other, 0), 2)));
  EXPECT_TRUE(link.submit(new_model(other, 1)));
  EXPECT_EQ(next(), request_id(model_id(other, 1), 0));
  link.set_model(model_id(other, 1), other);
  EXPECT_THAT(error_of(request_id(model_id(other, 0), 2)), HasSubstr("replaced this one"));
}

TEST_F(TinkerLinkTest, AnotherClientWaitsForAModelOnlySoLong) {
  const std::string model = make_model();
  const std::string other = *link.create_session();
  const auto id = link.submit(new_model(other, 0));
  for (int minute = 0; minute < 4; ++minute) {
    EXPECT_EQ(error_of(*id), "no answer");
    clock.time += std::chrono::seconds(50);
    EXPECT_TRUE(link.renew_session(model.substr(0, model.find(':'))));
    EXPECT_EQ(next(), std::nullopt);
  }
  EXPECT_THAT(error_of(*id), HasSubstr("is still open, and a run trains one model"));
}

TEST_F(TinkerLinkTest, SamplersAreOfTheNewestVersion) {
  const std::string session = *link.create_session();
  EXPECT_TRUE(link.create_sampler({.session = session, .number = 0, .base_model = "tiny", .model_path = ""}, "tiny"));
  link.set_published(Version{3});
  const std::string path = link.add_sampler_path("m", "a", Version{3});
  EXPECT_EQ(path, "tinker://m/sampler_weights/a");
  const auto sampler = link.create_sampler({.session = session, .number = 1, .base_model = "", .model_path = path}, "");
  ASSERT_TRUE(sampler);
  EXPECT_EQ(link.sampler(*sampler)->version, Version{3});
  EXPECT_THAT(link.create_sampler({.session = session, .number = 2, .base_model = "tiny", .model_path = ""}, "tiny")
                  .error()
                  .message(),
              HasSubstr("the base can be sampled before the first"));
  link.set_published(Version{4});
  EXPECT_EQ(
      link.create_sampler({.session = session, .number = 3, .base_model = "", .model_path = path}, "").error().code,
      Code::kStale);
}

TEST_F(TinkerLinkTest, EndsEveryRequest) {
  const std::string model = make_model();
  EXPECT_TRUE(link.submit(numbered(model, 1)));
  link.stop("the run was stopped");
  EXPECT_THAT(error_of(model + ":1"), HasSubstr("the run was stopped"));
  EXPECT_FALSE(link.submit(numbered(model, 2)));
}

TEST(TinkerFutures, KeepTheNewestAnswers) {
  Futures futures;
  EXPECT_TRUE(*futures.begin("a"));
  EXPECT_FALSE(*futures.begin("a"));
  Answer answer;
  EXPECT_EQ(futures.wait("a", Duration(0), answer), Futures::State::kPending);
  EXPECT_EQ(futures.wait("b", Duration(0), answer), Futures::State::kUnknown);
  futures.answer("a", {std::string(Futures::kAnswerBytesMax / 2 + 1, 'a'), true});
  EXPECT_EQ(futures.wait("a", Duration(0), answer), Futures::State::kAnswered);
  EXPECT_TRUE(*futures.begin("b"));
  futures.answer("b", {std::string(Futures::kAnswerBytesMax / 2 + 1, 'b'), true});
  EXPECT_EQ(futures.wait("a", Duration(0), answer), Futures::State::kUnknown);
  EXPECT_EQ(futures.wait("b", Duration(0), answer), Futures::State::kAnswered);
  EXPECT_TRUE(*futures.begin("c"));
  futures.drop("c");
  EXPECT_TRUE(*futures.begin("c"));
}

// A server, and in place of the learner's loop the test.
class TinkerServerTest : public testing::Test {
 protected:
  void SetUp() override {
    ServerOptions options;
    options.base_model = "tiny-64";
    options.tokenizer = "/nowhere/model";
    options.adapter_rank = 16;
    options.adapts_mlp = options.adapts_attention = true;
    options.limits = {.response_tokens_max = 6, .positions_max = 64, .vocab_size = 64};
    options.ending_tokens = {63};
    options.workers = [] { return std::size_t{2}; };
    auto started = Server::start(std::move(options), link, desk);
    ASSERT_TRUE(started) << started.error().message();
    server = std::move(*started);
    const std::string url = server->address()["url"];
    http = std::make_unique<httplib::Client>(url);
    headers = {{"X-API-Key", server->address()["key"].get<std::string>()}};
  }
  std::pair<int, std::string> post(const std::string& path, const std::string& body) {
    const auto answer = http->Post(("/api/v1/" + path).c_str(), headers, body, "application/json");
    ECHO_CHECK(static_cast<bool>(answer), "no answer");
    return {answer->status, answer->body};
  }
  json post_json(const std::string& path, const json& body) { return json::parse(post(path, body.dump()).second); }
  // Sends the recorded request; `replace` changes the ids in it.
  json post_recorded(const std::string& path, const std::string& name, const json& replace = json::object()) {
    json body = recorded_json(name + ".request");
    body.update(replace);
    return post_json(path, body);
  }
  // An object with the fields of the recorded answer, and their types.
  static void expect_fields(const json& answer, const std::string& name) {
    const json expected = recorded_json(name + ".answer");
    for (const auto& [field, value] : expected.items()) {
      ASSERT_TRUE(answer.contains(field)) << field << " in " << answer;
      EXPECT_STREQ(answer[field].type_name(), value.type_name()) << field;
    }
  }

  TestClock clock;
  TinkerLink link{clock};
  SampleDesk desk{{.vocab_size = 64}, *model::Tokenizer::bytes(), 0.0, [this](const std::string& id, auto samples) {
                    if (samples)
                      link.futures().answer(id, sample_answer(*samples));
                    else
                      link.futures().fail(id, samples.error());
                  }};
  std::unique_ptr<Server> server;
  std::unique_ptr<httplib::Client> http;
  httplib::Headers headers;
};

TEST_F(TinkerServerTest, AnswersTheClientsRequests) {
  expect_fields(post_recorded("client/config", "client-config.1"), "client-config.1");
  const json session = post_recorded("create_session", "create_session.1");
  expect_fields(session, "create_session.1");
  const std::string session_id = session["session_id"];
  const json created = post_recorded("create_model", "create_model.1", {{"session_id", session_id}});
  expect_fields(created, "create_model.1");
  auto due = link.next_operation(Duration(0));
  ASSERT_TRUE(due);
  EXPECT_EQ(std::get<CreateModel>(due->operation).seed, 5);
  link.set_model(due->model, due->session);
  link.futures().answer(due->id, json_answer({{"model_id", due->model}}));
  EXPECT_EQ(post_json("retrieve_future", {{"request_id", created["request_id"]}})["model_id"], due->model);
  const std::string model = due->model;
  expect_fields(post_recorded("get_info", "get_info.1", {{"model_id", model}}), "get_info.1");

  // Supervised: the recorded message, with this model's id.
  wire::ForwardBackwardRequest request;
  ASSERT_TRUE(request.ParseFromString(recorded("forward_backward.1.request")));
  request.set_model_id(model);
  const auto [status, body] = post("forward_backward", request.SerializeAsString());
  ASSERT_EQ(status, 200) << body;
  due = link.next_operation(Duration(0));
  ASSERT_TRUE(due);
  const auto& batch = std::get<DatumBatch>(due->operation);
  EXPECT_EQ(batch.loss, DatumLoss::kCrossEntropy);
  ASSERT_EQ(batch.data.size(), 1);
  EXPECT_EQ(batch.data[0].weights.front(), 0);
  EXPECT_EQ(batch.data[0].weights.back(), 1);
  for (std::size_t i = 0; i + 1 < batch.data[0].input.size(); ++i)
    EXPECT_EQ(batch.data[0].targets[i], batch.data[0].input[i + 1]);

  const json stepped = post_recorded("optim_step", "optim_step.1", {{"model_id", model}});
  expect_fields(stepped, "optim_step.1");
  due = link.next_operation(Duration(0));
  ASSERT_TRUE(due);
  const AdamSettings& adam = std::get<OptimStep>(due->operation).adam;
  EXPECT_EQ(adam.learning_rate, 1e-3);
  EXPECT_EQ(adam.epsilon, 1e-12);

  expect_fields(post_recorded("save_weights_for_sampler", "save_weights_for_sampler.1", {{"model_id", model}}),
                "save_weights_for_sampler.1");
  due = link.next_operation(Duration(0));
  ASSERT_TRUE(due);
  const auto& save = std::get<SaveForSampler>(due->operation);
  ASSERT_TRUE(save.session_number);
  EXPECT_FALSE(save.follows_newer);
}

TEST_F(TinkerServerTest, SamplesAreLeasedAndAnswered) {
  const std::string session = *link.create_session();
  const std::string sampler = link.add_sampler(session, 0, Version{0}, false);
  const json asked = post_recorded("asample", "asample.1", {{"sampling_session_id", sampler}});
  expect_fields(asked, "asample.1");
  EXPECT_EQ(asked["sample_sequence_ids"].size(), 2);
  schema::WorkGrant grant;
  desk.grant(WorkerId{1}, Version{0}, "digest", 10, 1, grant);
  ASSERT_EQ(grant.leases_size(), 1);
  const schema::Lease& lease = grant.leases(0);
  EXPECT_EQ(lease.rollouts(), 2);
  EXPECT_EQ(lease.sampling().seed(), 1);
  EXPECT_EQ(lease.sampling().tokens_max(), 6);
  ASSERT_EQ(lease.sampling().end_tokens_size(), 1);
  schema::Submission submission;
  submission.set_lease(lease.id());
  for (std::uint32_t member = 0; member < 2; ++member) {
    schema::Trajectory& trajectory = *submission.add_trajectories();
    trajectory.set_id(fmt::format("{}/{}", lease.id(), member));
    trajectory.set_problem_id(lease.problem().id());
    trajectory.set_group(lease.group());
    trajectory.set_member(member);
    trajectory.mutable_prompt_tokens()->CopyFrom(lease.sampling().prompt_tokens());
    trajectory.add_response_tokens(5);
    trajectory.add_response_tokens(63);
    trajectory.add_logprobs(-0.25f);
    trajectory.add_logprobs(-1.5f);
    trajectory.add_spans()->set_end(2);
    trajectory.set_policy_digest("digest");
    trajectory.set_lease(lease.id());
    trajectory.set_worker(1);
  }
  const auto verdict = desk.store(WorkerId{1}, submission, 2);
  ASSERT_TRUE(verdict.accepted) << verdict.detail;
  wire::SampleResponse response;
  ASSERT_TRUE(
      response.ParseFromString(post("retrieve_future", json{{"request_id", asked["request_id"]}}.dump()).second));
  ASSERT_EQ(response.sequences_size(), 2);
  EXPECT_EQ(response.sequences(1).stop_reason(), wire::STOP_REASON_STOP);
  float logprobs[2];
  ASSERT_EQ(response.sequences(1).logprobs().size(), sizeof(logprobs));
  std::memcpy(logprobs, response.sequences(1).logprobs().data(), sizeof(logprobs));
  EXPECT_EQ(logprobs[0], -0.25f);
  EXPECT_EQ(logprobs[1], -1.5f);
}

TEST_F(TinkerServerTest, RefusesWithReasons) {
  headers = {{"X-API-Key", "tml-wrong"}};
  EXPECT_EQ(post("create_session", "{}").first, 401);
  EXPECT_EQ(post("create_model", "{}").first, 401);
  headers = {{"X-API-Key", server->address()["key"].get<std::string>()}};
  const std::string session = *link.create_session();
  const auto create = [&](json change) {
    json body = recorded_json("create_model.1.request");
    body["session_id"] = session;
    body.update(change);
    const auto [status, answer] = post("create_model", body.dump());
    EXPECT_EQ(status, 400) << answer;
    return json::parse(answer)["error"].get<std::string>();
  };
  EXPECT_THAT(create({{"base_model", "other"}}),
              HasSubstr("base_model 'other' is not the run's model, which is 'tiny"));
  EXPECT_THAT(create({{"lora_config", {{"rank", 8}}}}), HasSubstr("pass rank=16, or set learner.adapter.rank"));
  EXPECT_THAT(create({{"lora_config", {{"rank", 16}, {"train_mlp", false}}}}), HasSubstr("train_mlp is False"));
  EXPECT_THAT(create({{"lora_config", nullptr}}), HasSubstr("expected a lora_config"));
  EXPECT_THAT(create({{"optimizer_config", {{"type", "dimuon"}}}}), HasSubstr("expected adamw"));
  EXPECT_EQ(post("session_heartbeat", R"({"session_id":"none"})").first, 410);
  EXPECT_EQ(post("optim_step", R"({"model_id":"none","seq_id":1})").first, 404);
  EXPECT_EQ(post("optim_step", "[").first, 400);
  EXPECT_EQ(post("asample", R"({"sampling_session_id":"none","seq_id":1})").first, 400);
  EXPECT_EQ(post("retrieve_future", R"({"request_id":"none"})").first, 410);
  EXPECT_EQ(post("unknown", "{}").first, 404);
  headers.emplace("Content-Encoding", "zstd");
  EXPECT_NE(post("forward_backward", "x").first, 200);
}

TEST(TinkerRequests, AnUnknownLossTakesItsTurnAndFails) {
  wire::ForwardBackwardRequest request;
  ASSERT_TRUE(request.ParseFromString(recorded("forward_backward.1.request")));
  const auto reason = [&] {
    const auto parsed = parse_forward_backward(request.SerializeAsString());
    EXPECT_TRUE(parsed);
    const auto* refused = parsed ? std::get_if<Refused>(&parsed->operation) : nullptr;
    return refused != nullptr ? refused->reason : "not refused";
  };
  request.set_loss_fn("dro");
  EXPECT_THAT(reason(), HasSubstr("loss_fn 'dro' is not supported, expected cross_entropy, importance_sampling, ppo"));
  request.set_loss_fn("ppo");
  EXPECT_THAT(reason(), HasSubstr("loss_fn_inputs['logprobs'] is missing"));
  request.set_loss_fn("cross_entropy");
  (*request.mutable_loss_fn_config())["clip_low_threshold"] = 0.5;
  EXPECT_THAT(reason(), HasSubstr("is not used by 'cross_entropy'"));
  request.clear_loss_fn_config();
  wire::Datum& datum = *request.mutable_data(0);
  (*datum.mutable_loss_fn_inputs())["weights"].add_shape(2);
  EXPECT_THAT(reason(), HasSubstr("several targets per token are not supported"));
  (*datum.mutable_loss_fn_inputs())["weights"].clear_shape();
  (*datum.mutable_loss_fn_inputs())["target_tokens"].mutable_dense()->pop_back();
  EXPECT_THAT(reason(), HasSubstr("expected one value for each of the"));
  datum.mutable_model_input(0)->mutable_image();
  EXPECT_THAT(reason(), HasSubstr("has an image or audio"));
  request.clear_model_id();
  EXPECT_FALSE(parse_forward_backward(request.SerializeAsString()));
}

TEST(TinkerRequests, PpoOfTheClient) {
  const auto parsed = parse_forward_backward(recorded("forward_backward.2.request"));
  ASSERT_TRUE(parsed) << parsed.error().message();
  const auto& batch = std::get<DatumBatch>(parsed->operation);
  EXPECT_EQ(batch.loss, DatumLoss::kPpo);
  EXPECT_EQ(batch.ratio_min, 0.9);
  EXPECT_EQ(batch.ratio_max, 1.2);
  EXPECT_EQ(batch.data[0].advantages.back(), 1);
}

TEST(TinkerRequests, PathsAreOfThisServer) {
  EXPECT_EQ(parse_path("tinker://a:train:0/weights/x.1", "weights")->name, "x.1");
  for (const char* path : {"", "tinker://", "tinker://a/weights/", "tinker://a/weights/../b", "tinker://a/weights/.b",
                           "file://a/weights/b", "tinker://a/sampler_weights/b"})
    EXPECT_FALSE(parse_path(path, "weights")) << path;
}

// The recorded requests with bytes changed, left out and repeated.
TEST(TinkerRequests, SurviveSpoiledBytes) {
  Random random(11, 0);
  std::size_t files = 0;
  for (const auto& entry : fs::directory_iterator(kRecorded)) {
    if (entry.path().extension() != ".request") continue;
    ++files;
    const std::string request = recorded(entry.path().filename().string());
    test::fuzz_input(request);
    for (int i = 0; i < 300 && !request.empty(); ++i) {
      std::string spoiled = request;
      for (std::uint64_t changes = 1 + random.below(3); changes > 0 && !spoiled.empty(); --changes) {
        const std::size_t at = random.below(spoiled.size());
        if (random.below(3) == 0)
          spoiled.erase(at, 1 + random.below(4));
        else if (random.below(2) == 0)
          spoiled[at] = static_cast<char>(random.below(256));
        else
          spoiled.insert(at, spoiled.substr(at, 1 + random.below(8)));
      }
      test::fuzz_input(spoiled);
    }
  }
  EXPECT_GE(files, 8);
}

}  // namespace
}  // namespace echoline::learner::tinker
