// Engines over HTTP against servers that imitate SGLang and vLLM, and their faults.
#include "worker/engines/remote.hpp"

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "delta/checkpoint.hpp"
#include "model/probe_text.hpp"
#include "remote_fixture.hpp"
#include "worker/engines/child.hpp"
#include "worker/engines/policy_folder.hpp"

namespace echoline::worker {
namespace {

const auto kServers =
    ::testing::Values(Speaks::kSglang, Speaks::kVllm, Speaks::kVllmCompletions, Speaks::kVllmReceiver);
INSTANTIATE_TEST_SUITE_P(Engines, RemoteTest, kServers, server_name);

TEST_P(RemoteTest, AnswersAreTakenOverAsTheyAre) {
  attach();
  EXPECT_FALSE(engine_->version());
  install(policies_.snapshot(1));
  for (std::uint64_t id = 0; id < 20; ++id) submit(id);
  EXPECT_EQ(engine_->sequences_in_progress(), 20u);
  const auto all = finish();
  EXPECT_EQ(all.size(), 20u);
  for (const auto& [id, response] : all) expect_whole(response, 1);
  // The same seed, weights and position give the server's own tokens.
  submit(3);
  const auto again = finish();
  EXPECT_EQ(again.at(3)->tokens, all.at(3)->tokens);
  EXPECT_EQ(again.at(3)->logprobs, all.at(3)->logprobs);
  const nlohmann::json asked = nlohmann::json::parse(server_->last(draw_path()));
  const nlohmann::json& sampling = asked.contains("sampling_params") ? asked.at("sampling_params") : asked;
  for (const auto& [name, value] : std::map<std::string, double>{{"top_p", 1},
                                                                 {"top_k", -1},
                                                                 {"min_p", 0},
                                                                 {"temperature", 1},
                                                                 {"repetition_penalty", 1},
                                                                 {"presence_penalty", 0}})
    EXPECT_EQ(sampling.at(name), value) << "otherwise the model's default would apply: " << name;
  EXPECT_EQ(sampling.at("stop_token_ids"), nlohmann::json(task_.phrasing->eos()));
}

// A response ends at its stop string, even if the server goes on.
TEST_P(RemoteTest, StopStringsEndResponses) {
  attach();
  no_end();
  install(policies_.snapshot(1));
  submit(1, 20);
  const Response whole = *finish().at(1);
  const std::string stop = task_.phrasing->tokenizer().decode(std::span(whole.tokens).subspan(4, 2));
  task_.phrasing = *model::Phrasing::from_parts(task_.phrasing->tokenizer(), task_.phrasing->eos(),
                                                nlohmann::json{{"text", "{prompt}"}, {"stop", {stop}}}.dump());
  submit(1, 20);
  const Response stopped = *finish().at(1);
  EXPECT_TRUE(stopped.ended);
  EXPECT_EQ(stopped.tokens, std::vector<model::Token>(whole.tokens.begin(), whole.tokens.begin() + 6));
  EXPECT_EQ(stopped.logprobs.size(), 6u);
  EXPECT_EQ(stopped.spans.back().end, 6u);
  const nlohmann::json asked = nlohmann::json::parse(server_->last(draw_path()));
  EXPECT_EQ((asked.contains("sampling_params") ? asked.at("sampling_params") : asked).at("stop"), nlohmann::json{stop});
}

TEST_P(RemoteTest, LongResponsesAreAskedForInPieces) {
  attach();
  no_end();
  install(policies_.snapshot(1));
  const int before = server_->count(draw_path());
  submit(1, 600);
  const auto all = finish();
  expect_whole(all.at(1), 1, 600);
  EXPECT_EQ(all.at(1)->spans.size(), 1u);
  EXPECT_EQ(server_->count(draw_path()), before + 2);
}

TEST_P(RemoteTest, SequencesUnderWayGoOnUnderTheNewPolicy) {
  attach();
  install(policies_.snapshot(1));
  no_end();
  hold_->held_at = 10;
  for (std::uint64_t id = 0; id < 4; ++id) submit(id, 100);
  server_->fault({"draw", "hang", 1, 0, seconds(3)});
  submit(4, 100);
  while (hold_->drawn < 4 * 10) engine_->poll(kSlice);
  int waits = 0, mixed = 0;
  while_waiting_ = [&] { ++waits; };
  install(policies_.delta(1, 2));
  EXPECT_LT(waits, 60) << "the engine does not wait for the stalled response";
  hold_->held_at = 1000;
  const auto all = finish();
  EXPECT_EQ(all.size(), 5u);
  for (const auto& [id, response] : all) {
    expect_whole(response, 2, 100);
    if (response->spans.size() == 1) continue;  // what had not begun
    ++mixed;
    ASSERT_EQ(response->spans.size(), 2u);
    EXPECT_EQ(response->spans[0].version, Version{1});
    EXPECT_EQ(response->spans[0].end, 10u);
  }
  EXPECT_EQ(mixed, 4);
  // The directory has exactly the new policy.
  const auto there = delta::Checkpoint::open(options_.folder);
  ASSERT_TRUE(there);
  EXPECT_EQ(*delta::digest_state(there->view()), policies_.digest(2));
}

TEST_P(RemoteTest, VersionsOnlyOnTheWayAreNotLoaded) {
  attach();
  install(policies_.snapshot(1));
  const int before = server_->count(load_path());
  for (std::size_t v = 1; v < 4; ++v) {
    overlay::Publication p = policies_.delta(v, v + 1);
    p.activate = v == 3;
    ASSERT_TRUE(engine_->install(p));
    EXPECT_EQ(engine_->version(), Version{v == 3 ? 4u : 1u});
  }
  EXPECT_EQ(server_->count(load_path()), before + 1);
}

TEST_P(RemoteTest, BadPublicationsChangeNothing) {
  attach();
  EXPECT_EQ(engine_->install(policies_.delta(1, 2)).error().code, Code::kStale);
  install(policies_.snapshot(1));
  overlay::Publication other = policies_.delta(1, 2);
  other.policy_digest = policies_.digest(3).bytes;
  EXPECT_EQ(engine_->install(other).error().code, Code::kCorrupt);
  EXPECT_EQ(engine_->install(policies_.delta(2, 3)).error().code, Code::kStale);
  EXPECT_EQ(engine_->version(), Version{1});
  install(policies_.delta(1, 2));
  install(policies_.snapshot(5));
  install(policies_.snapshot(4));
}

// The server reports a load and still answers with the old weights. The engine notices, and asks again.
TEST_P(RemoteTest, StaleWeightsAreSeen) {
  attach();
  install(policies_.snapshot(1));
  const int before = server_->count(load_path());
  server_->fault({"load", "stale", 2});
  install(policies_.delta(1, 2));
  EXPECT_EQ(server_->count(load_path()), before + 3);
  submit(1);
  expect_whole(finish().at(1), 2);
  server_->fault({"load", "stale", 1000});
  const Status never = engine_->install(policies_.delta(2, 3));
  ASSERT_FALSE(never);
  EXPECT_THAT(never.error().message(), HasSubstr("answers as under another version"));
  EXPECT_FALSE(engine_->status());
}

TEST_P(RemoteTest, AReloadThatFailsOrHangsIsTriedAgain) {
  options_.patience = seconds(1);
  attach();
  install(policies_.snapshot(1));
  server_->fault({"load", "fails"});
  server_->fault({"load", "hang", 1, 0, seconds(60)});
  server_->fault({"load", "status", 1, 500});
  install(policies_.delta(1, 2));
  submit(1);
  expect_whole(finish().at(1), 2);
}

// An engine that died during a pause never answers, and its server keeps the connection open.
TEST_P(RemoteTest, APauseThatIsNeverAnsweredEndsSoon) {
  options_.control_timeout = milliseconds(300);
  attach();
  install(policies_.snapshot(1));
  server_->fault({"pause", "hang", 1, 0, seconds(60)});
  const auto before = std::chrono::steady_clock::now();
  install(policies_.delta(1, 2));
  EXPECT_LT(std::chrono::steady_clock::now() - before, options_.patience);
  submit(1);
  expect_whole(finish().at(1), 2);
}

// The engine behind a server has died during a call. The server keeps the call open, and says that it is not healthy.
TEST_P(RemoteTest, AnEngineThatDiesWhileItLoadsIsNoticed) {
  options_.patience = seconds(60);
  attach();
  install(policies_.snapshot(1));
  server_->fault({"load", "hang", 1, 0, seconds(600)});
  server_->fault({"health", "status", 3, 503});
  const auto before = std::chrono::steady_clock::now();
  install(policies_.delta(1, 2));
  EXPECT_LT(std::chrono::steady_clock::now() - before, options_.patience);
  submit(1);
  expect_whole(finish().at(1), 2);
}

// A busy engine answers late, and its server is healthy.
TEST_P(RemoteTest, ALongLoadIsWaitedFor) {
  attach();
  install(policies_.snapshot(1));
  const int before = server_->count(load_path()), checked = server_->count("/health");
  server_->fault({"load", "hang", 1, 0, milliseconds(3500)});
  install(policies_.delta(1, 2));
  EXPECT_EQ(server_->count(load_path()), before + 1);
  EXPECT_GT(server_->count("/health"), checked);
}

TEST_P(RemoteTest, OneProbeIsEnoughOnceTheNoiseIsKnown) {
  attach();
  int probes = 0;
  // The probe is the only text of that length.
  const std::string path = is_vllm() ? "/v1/completions" : "/generate";
  const auto probed = [&] { return server_->count(path) - std::exchange(probes, server_->count(path)); };
  install(policies_.snapshot(1));
  probed();
  for (std::size_t version = 1; version < 5; ++version) {
    install(policies_.delta(version, version + 1));
    EXPECT_EQ(probed(), 1) << version;
  }
  server_->fault({"load", "stale"});
  install(policies_.delta(5, 0));
  EXPECT_EQ(probed(), 2 + 2) << "a second answer decides, and the server that loads again has no known noise";
}

// ---- the plug-in of vLLM ----

class ReceiverTest : public RemoteTest {
 protected:
  nlohmann::json last_update() const { return nlohmann::json::parse(server_->last("/update_weights"))["update_info"]; }
  Policies two_tensors_{6, true};
};
INSTANTIATE_TEST_SUITE_P(Vllm, ReceiverTest, ::testing::Values(Speaks::kVllmReceiver), server_name);

// The fake compares every tensor that is not named with the one it has.
TEST_P(ReceiverTest, OnlyChangedTensorsAreNamed) {
  attach();
  install(two_tensors_.snapshot(1));
  EXPECT_FALSE(last_update().contains("tensors")) << "the receiver has loaded nothing before";
  install(two_tensors_.delta(1, 2));
  EXPECT_EQ(last_update(), nlohmann::json::parse(R"({"version": "2", "base": "1", "tensors": ["model.norm.weight"]})"));
  overlay::Publication between = two_tensors_.delta(2, 3);
  between.activate = false;
  ASSERT_TRUE(engine_->install(between));
  install(two_tensors_.delta(3, 4));
  EXPECT_EQ(last_update()["base"], "2");
  EXPECT_EQ(last_update()["tensors"], nlohmann::json{"model.norm.weight"});
  install(two_tensors_.snapshot(5));
  EXPECT_EQ(last_update()["tensors"].size(), 2u);
  EXPECT_EQ(server_->count("/collective_rpc"), 0);
  submit(1);
  expect_whole(finish().at(1), 5);
}

// The server has none of the policies after a failure. It reads the folder, and goes on with what it kept.
TEST_P(ReceiverTest, AfterAFailureTheServerReadsTheFolder) {
  for (const char* at : {"start", "load"}) {
    attach();
    named_ = false;
    install(policies_.snapshot(1));
    no_end();
    server_->fault(at == std::string("start") ? Fault{"start", "status", 1, 500} : Fault{"load", "fails"});
    hold_->held_at = 10;
    hold_->drawn = 0;
    submit(1, 40);
    while (hold_->drawn < 10) engine_->poll(kSlice);
    install(policies_.delta(1, 2));
    hold_->held_at = 1000;
    const auto all = finish();
    EXPECT_EQ(server_->count("/collective_rpc"), 1) << at;
    expect_whole(all.at(1), 2, 40);
    EXPECT_EQ(all.at(1)->spans[0].version, Version{1}) << "it stayed in the queue";
    const int updates = server_->count("/update_weights");
    install(policies_.delta(2, 3));
    EXPECT_EQ(server_->count("/collective_rpc"), 2) << "until the server starts again";
    EXPECT_EQ(server_->count("/update_weights"), updates);
    engine_.reset();
  }
}

// Another worker ended between the start of an update and its end.
TEST_P(ReceiverTest, AnUpdateThatWasLeftOpenIsClosed) {
  attach();
  install(policies_.snapshot(1));
  server_->leave_update_open();
  install(policies_.delta(1, 2));
  EXPECT_EQ(server_->count("/collective_rpc"), 1);
  engine_.reset();
  named_ = false;
  while_waiting_ = {};
  make();
  install(policies_.snapshot(3));
  EXPECT_EQ(last_update()["version"], "3") << "a new worker uses the plug-in again";
  EXPECT_EQ(server_->count("/collective_rpc"), 1);
}

// The server has the probe's text before it resumes.
TEST_P(ReceiverTest, TheProbeIsThereBeforeTheServerResumes) {
  std::vector<std::string> calls;
  std::mutex mutex;
  server_ = std::make_unique<EngineServer>(GetParam(),
                                           hashing_model(static_cast<std::int32_t>(task_.model.vocab_size) - 1, hold_),
                                           0, fs::path(), [&](const std::string& path, int) {
                                             const std::lock_guard lock(mutex);
                                             calls.push_back(path.substr(0, path.find('?')));
                                           });
  options_.url = server_->url();
  make();
  while_waiting_ = [this] { name_folder(); };
  install(policies_.snapshot(1));
  {
    const std::lock_guard lock(mutex);
    calls.clear();
  }
  server_->fault({"finish", "hang", 1, 0, milliseconds(300)});
  install(policies_.delta(1, 2));
  const std::lock_guard lock(mutex);
  const auto place = [&](const char* path) { return std::ranges::find(calls, path) - calls.begin(); };
  ASSERT_EQ(calls.size(), 7u);
  EXPECT_EQ(place("/resume"), 6);
  EXPECT_GT(place("/v1/completions"), place("/update_weights"));
}

// A step without a gradient publishes the same policy again. The engine loads nothing, and responses go on.
TEST_P(RemoteTest, TheSamePolicyIsNotLoadedAgain) {
  attach();
  install(policies_.snapshot(1));
  const int before = server_->count(load_path());
  no_end();
  hold_->held_at = 10;
  submit(1, 20);
  for (int i = 0; i < 1000 && hold_->drawn < 10; ++i) (void)engine_->poll(milliseconds(5));
  overlay::Publication same = policies_.snapshot(1);
  same.version = Version{2};
  install(same);
  hold_->held_at = 1000;
  expect_whole(finish().at(1), 2);
  EXPECT_EQ(server_->count(load_path()), before);
}

// The learner says with each policy how likely a text is under it. A server whose answers leave that behind has only a
// part of the policy.
TEST_P(RemoteTest, AServerIsHeldAgainstTheLearnersLogprobs) {
  attach();
  const std::vector<model::Token> text = model::probe_text(task_.model);
  const auto with_note = [&](overlay::Publication p, std::size_t version, double off) {
    TemporaryFolder folder;
    const auto encoded = policies_.snapshot(version);
    EXPECT_TRUE(
        delta::write_checkpoint(folder.path(), delta::decode_snapshot(encoded.payload.bytes()->bytes())->view()));
    const auto model = hashing_model(static_cast<std::int32_t>(task_.model.vocab_size) - 1);
    model->load(folder.path());
    schema::PolicyNote note;
    for (const double logprob : model->score(text, {})) note.add_probe_logprobs(logprob + off);
    p.note = note.SerializeAsString();
    return p;
  };
  install(with_note(policies_.snapshot(1), 1, 1e-6));
  install(with_note(policies_.delta(1, 2), 2, -2e-6));
  const Status behind = engine_->install(with_note(policies_.delta(2, 3), 3, 2e-4));
  ASSERT_FALSE(behind);
  EXPECT_THAT(behind.error().message(), HasSubstr("a part of its weights is of an earlier policy"));
}

TEST_P(RemoteTest, AServerOfAnotherModelIsRefused) {
  attach();
  overlay::Publication p = policies_.snapshot(1);
  schema::PolicyNote note;
  for (std::size_t i = 1; i < model::probe_text(task_.model).size(); ++i) note.add_probe_logprobs(-11);
  p.note = note.SerializeAsString();
  if (is_vllm()) {
    ASSERT_TRUE(delta_free_first(p));
  }
  const Status refused = engine_->install(p);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("does it serve this model"));
}

// A server that names an unknown version has other weights.
TEST_P(RemoteTest, AnUnknownVersionOfTheWeightsIsRefused) {
  if (!names_versions()) GTEST_SKIP() << "completions name no version";
  attach();
  install(policies_.snapshot(1));
  const int before = server_->count(load_path());
  server_->fault({"draw", "renamed"});
  submit(1);
  expect_whole(finish().at(1), 1);
  EXPECT_EQ(server_->count(load_path()), before + 1) << "it loads the policy again";
}

// A dead engine behind a living server answers 500. The engine checks the server's health before the next request.
TEST_P(RemoteTest, AfterAnErrorOfTheServerItsHealthIsLookedAt) {
  attach();
  install(policies_.snapshot(1));
  const int before = server_->count("/health");
  server_->fault({"draw", "status", 1, 500});
  server_->fault({"health", "status", 2, 503});
  submit(1);
  expect_whole(finish().at(1), 1);
  EXPECT_GE(server_->count("/health"), before + 3);
}

// The worker takes no work meanwhile.
TEST_P(RemoteTest, AServerThatIsAwayTakesNoWork) {
  attach();
  install(policies_.snapshot(1));
  EXPECT_TRUE(engine_->can_take_work());
  submit(1);
  server_.reset();
  for (int i = 0; i < 1000 && engine_->can_take_work(); ++i) (void)engine_->poll(milliseconds(5));
  EXPECT_FALSE(engine_->can_take_work());
  EXPECT_TRUE(engine_->version()) << "it keeps its policy";
}

// vLLM always loads the folder of its start.
TEST_P(RemoteTest, AServerOfAnotherFolderIsNamed) {
  if (!is_vllm()) GTEST_SKIP() << "SGLang is told which folder to read";
  attach();
  install(policies_.snapshot(1));
  const fs::path other = folder_.path() / "other";
  fs::copy(options_.folder, other);
  server_->replace(other);
  const Status refused = engine_->install(policies_.delta(1, 2));
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("it serves " + other.string()));
  EXPECT_THAT(refused.error().message(), HasSubstr(options_.folder.string()));
}

