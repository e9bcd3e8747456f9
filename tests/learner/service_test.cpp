// The whole learner in this process. Overlay, desk, publisher, fleet and record are the real ones. The trainer is a
// fake, machines are threads of this process, and the clock may run faster than the system's.
#include "learner/service.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <mutex>
#include <thread>

#include "base/files.hpp"
#include "learner/launch.hpp"
#include "overlay/uv/hosts.hpp"
#include "provisioner/providers/registry.hpp"
#include "tests/overlay/folder.hpp"
#include "worker/agent.hpp"
#include "worker/groups.hpp"

namespace echoline::learner {
namespace {

using testing::HasSubstr;

constexpr const char* kThreads = "threads";
constexpr std::uint64_t kSteps = 3;

// ---- the worker: every response is a token of the prompt and the token that ends it ----

class ShortEngine final : public worker::Engine {
 public:
  explicit ShortEngine(model::Token end) : end_(end) {}
  std::size_t capacity() const override { return 64; }
  std::size_t sequences_in_progress() const override { return sequences_.size(); }
  void submit(worker::Sequence sequence) override { sequences_.push_back(std::move(sequence)); }
  std::vector<worker::Outcome> poll(Duration) override {
    std::vector<worker::Outcome> outcomes;
    for (const worker::Sequence& sequence : sequences_)
      outcomes.push_back({.id = sequence.id,
                          .response = worker::Response{.tokens = {sequence.prompt.front(), end_},
                                                       .logprobs = {-1, -1},
                                                       .spans = {{*version_, 2}},
                                                       .ended = true}});
    progress_ += sequences_.size();
    sequences_.clear();
    return outcomes;
  }
  void abort(std::uint64_t id) override {
    std::erase_if(sequences_, [&](const worker::Sequence& sequence) { return sequence.id == id; });
  }
  std::uint64_t progress() const override { return progress_; }
  Status install(const overlay::Publication& publication) override {
    version_ = publication.version;
    digest_ = publication.policy_digest;
    return ok();
  }
  std::optional<Version> version() const override { return version_; }
  const overlay::Digest& digest() const override { return digest_; }

 private:
  const model::Token end_;
  std::vector<worker::Sequence> sequences_;
  std::uint64_t progress_ = 0;
  std::optional<Version> version_;
  overlay::Digest digest_{};
};

Result<worker::AgentReport> work(const provisioner::LaunchSpec& spec, const std::atomic<bool>& stop) {
  const auto option = [&](std::string_view name) {
    const auto found = std::find(spec.argv.begin(), spec.argv.end(), name);
    return found == spec.argv.end() ? std::string() : *std::next(found);
  };
  worker::AgentOptions agent;
  const std::string address = option("--join");
  const std::size_t colon = address.rfind(':');
  agent.node.learner = {address.substr(0, colon), static_cast<std::uint16_t>(std::stoi(address.substr(colon + 1)))};
  agent.node.name = option("--name");
  for (const auto& [name, value] : spec.env)
    if (name == kTokenVariable) agent.node.token = overlay::trust::Secret(std::string(value));
  agent.make_engine = [](const worker::Task& task,
                         const worker::EngineHost&) -> Result<std::unique_ptr<worker::Engine>> {
    return std::unique_ptr<worker::Engine>(std::make_unique<ShortEngine>(*task.phrasing->eos().begin()));
  };
  return worker::run_agent(agent, stop);
}

// ---- the provider: a machine is a thread ----

struct Threads {
  struct Machine {
    std::atomic<bool> stop = false;
    std::thread thread;
  };
  bool do_work = true;             // false: machines never join
  std::function<void()> stopping;  // called when a machine is asked to end; may be empty
  std::map<std::string, std::unique_ptr<Machine>> machines;
  std::uint64_t started = 0;
};

class ThreadsProvider final : public provisioner::Provider {
 public:
  explicit ThreadsProvider(Threads& threads) : threads_(threads) {}
  void start(provisioner::Ticket ticket, const provisioner::LaunchSpec& spec) override {
    const std::string id = fmt::format("{}:{}", kThreads, ++threads_.started);
    auto machine = std::make_unique<Threads::Machine>();
    if (threads_.do_work)
      machine->thread = std::thread([spec, &stop = machine->stop] {
        const auto report = work(spec, stop);
        EXPECT_TRUE(report) << report.error().message();
      });
    threads_.machines[id] = std::move(machine);
    events_.push_back(provisioner::Started{ticket, {id}, 0.5});
  }
  void stop(provisioner::Ticket ticket, const provisioner::InstanceId& instance, Duration) override {
    if (threads_.stopping) threads_.stopping();
    const auto entry = threads_.machines.find(instance.text);
    ASSERT_NE(entry, threads_.machines.end()) << instance.text;
    Threads::Machine& machine = *entry->second;
    machine.stop = true;
    if (machine.thread.joinable()) machine.thread.join();
    threads_.machines.erase(entry);
    events_.push_back(provisioner::Stopped{ticket, instance, "joined"});
  }
  void list(provisioner::Ticket ticket, const std::string&) override {
    events_.push_back(provisioner::Listed{ticket, true, {}, {}});
  }
  std::vector<provisioner::ProviderEvent> poll(TimePoint) override { return std::exchange(events_, {}); }

