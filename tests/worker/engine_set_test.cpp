// Several servers of one worker: the distribution of GPUs and sequences, policies, and the loss of a server.
#include "worker/engines/engine_set.hpp"

#include <fstream>

#include "remote_fixture.hpp"
#include "worker/engines/gpus.hpp"

namespace echoline::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using GpuNames = std::vector<std::string>;
using State = FolderEngine::State;

TEST(Gpus, AreThoseOfTheEnvironmentOrOfTheDeviceFiles) {
  TemporaryFolder devices;
  for (const char* name : {"nvidia0", "nvidia3", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia", "null"})
    std::ofstream(devices.path() / name) << "";
  EXPECT_THAT(find_gpus(nullptr, devices.path()), ElementsAre("0", "1", "2"));
  EXPECT_THAT(find_gpus(nullptr, devices.path() / "absent"), IsEmpty());
  EXPECT_THAT(find_gpus("2, GPU-8f,5", devices.path()), ElementsAre("2", "GPU-8f", "5"));
  EXPECT_THAT(find_gpus("", devices.path()), IsEmpty());
  EXPECT_THAT(find_gpus("-1", devices.path()), IsEmpty());
  EXPECT_THAT(find_gpus("1,-1,2", devices.path()), ElementsAre("1"));
}

TEST(Gpus, EveryServerGetsItsOwn) {
  const GpuNames four{"0", "1", "2", "3"};
  EXPECT_THAT(*distribute_gpus(four, 1, std::nullopt), ElementsAre("0", "1", "2", "3"));
  EXPECT_THAT(*distribute_gpus(four, 2, std::nullopt), ElementsAre("0,1", "2,3"));
  EXPECT_THAT(*distribute_gpus({"4", "5", "6", "7", "8"}, 2, std::nullopt), ElementsAre("4,5", "6,7"));
  EXPECT_THAT(*distribute_gpus(four, 1, 2), ElementsAre("0", "1"));
  // The only server gets what this process has.
  for (const auto& alone :
       {distribute_gpus(four, 4, std::nullopt), distribute_gpus(four, 3, std::nullopt), distribute_gpus(four, 1, 1),
        distribute_gpus({}, 1, std::nullopt), distribute_gpus({}, 2, 1)})
    EXPECT_THAT(*alone, ElementsAre(""));
  EXPECT_THAT(distribute_gpus(four, 2, 3).error().message(),
              HasSubstr("need 6 GPUs, and this machine has 4 (0,1,2,3)"));
  EXPECT_THAT(distribute_gpus({"0"}, 2, std::nullopt).error().message(),
              HasSubstr("1 engine with worker.gpus_per_engine 2 needs 2 GPUs, and this machine has 1 (0)"));
  EXPECT_FALSE(distribute_gpus({}, 1, 2));
}

// An engine whose server does what the test says.
class FakeEngine final : public FolderEngine {
 public:
  std::size_t capacity() const override { return places; }
  std::size_t sequences_in_progress() const override { return sequences.size() + outcomes.size(); }
  void submit(Sequence sequence) override { sequences[sequence.id] = std::move(sequence); }
  std::vector<Outcome> poll(Duration) override { return std::exchange(outcomes, {}); }
  void abort(std::uint64_t id) override { sequences.erase(id); }
  std::uint64_t progress() const override { return steps; }
  Status install(const overlay::Publication&) override { return ok(); }
  std::optional<Version> version() const override { return held; }
  const overlay::Digest& digest() const override { return held_digest; }
  Status status() const override {
    if (now == State::kBroken) return fail(Code::kUnavailable, "engine", "it does not work");
    return ok();
  }
  State state() const override { return now; }
  void release_folder() override { ++released; }
  void begin_load(const overlay::Publication& publication) override {
    arriving = publication.version;
    arriving_digest = publication.policy_digest;
    if (now == State::kReady) now = State::kLoading;
  }
  void advance(Duration) override {
    ++steps;
    if (now == State::kLoading && steps_to_load-- <= 0) become_ready();
  }
  void become_ready() {
    now = State::kReady;
    held = arriving;
    held_digest = arriving_digest;
  }
  void finish(std::uint64_t id) {
    outcomes.push_back({id, Response{}});
    sequences.erase(id);
  }

  State now = State::kStarting;
  std::size_t places = 4;
  std::map<std::uint64_t, Sequence> sequences;
  std::vector<Outcome> outcomes;
  std::uint64_t steps = 0;
  int steps_to_load = 3, released = 0;
  Version arriving{};
  std::optional<Version> held;
  overlay::Digest arriving_digest{}, held_digest{};
};

class EngineSetTest : public ::testing::Test {
 protected:
  EngineSetTest() {
    std::vector<std::unique_ptr<FolderEngine>> engines;
    for (FakeEngine*& fake : fakes_) {
      auto engine = std::make_unique<FakeEngine>();
      fake = engine.get();
      engines.push_back(std::move(engine));
    }
    folder_ = *PolicyFolder::make({}, {}, memory_.path());
    const EngineHost host{&stop_, [this] {
                            ++waits_;
                            if (while_waiting_) while_waiting_();
                          }};
    set_ = std::make_unique<EngineSet>(std::move(engines), folder_, host);
  }
  void make_ready() {
    while_waiting_ = [this] {
      for (FakeEngine* fake : fakes_)
        if (fake->now == State::kStarting) fake->become_ready();
    };
    ASSERT_TRUE(set_->install(policies_.snapshot(1)));
    while_waiting_ = {};
  }
  void submit(std::uint64_t id, model::Token prompt) { set_->submit({id, {prompt}, 10, id}); }
  std::vector<std::size_t> load() const {
    std::vector<std::size_t> counts;
    for (const FakeEngine* fake : fakes_) counts.push_back(fake->sequences.size());
    return counts;
  }

  TemporaryFolder memory_;
  Policies policies_{6};
  std::atomic<bool> stop_ = false;
  int waits_ = 0;
  std::function<void()> while_waiting_;
  std::array<FakeEngine*, 3> fakes_{};
  std::shared_ptr<PolicyFolder> folder_;
  std::unique_ptr<EngineSet> set_;
};

TEST_F(EngineSetTest, SequencesGoWhereTheMostRoomIs) {
  make_ready();
  EXPECT_EQ(set_->capacity(), 12u);
  for (std::uint64_t id = 1; id <= 3; ++id) submit(id, static_cast<model::Token>(id));
  EXPECT_THAT(load(), ElementsAre(1, 1, 1));
  fakes_[1]->places = 9;
  submit(4, 4);
  EXPECT_THAT(load(), ElementsAre(1, 2, 1));
  EXPECT_EQ(set_->sequences_in_progress(), 4u);
  fakes_[0]->finish(1);
  const std::vector<Outcome> outcomes = set_->poll(seconds(10));
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_EQ(outcomes[0].id, 1u);
  set_->abort(2);
  set_->abort(77);
  EXPECT_EQ(set_->sequences_in_progress(), 2u);
  EXPECT_THAT(load(), ElementsAre(0, 1, 1));
  EXPECT_THAT(set_->poll(milliseconds(3)), IsEmpty());
  EXPECT_GT(set_->progress(), 0u);
}

// An engine reads a prompt once for all sequences that it has of it.
TEST_F(EngineSetTest, EqualPromptsStayTogetherWhileThereIsRoom) {
  make_ready();
  for (std::uint64_t id = 1; id <= 3; ++id) submit(id, 7);
  for (std::uint64_t id = 4; id <= 6; ++id) submit(id, 8);
  EXPECT_THAT(load(), ElementsAre(3, 3, 0));
  for (std::uint64_t id = 7; id <= 11; ++id) submit(id, 9);
  EXPECT_THAT(load(), ElementsAre(4, 3, 4)) << "the fifth finds no room";
}

TEST_F(EngineSetTest, APolicyIsWrittenOnceAndLoadedByAll) {
  EXPECT_FALSE(set_->version());
  EXPECT_FALSE(set_->can_take_work());
  make_ready();
  EXPECT_EQ(set_->version(), Version{1});
  fakes_[2]->steps_to_load = 40;
  ASSERT_TRUE(set_->install(policies_.delta(1, 2)));
  EXPECT_EQ(folder_->version(), Version{2});
  EXPECT_EQ(folder_->revision(), 2u);
  for (const FakeEngine* fake : fakes_) {
    EXPECT_EQ(fake->held, Version{2});
    EXPECT_EQ(fake->released, 2);
  }
  EXPECT_EQ(set_->digest(), policies_.snapshot(2).policy_digest);
  EXPECT_GT(waits_, 15) << "reports keep the connection alive";
  EXPECT_EQ(set_->install(policies_.delta(1, 3)).error().code, Code::kStale);
  EXPECT_EQ(set_->version(), Version{2});
}

// Its sequences wait for it. The others go on, also with the next policy.
TEST_F(EngineSetTest, AnEngineThatRestartsDelaysNoOther) {
  make_ready();
  for (std::uint64_t id = 1; id <= 3; ++id) submit(id, static_cast<model::Token>(id));
  fakes_[1]->now = State::kStarting;
  EXPECT_TRUE(set_->can_take_work());
  EXPECT_EQ(set_->capacity(), 4u + 1u + 4u);
  ASSERT_TRUE(set_->install(policies_.delta(1, 2)));
  EXPECT_EQ(set_->version(), Version{2}) << "of the engines that work";
  EXPECT_EQ(fakes_[1]->held, Version{1});
  submit(4, 4);
  submit(5, 5);
  EXPECT_THAT(load(), ElementsAre(2, 1, 2));
  // It is back, and reads the folder; the next policy waits until it has done so.
  fakes_[1]->now = State::kLoading;
  fakes_[1]->steps_to_load = 5;
  EXPECT_EQ(set_->version(), Version{2});
  ASSERT_TRUE(set_->install(policies_.delta(2, 3)));
  EXPECT_EQ(fakes_[1]->held, Version{3});
  EXPECT_EQ(set_->version(), Version{3});
}

TEST_F(EngineSetTest, TheSequencesOfABrokenEngineBeginAgainOnTheOthers) {
  make_ready();
  for (std::uint64_t id = 1; id <= 3; ++id) submit(id, static_cast<model::Token>(id));
  fakes_[2]->now = State::kBroken;
  EXPECT_TRUE(set_->status());
  EXPECT_THAT(set_->poll(milliseconds(1)), IsEmpty());
  EXPECT_THAT(load(), ElementsAre(2, 1, 0));
  EXPECT_EQ(set_->sequences_in_progress(), 3u);
  EXPECT_EQ(set_->capacity(), 8u);
  ASSERT_TRUE(set_->install(policies_.delta(1, 2)));
  fakes_[0]->now = fakes_[1]->now = State::kBroken;
  EXPECT_THAT(set_->status().error().message(), HasSubstr("it does not work"));
  EXPECT_THAT(set_->poll(seconds(10)), IsEmpty());
  EXPECT_FALSE(set_->install(policies_.delta(2, 3)));
}

TEST_F(EngineSetTest, AStopEndsTheWaitForServers) {
  while_waiting_ = [this] { stop_ = true; };
  EXPECT_EQ(set_->install(policies_.snapshot(1)).error().code, Code::kCancelled);
}

// ---- with servers ----

// Sets CUDA_VISIBLE_DEVICES of this process.
class VisibleGpus {
 public:
  explicit VisibleGpus(const char* gpus) {
    if (const char* before = std::getenv(kVisibleGpusVariable)) before_ = before;
    ::setenv(kVisibleGpusVariable, gpus, 1);
  }
  ~VisibleGpus() {
    if (before_)
      ::setenv(kVisibleGpusVariable, before_->c_str(), 1);
    else
      ::unsetenv(kVisibleGpusVariable);
  }

 private:
  std::optional<std::string> before_;
};

class ServerSetTest : public RemoteTest {
 protected:
  // Each server leaves a file with its GPUs, their number by the command, and its process id.
  std::string command(const std::string& more = {}) const {
    const std::string kind = GetParam() == Speaks::kSglang ? "sglang" : "vllm-receiver";
    return fmt::format("echo {{gpus}} $$ > {}/gpus-$CUDA_VISIBLE_DEVICES; exec {} {} {{model}} {{port}} --hash {}",
                       folder_.path().string(), ECHOLINE_ENGINE_PROGRAM, kind, more);
  }
  // The policy is installed as soon as one server has it.
  void await_both() {
    const auto end = std::chrono::steady_clock::now() + seconds(30);
    while (engine_->capacity() < 2 * options_.rollouts_at_once && std::chrono::steady_clock::now() < end) {
      engine_->submit({100, {1}, 1, 1});
      finish();
    }
    EXPECT_EQ(engine_->capacity(), 2 * options_.rollouts_at_once);
  }
  std::set<std::string> server_files() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_.path()))
      if (const std::string name = entry.path().filename(); name.starts_with("gpus-")) names.insert(name);
    return names;
  }
  std::pair<int, pid_t> left_by(const std::string& name) const {
    std::pair<int, pid_t> left;
    std::ifstream(folder_.path() / name) >> left.first >> left.second;
    return left;
  }
};
INSTANTIATE_TEST_SUITE_P(Engines, ServerSetTest, ::testing::Values(Speaks::kSglang, Speaks::kVllmReceiver),
                         server_name);