TEST_P(RemoteTest, NothingIsLostWhileItIsLoadingOrConnectionsBreak) {
  attach();
  server_->fault({"health", "status", 3, 503});
  install(policies_.snapshot(1));
  server_->fault({"draw", "status", 3, 503});
  server_->fault({"draw", "disconnect", 2});
  server_->fault({"draw", "status", 2, 500});
  for (std::uint64_t id = 0; id < 10; ++id) submit(id);
  const auto all = finish();
  EXPECT_EQ(all.size(), 10u);
  for (const auto& [id, response] : all) expect_whole(response, 1);
}

// An impossible answer fails one response, with the reason.
TEST_P(RemoteTest, AnswersThatCannotBeRightAreRefused) {
  attach();
  install(policies_.snapshot(1));
  std::vector<std::string> faults{"no_logprobs", "few_logprobs", "nan",   "positive", "reordered",
                                  "token",       "long",         "short", "html"};
  if (is_vllm()) faults.push_back("foreign");
  std::uint64_t id = 0;
  for (const std::string& what : faults) {
    server_->fault({"draw", what});
    submit(++id, 12);
    const auto all = finish();
    ASSERT_TRUE(all.contains(id)) << what;
    ASSERT_FALSE(all.at(id)) << what << " was taken";
    EXPECT_EQ(all.at(id).error().code, Code::kCorrupt) << what << ": " << all.at(id).error().message();
  }
  server_->fault({"draw", "status", 1, 400});
  submit(++id);
  EXPECT_EQ(finish().at(id).error().code, Code::kInvalid);
  server_->fault({"draw", "status", 3, 500});  // it fails at this one
  submit(++id);
  EXPECT_EQ(finish().at(id).error().code, Code::kInternal);
  submit(++id);
  expect_whole(finish().at(id), 1);
}