 private:
  Threads& threads_;
  std::vector<provisioner::ProviderEvent> events_;
};

provisioner::ProviderKind threads_kind(Threads& threads) {
  return {.name = kThreads,
          .meaning = "threads of a test",
          .make = [&](const provisioner::ProviderOptions&) -> Result<std::unique_ptr<provisioner::Provider>> {
            return std::unique_ptr<provisioner::Provider>(std::make_unique<ThreadsProvider>(threads));
          },
          .is_local = true};
}

// ---- the trainer: every step flips bits ----

struct Trained {
  std::vector<std::vector<schema::Trajectory>> batches;
  std::uint64_t checkpoints = 0;
  std::function<void(std::uint64_t step)> after_step;
};

class BitFlips final : public PolicySource {
 public:
  explicit BitFlips(Trained& trained) : trained_(trained) {}
  std::uint64_t steps() const override { return trained_.batches.size(); }
  Status begin() override { return ok(); }
  Result<std::optional<TrainedStep>> step(const std::vector<schema::Trajectory>& batch) override {
    trained_.batches.push_back(batch);
    return std::optional(TrainedStep{});
  }
  Result<delta::SharedState> policy(Version version) override {
    const delta::StateView layout{{"w", delta::DType::kBF16, {4096}, {}}};
    ECHO_ASSIGN(delta::OwnedState state, delta::OwnedState::empty_like(layout));
    const auto bytes = state.mutable_bytes(0);
    for (std::size_t i = 0; i < 4096; ++i) {
      const auto weight = static_cast<std::uint16_t>(0x3c00 + (i % 7 == 0 ? version.value : 0) + i % 64);
      std::memcpy(bytes.data() + sizeof weight * i, &weight, sizeof weight);
    }
    state.seal();
    return delta::share(std::move(state));
  }
  Status on_step_end() override {
    if (trained_.after_step) trained_.after_step(steps());
    return ok();
  }
  Status evaluate(const char*) override { return ok(); }
  Status checkpoint() override {
    ++trained_.checkpoints;
    return ok();
  }
  const std::map<std::string, double>& accuracy() const override { return accuracy_; }

 private:
  Trained& trained_;
  const std::map<std::string, double> accuracy_;
};

// Runs `factor` times as fast as the system's clock, until it is set to the same speed.
class FastClock final : public Clock {
 public:
  explicit FastClock(int factor) : factor_(factor) {}
  TimePoint now() const override {
    const std::lock_guard lock(mutex_);
    return time_at_base_ + factor_ * (system_.now() - base_);
  }
  double unix_seconds() const override { return unix_begin_ + seconds(now() - begin_); }
  void slow_down() {
    const std::lock_guard lock(mutex_);
    const TimePoint now = system_.now();
    time_at_base_ += factor_ * (now - base_);
    base_ = now;
    factor_ = 1;
  }