TEST_P(ServerSetTest, TwoServersShareThePolicyAndHaveTheirOwnGpus) {
  const VisibleGpus four("4,5,6,7");
  options_.command = command();
  options_.gpus_per_engine = 2;
  make();
  install(policies_.snapshot(1));
  EXPECT_THAT(server_files(), ElementsAre("gpus-4,5", "gpus-6,7"));
  EXPECT_EQ(left_by("gpus-4,5").first, 2);
  await_both();
  for (std::uint64_t id = 0; id < 24; ++id) engine_->submit({id, {1, 2, static_cast<model::Token>(id)}, 20, id});
  for (std::uint64_t v = 1; v < 5; ++v) install(policies_.delta(v, v + 1));
  const auto all = finish();
  ASSERT_EQ(all.size(), 24u);
  for (const auto& [id, response] : all) ASSERT_TRUE(response) << response.error().message();
  // Both servers have the policy: its responses have the version, and no answer disagrees.
  for (std::uint64_t id = 30; id < 34; ++id) engine_->submit({id, {1, 2, static_cast<model::Token>(id)}, 20, id});
  for (const auto& [id, response] : finish()) expect_whole(response, 5);
}

TEST_P(ServerSetTest, AServerThatDiesTakesOnlyItsOwnSequences) {
  const VisibleGpus two("0,1");
  options_.command = command();
  make();
  install(policies_.snapshot(1));
  await_both();
  for (std::uint64_t id = 0; id < 12; ++id) engine_->submit({id, {1, 2, static_cast<model::Token>(id)}, 20, id});
  std::map<std::uint64_t, Result<Response>> all;
  for (Outcome& early : engine_->poll(Duration{})) all.emplace(early.id, std::move(early.response));
  ASSERT_EQ(::kill(left_by("gpus-1").second, SIGKILL), 0);
  install(policies_.delta(1, 2));
  EXPECT_TRUE(engine_->can_take_work()) << "the other server";
  install(policies_.delta(2, 3));  // while the server starts again, and may be reading the files
  EXPECT_LT(engine_->capacity(), 2 * options_.rollouts_at_once);
  all.merge(finish());
  ASSERT_EQ(all.size(), 12u);
  for (const auto& [id, response] : all) ASSERT_TRUE(response) << response.error().message();
  // The restarted server has the newest policy, too.
  await_both();
  for (const std::uint64_t version : {3u, 4u}) {
    if (version == 4) install(policies_.delta(3, 4));
    for (std::uint64_t id = 30; id < 34; ++id) engine_->submit({id, {1, 2, static_cast<model::Token>(id)}, 20, id});
    for (const auto& [id, response] : finish()) expect_whole(response, version);
  }
}

TEST_P(ServerSetTest, TooFewGpusAreAnError) {
  const VisibleGpus two("0,1");
  options_.command = command();
  options_.engines = 3;
  const auto engine = make_remote_engine(options_, task_, host_);
  ASSERT_FALSE(engine);
  EXPECT_THAT(engine.error().message(), HasSubstr("3 engines with worker.gpus_per_engine 1 need 3 GPUs"));
}

}  // namespace
}  // namespace echoline::worker