// Another program restarts the server, with other weights.
TEST_P(RemoteTest, AnotherProcessAtTheSameAddressGetsThePolicy) {
  attach();
  install(policies_.snapshot(1));
  install(policies_.delta(1, 2));
  TemporaryFolder old;
  const auto encoded = policies_.snapshot(1);
  ASSERT_TRUE(delta::write_checkpoint(old.path(), delta::decode_snapshot(encoded.payload.bytes()->bytes())->view()));
  const int before = server_->count(load_path());
  server_->replace(old.path());
  if (is_vllm()) {
    server_->fault({"draw", "disconnect"});  // what one sees of it
    server_->replace(options_.folder);       // it reads the folder, as it was told to
  }
  submit(1);
  expect_whole(finish().at(1), 2);
  EXPECT_EQ(server_->count(load_path()), before + (is_vllm() ? 0 : 1));
}

TEST_P(RemoteTest, LogprobsOfAnotherTemperatureAreRefused) {
  task_.spec.set_temperature(0.7);
  attach();
  install(policies_.snapshot(1));
  submit(1);
  expect_whole(finish().at(1), 1);
  engine_.reset();
  named_ = false;
  server_->fault({"draw", "raw"});
  make();
  if (is_vllm()) {
    ASSERT_TRUE(delta_free_first(policies_.snapshot(1)));
  }
  const Status refused = engine_->install(policies_.snapshot(1));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kInvalid);
  EXPECT_THAT(refused.error().message(), HasSubstr("temperature 1"));
}