 private:
  const SystemClock system_;
  const TimePoint begin_ = system_.now();
  const double unix_begin_ = system_.unix_seconds();
  mutable std::mutex mutex_;
  int factor_;                                       // guarded by mutex_
  TimePoint base_ = begin_, time_at_base_ = begin_;  // guarded by mutex_
};

class ServiceTest : public testing::Test {
 protected:
  RunConfig config() const {
    const auto offers = folder_.path() / "offers.json";
    nlohmann::json list = nlohmann::json::array();
    for (const char* id : {"t1", "t2"})
      list.push_back({{"id", id},
                      {"provider", kThreads},
                      {"gpu", "none"},
                      {"vram_gb", 8},
                      {"rollouts_per_s", 50},
                      {"rollouts_source", "measured"},
                      {"up_mbit_per_s", 100},
                      {"down_mbit_per_s", 100},
                      {"gpu_usd_per_hour", 0.5},
                      {"storage_usd_per_hour", 0},
                      {"upload_usd_per_gb", 0},
                      {"download_usd_per_gb", 0}});
    std::ofstream(offers) << nlohmann::json{{"schema_version", 1}, {"offers", list}};
    const auto file = folder_.path() / "run.yaml";
    std::ofstream(file) << "run: {name: served, steps: " << kSteps << ", folder: runs}\n"
                        << R"(model: {preset: tiny-64}
task: {adapter: arithmetic, options: {evaluation_problems: 200}}
rollout: {prompts_per_step: 32, group_size: 2, response_tokens_max: 4}
staleness: {budget: 1}
fleet: {offers: offers.json, provider: threads, step_time_expected: 1 s, install_time_expected: 1 ms}
)";
    auto config = load_run_config(file);
    EXPECT_TRUE(config) << config.error().message();
    return std::move(*config);
  }

  Result<ServiceOutcome> run(const RunConfig& config) {
    ServiceOptions options;
    options.program = "echoline";
    options.clock = clock_.get();
    options.built_in.load = [this](const SourceHost&, bool) -> Result<std::unique_ptr<PolicySource>> {
      return std::unique_ptr<PolicySource>(std::make_unique<BitFlips>(trained_));
    };
    options.built_in.can_compute_on = [](const std::string&) { return ok(); };
    return run_learner(config, options, stop_);
  }

  nlohmann::json status() const {
    return nlohmann::json::parse(read_file(folder_.path() / "runs/served/status.json", 1 << 20).value());
  }

  const overlay::TemporaryFolder folder_;
  Threads threads_;
  const provisioner::AddedProvider added_{threads_kind(threads_)};
  Trained trained_;
  std::unique_ptr<Clock> clock_;
  std::atomic<bool> stop_ = false;
};

TEST_F(ServiceTest, ARunIsTrainedAndItsMachinesGivenBack) {
  const auto outcome = run(config());
  ASSERT_TRUE(outcome) << outcome.error().message();
  EXPECT_TRUE(outcome->completed);
  ASSERT_EQ(trained_.batches.size(), kSteps);
  for (const auto& batch : trained_.batches) EXPECT_EQ(batch.size(), 64u);
  EXPECT_EQ(threads_.started, 2u);
  EXPECT_TRUE(threads_.machines.empty());
  const nlohmann::json final_status = status();
  EXPECT_EQ(final_status["phase"], "completed");
  EXPECT_EQ(final_status["step"], kSteps);
  EXPECT_EQ(final_status["version"], kSteps);
  ASSERT_EQ(final_status["workers"].size(), 2u);
  for (const auto& worker : final_status["workers"]) EXPECT_EQ(worker["version"], kSteps) << worker;
}

TEST_F(ServiceTest, AStoppedRunKeepsItsStateAndReleasesTheFleet) {
  trained_.after_step = [this](std::uint64_t step) { stop_ = step == 2; };
  const auto outcome = run(config());
  ASSERT_TRUE(outcome) << outcome.error().message();
  EXPECT_FALSE(outcome->completed);
  EXPECT_EQ(trained_.batches.size(), 2u);
  EXPECT_GE(trained_.checkpoints, 1u);
  EXPECT_TRUE(threads_.machines.empty());
  EXPECT_EQ(status()["phase"], "interrupted");
}

TEST_F(ServiceTest, MachinesThatNeverJoinEndTheRunAndAreGivenBack) {
  threads_.do_work = false;
  auto clock = std::make_unique<FastClock>(100);
  threads_.stopping = [clock = clock.get()] { clock->slow_down(); };  // the fleet has seconds to give machines back
  clock_ = std::move(clock);
  const auto outcome = run(config());
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code, Code::kUnavailable);
  EXPECT_THAT(outcome.error().message(), HasSubstr("no worker joined within"));
  EXPECT_GE(threads_.started, 2u);
  EXPECT_TRUE(threads_.machines.empty());
  EXPECT_TRUE(trained_.batches.empty());
}

}  // namespace
}  // namespace echoline::learner