TEST_P(RemoteTest, TruncatedSamplingIsRefused) {
  options_.url = "http://127.0.0.1:1";
  for (const auto& change : std::vector<std::function<void(schema::RunSpec&)>>{
           [](auto& s) { s.set_top_p(0.9); }, [](auto& s) { s.set_top_k(20); }, [](auto& s) { s.set_min_p(0.1); }}) {
    schema::RunSpec kept = task_.spec;
    change(task_.spec);
    const auto engine = make_remote_engine(options_, task_, host_);
    ASSERT_FALSE(engine);
    EXPECT_THAT(engine.error().message(), HasSubstr("rollout.top_p"));
    task_.spec = kept;
  }
}

TEST_P(RemoteTest, AbortedAndUnfitSequencesLeaveNothing) {
  attach();
  hold_->held_at = 1;
  install(policies_.snapshot(1));
  submit(1, 60);
  submit(2, 10);
  engine_->submit({3, {}, 5, 1});
  engine_->submit({4, {static_cast<model::Token>(task_.model.vocab_size)}, 5, 1});
  const std::vector<Outcome> unfit = engine_->poll(Duration{});
  ASSERT_EQ(unfit.size(), 2u);
  for (const Outcome& outcome : unfit) EXPECT_EQ(outcome.response.error().code, Code::kInvalid);
  engine_->abort(1);
  hold_->held_at = 1000;
  const auto all = finish();
  EXPECT_EQ(all.size(), 1u);
  expect_whole(all.at(2), 1, 10);
  EXPECT_EQ(engine_->sequences_in_progress(), 0u);
}

TEST_P(RemoteTest, StopEndsEveryWait) {
  options_.url = "http://127.0.0.1:1";  // an address without a server
  make();
  while_waiting_ = [this] { stop_ = true; };
  EXPECT_EQ(engine_->install(policies_.snapshot(1)).error().code, Code::kCancelled);
}

// ---- as a child ----

class ChildTest : public RemoteTest {
 protected:
  std::string command(const std::string& more) const {
    const std::string kind = GetParam() == Speaks::kSglang         ? "sglang"
                             : GetParam() == Speaks::kVllm         ? "vllm"
                             : GetParam() == Speaks::kVllmReceiver ? "vllm-receiver"
                                                                   : "vllm-completions";
    return fmt::format("{} {} {{model}} {{port}} --hash {}", ECHOLINE_ENGINE_PROGRAM, kind, more);
  }
};
INSTANTIATE_TEST_SUITE_P(Engines, ChildTest, kServers, server_name);

TEST_P(ChildTest, AServerThatDiesIsStartedAgainAndNothingIsLost) {
  options_.command = command("--die-once " + (folder_.path() / "died").string());
  make();
  install(policies_.snapshot(1));
  for (std::uint64_t id = 0; id < 12; ++id) submit(id);
  const auto all = finish();
  EXPECT_TRUE(fs::exists(folder_.path() / "died"));
  EXPECT_EQ(all.size(), 12u);
  for (const auto& [id, response] : all) expect_whole(response, 1);
  install(policies_.delta(1, 2));
  submit(50);
  expect_whole(finish().at(50), 2);
}

TEST_P(ChildTest, OneThatNeverWorksIsGivenUp) {
  options_.command = "exit 3 # {model} {port}";
  make();
  const Status dies = engine_->install(policies_.snapshot(1));
  ASSERT_FALSE(dies);
  EXPECT_THAT(dies.error().message(), HasSubstr("exited with status 3"));
  EXPECT_FALSE(engine_->status());
  options_.command = "sleep 1000 # {model} {port}";
  options_.patience = milliseconds(100);
  options_.folder = folder_.path() / "other";
  make();
  const Status hangs = engine_->install(policies_.snapshot(1));
  ASSERT_FALSE(hangs);
  EXPECT_THAT(hangs.error().message(), HasSubstr("was not ready within"));
}

// The learner knows no log-probabilities of a carried model, so damaged weights would not show in a run.
TEST_P(ChildTest, ACarriedModelWhoseLoadsDamageItIsRefused) {
  task_.model.source_json = task_.model.to_json();
  task_.model.family = model::Family::kCarried;
  options_.command = command("--damaged-loads 100");
  make();
  const Status refused = engine_->install(policies_.snapshot(1));
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("its loads damage the weights of this model"));
  // The plug-in's loads may be wrong while those of the server are right, and the other way round.
  options_.command = command("--damaged-loads 1");
  options_.folder = folder_.path() / "other";
  make();
  if (GetParam() != Speaks::kVllmReceiver) {
    EXPECT_FALSE(engine_->install(policies_.snapshot(1)));
    return;
  }
  install(policies_.snapshot(1));
  install(policies_.delta(1, 2));
  submit(1);
  expect_whole(finish().at(1), 2);
}

// ---- parts ----

bool alive(pid_t pid) {
  std::ifstream stat(fmt::format("/proc/{}/stat", pid));
  std::string id, name, state;
  return (stat >> id >> name >> state) && state != "Z";
}

pid_t pid_in(const fs::path& file) {
  for (int i = 0; i < 1000; ++i) {
    pid_t pid = 0;
    if (std::ifstream(file) >> pid) return pid;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return 0;
}

bool ends(pid_t pid) {
  for (int i = 0; i < 1000 && alive(pid); ++i) std::this_thread::sleep_for(milliseconds(5));
  return !alive(pid);
}

TEST(Child, EndsWithAllThatItStarted) {
  TemporaryFolder folder;
  const std::string command =
      fmt::format("sleep 1000 & echo $! > {0}/a; trap '' TERM; echo $$ > {0}/b; while :; do sleep 0.01; done",
                  folder.path().string());
  auto child = *Child::start(command, {{"X", "1"}}, {});
  const pid_t a = pid_in(folder.path() / "a"), b = pid_in(folder.path() / "b");
  ASSERT_TRUE(alive(a) && alive(b));
  EXPECT_FALSE(child->how_ended());
  child.reset();
  EXPECT_TRUE(ends(a));
  EXPECT_TRUE(ends(b));
}

// A server below the shell has time to clean up, although the shell ends at once.
TEST(Child, AProgramOfTheShellEndsInItsOwnTime) {
  TemporaryFolder folder;
  const std::string server = fmt::format(
      "(trap 'sleep 0.3; echo done > {0}/done; exit' TERM; echo $$ > {0}/pid; while :; do sleep 0.01; done)",
      folder.path().string());
  auto child = *Child::start(server + "; true", {}, {});
  ASSERT_GT(pid_in(folder.path() / "pid"), 0);
  child.reset();
  EXPECT_TRUE(fs::exists(folder.path() / "done"));
}

// The worker is killed: its server ends, and its files in memory are removed.
TEST(Child, DoesNotOutliveAProcessThatIsKilled) {
  TemporaryFolder folder;
  const fs::path policy = folder.path() / "policy";
  fs::create_directory(policy);
  const pid_t parent = ::fork();
  if (parent == 0) {
    auto child = Child::start(fmt::format("echo $$ > {}/pid; exec sleep 1000", folder.path().string()), {}, policy);
    ::pause();
    ::_exit(child ? 0 : 1);
  }
  const pid_t engine = pid_in(folder.path() / "pid");
  ASSERT_TRUE(alive(engine));
  ::kill(parent, SIGKILL);
  ::waitpid(parent, nullptr, 0);
  EXPECT_TRUE(ends(engine));
  for (int i = 0; i < 1000 && fs::exists(policy); ++i) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_FALSE(fs::exists(policy));
}

// /proc has no room at all.
TEST(PolicyFolder, LiesWhereThePolicyFits) {
  const auto disk = std::filesystem::temp_directory_path();
  EXPECT_EQ(first_large_folder({"/proc", disk}, Bytes{1}), disk);
  EXPECT_EQ(first_large_folder({disk, "/proc"}, Bytes{1}), disk);
  EXPECT_EQ(first_large_folder({"/proc", disk}, Bytes{std::uint64_t{1} << 60}), "/proc");
}

TEST(PolicyFolder, IsItsOwnersAlone) {
  TemporaryFolder folder;
  const fs::path where = folder.path() / "policy";
  auto first = PolicyFolder::make({{"config.json", "{}"}}, where);
  ASSERT_TRUE(first);
  EXPECT_EQ(PolicyFolder::make({}, where).error().code, Code::kUnavailable);
  first->reset();
  EXPECT_FALSE(fs::exists(where));
  fs::create_directory(where);
  std::ofstream(where / "mine") << "x";
  EXPECT_EQ(PolicyFolder::make({}, where).error().code, Code::kInvalid);
  EXPECT_TRUE(fs::exists(where / "mine"));
}

// A restarted server gets the same path, so that vLLM finds its compilation cache.
TEST(PolicyFolder, ANewOneHasTheFirstFreeNumber) {
  TemporaryFolder memory;
  const auto make = [&] { return *PolicyFolder::make({}, {}, memory.path()); };
  auto first = make(), second = make();
  EXPECT_EQ(first->path().filename(), "echoline-engine-1");
  EXPECT_EQ(second->path().filename(), "echoline-engine-2");
  first.reset();
  EXPECT_EQ(make()->path().filename(), "echoline-engine-1");
}

// The parts come as over the network, and reach the files at the end.
TEST(PolicyFolder, ADeltaIsResolvedWhileItArrives) {
  TemporaryFolder memory;
  Policies policies(4);
  auto folder = *PolicyFolder::make({}, {}, memory.path());
  const auto in_files = [&] { return *delta::digest_state(delta::Checkpoint::open(folder->path())->view()); };
  overlay::Publication second = policies.delta(1, 2);
  second.id = {std::byte{2}};
  const std::vector<std::byte> bytes = bytes_of(second);
  const overlay::Slice all(bytes);
  const auto arrive = [&](std::size_t end) {
    for (std::size_t at = 0; at < end; at += 20)
      folder->decode_part(
          {second.id, second.version, second.base, at, all.part(at, std::min<std::size_t>(20, end - at))});
  };
  arrive(all.size());
  EXPECT_EQ(folder->install(second).error().code, Code::kStale) << "on nothing";
  ASSERT_TRUE(folder->install(policies.snapshot(1)));
  for (const std::size_t come : {all.size(), all.size() / 2, std::size_t{0}}) {
    arrive(come);
    EXPECT_EQ(in_files(), policies.digest(1)) << "nothing is written before everything is verified";
    ASSERT_TRUE(folder->install(second)) << come;
    EXPECT_EQ(in_files(), policies.digest(2));
    ASSERT_TRUE(folder->install(policies.snapshot(1)));
    EXPECT_EQ(in_files(), policies.digest(1));
  }
  // The folder uses the received bytes and does not read them again.
  arrive(60);
  std::vector<std::byte> other = bytes;
  other[40] ^= std::byte{1};
  overlay::Publication begun = publication(2, 1, other, policies.digest(2));
  EXPECT_FALSE(folder->install(begun)) << "of another publication";
  EXPECT_EQ(in_files(), policies.digest(1));
  EXPECT_EQ(folder->version(), Version{1});
  arrive(60);
  begun.id = second.id;
  ASSERT_TRUE(folder->install(begun));
  EXPECT_EQ(in_files(), policies.digest(2));
  // Another policy than was announced.
  EXPECT_EQ(folder->install(publication(3, 2, bytes_of(policies.delta(2, 3)), policies.digest(1))).error().code,
            Code::kCorrupt);
  EXPECT_EQ(in_files(), policies.digest(2));
  ASSERT_TRUE(folder->install(policies.delta(2, 3)));
  EXPECT_EQ(in_files(), policies.digest(3));
}

// Its files have no name that an engine reads before the whole snapshot is proven.
TEST(PolicyFolder, TheFirstSnapshotIsDecodedIntoItsFiles) {
  TemporaryFolder memory;
  Policies policies(3);
  auto folder = *PolicyFolder::make({}, {}, memory.path());
  const auto names = [&] {
    std::set<std::string> all;
    for (const auto& entry : fs::directory_iterator(folder->path())) all.insert(entry.path().filename());
    return all;
  };
  const overlay::Publication first = policies.snapshot(1);
  const auto arrive = [&](std::size_t damaged_at) {
    std::vector<std::byte> bytes = bytes_of(first);
    if (damaged_at < bytes.size()) bytes[damaged_at] ^= std::byte{1};
    const overlay::Slice all(bytes);
    folder->decode_part({first.id, first.version, first.base, 0, all.part(0, all.size())});
    overlay::Publication whole = publication(1, std::nullopt, bytes, policies.digest(1));
    whole.id = first.id;
    return whole;
  };
  const std::size_t last_value = bytes_of(first).size() / 2;
  const overlay::Publication damaged = arrive(last_value);
  EXPECT_FALSE(folder->install(damaged));
  EXPECT_EQ(names(), (std::set<std::string>{".echoline-worker"}));
  const overlay::Publication good = arrive(~std::size_t{0});
  EXPECT_EQ(names(), (std::set<std::string>{".arriving", ".echoline-worker"}));
  ASSERT_TRUE(folder->install(good));
  EXPECT_EQ(names(), (std::set<std::string>{".echoline-worker", "model.safetensors"}));
  EXPECT_EQ(*delta::digest_state(delta::Checkpoint::open(folder->path())->view()), policies.digest(1));
  ASSERT_TRUE(folder->install(policies.delta(1, 2)));
  EXPECT_EQ(*delta::digest_state(delta::Checkpoint::open(folder->path())->view()), policies.digest(2));
}

TEST(PolicyFolder, ASnapshotOfOtherTensorsReplacesTheFiles) {
  TemporaryFolder memory;
  Policies before(2), after(3, true);
  auto folder = *PolicyFolder::make({}, {}, memory.path());
  ASSERT_TRUE(folder->install(before.snapshot(1)));
  ASSERT_TRUE(folder->install(after.snapshot(1)));
  EXPECT_EQ(*delta::digest_state(delta::Checkpoint::open(folder->path())->view()), after.digest(1));
  EXPECT_EQ(folder->changed_tensors(/*since=*/1).size(), 2u);
  ASSERT_TRUE(folder->install(after.delta(1, 2)));
  EXPECT_EQ(*delta::digest_state(delta::Checkpoint::open(folder->path())->view()), after.digest(2));
}

// A receiver loads only what has changed since it loaded last.
TEST(PolicyFolder, KnowsTheTensorsThatHaveChanged) {
  using Names = std::vector<std::string>;
  TemporaryFolder memory;
  Policies policies(4, true);
  auto folder = *PolicyFolder::make({}, {}, memory.path(), 1, RepeatedTensor{"lm_head.weight", "model.norm.weight"});
  ASSERT_TRUE(folder->install(policies.snapshot(1)));
  EXPECT_EQ(folder->changed_tensors(/*since=*/0), (Names{"model.fixed.weight", "model.norm.weight", "lm_head.weight"}));
  const std::uint64_t loaded = folder->revision();
  EXPECT_EQ(folder->changed_tensors(loaded), Names{});
  ASSERT_TRUE(folder->install(policies.delta(1, 2)));
  ASSERT_TRUE(folder->install(policies.delta(2, 3)));
  EXPECT_FALSE(folder->install(policies.delta(1, 2)));
  EXPECT_EQ(folder->changed_tensors(loaded), (Names{"model.norm.weight", "lm_head.weight"}));
  EXPECT_EQ(folder->changed_tensors(folder->revision()), Names{});
  ASSERT_TRUE(folder->install(policies.snapshot(1)));
  EXPECT_EQ(folder->changed_tensors(loaded).size(), 3u);
}

// vLLM reads the output head of a tied model as a tensor of its own. The policy has it once.
TEST(PolicyFolder, ARepeatedTensorIsWrittenTwice) {
  TemporaryFolder memory;
  Policies policies(4);
  auto folder = *PolicyFolder::make({}, {}, memory.path(), 1, RepeatedTensor{"lm_head.weight", "model.norm.weight"});
  const auto expect = [&](std::size_t version) {
    EXPECT_EQ(overlay::Digest(folder->digest()), policies.digest(version).bytes);
    const auto there = *delta::Checkpoint::open(folder->path());
    ASSERT_EQ(there.view().size(), 2u);
    EXPECT_TRUE(std::ranges::equal(there.view()[0].bytes, there.view()[1].bytes));
    EXPECT_EQ(*delta::digest_state({there.view()[1]}), policies.digest(version));
  };
  ASSERT_TRUE(folder->install(policies.snapshot(1)));
  expect(1);
  ASSERT_TRUE(folder->install(policies.delta(1, 2)));
  expect(2);
  ASSERT_TRUE(folder->install(policies.snapshot(3)));
  expect(3);
}

TEST(PolicyFolder, LeftoversOfAKilledWorkerAreRemoved) {
  TemporaryFolder memory;
  fs::create_directory(memory.path() / "echoline-engine-abcdef");
  std::ofstream(memory.path() / "echoline-engine-abcdef" / ".echoline-worker");
  fs::create_directory(memory.path() / "somebody");
  auto first = *PolicyFolder::make({}, {}, memory.path());
  auto second = *PolicyFolder::make({}, {}, memory.path());
  EXPECT_FALSE(fs::exists(memory.path() / "echoline-engine-abcdef"));
  EXPECT_TRUE(fs::exists(memory.path() / "somebody"));
  EXPECT_TRUE(fs::exists(first->path()));
  EXPECT_TRUE(fs::exists(second->path()));
}

}  // namespace
}  // namespace echoline::worker
