// Checks of a run before anything is rented, and the resulting plan.
#include "learner/preflight.hpp"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "learner/market.hpp"
#include "tests/overlay/folder.hpp"

namespace echoline::learner {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

// A program whose built-in trainer computes on the CPU only.
const BuiltIn kBuiltIn{.load = [](const SourceHost&, bool) { return Result<std::unique_ptr<PolicySource>>(nullptr); },
                       .can_compute_on = [](const std::string& device) -> Status {
                         if (device == "cpu") return ok();
                         return fail(Code::kInvalid, "device", "'{}': this machine has no such device", device);
                       },
                       .settings_digest = [](const RunConfig&, const model::ModelConfig&) { return std::string(); }};

Preflight preflight(const RunConfig& config, const std::filesystem::path& plan = {}) {
  return learner::preflight(config, {.built_in = kBuiltIn, .plan = plan});
}

RunConfig quickstart(const std::vector<std::pair<std::string, std::string>>& overrides = {}) {
  auto config = load_run_config("configs/quickstart.yaml", overrides);
  EXPECT_TRUE(config) << config.error().message();
  return std::move(config).value();
}

const Check& check(const Preflight& result, const std::string& name) {
  const auto named =
      std::find_if(result.checks.begin(), result.checks.end(), [&](const Check& c) { return c.name == name; });
  EXPECT_NE(named, result.checks.end()) << name;
  return *named;
}

// A port with a listening socket.
class TakenPort {
 public:
  TakenPort() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(socket_, 1), 0);
    socklen_t size = sizeof address;
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
  }
  ~TakenPort() { ::close(socket_); }
  std::uint16_t port() const { return port_; }

 private:
  int socket_;
  std::uint16_t port_ = 0;
};

TEST(Preflight, TheQuickstartIsFine) {
  const RunConfig config = quickstart();
  const Preflight result = preflight(config);
  EXPECT_TRUE(result.status()) << result.status().error().message();
  for (const char* name : {"model", "task", "lengths", "messages", "publications", "store", "port", "plan", "providers",
                           "trainer", "memory"})
    EXPECT_EQ(check(result, name).verdict, Verdict::kOk) << name << ": " << check(result, name).detail;
  ASSERT_TRUE(result.plan);
  EXPECT_EQ(result.plan->plan.request.learner_usd_per_hour, config.learner.usd_per_hour);
  EXPECT_EQ(result.plan->plan.request.run_time, std::chrono::seconds(120));
}

TEST(Preflight, WarnsOfSettingsThatMislead) {
  const auto warning_of = [](const std::string& name,
                             const std::vector<std::pair<std::string, std::string>>& overrides) {
    for (const Check& c : preflight(quickstart(overrides)).checks)
      if (c.name == name && c.verdict == Verdict::kWarning) return c.detail;
    return std::string();
  };
  const std::pair<std::string, std::string> pretrained{"model", "{path: no-such-folder}"};
  EXPECT_EQ(warning_of("learning rate", {}), "");
  EXPECT_EQ(warning_of("learning rate", {{"learner.learning_rate", "0.029"}}), "");
  EXPECT_THAT(warning_of("learning rate", {{"learner.learning_rate", "0.03"}}),
              HasSubstr("30 times above 0.001, the default for a new model"));
  EXPECT_THAT(warning_of("learning rate", {{"learner.learning_rate", "1e-6"}}), HasSubstr("1e+03 times below 0.001"));
  EXPECT_THAT(warning_of("learning rate", {pretrained, {"learner.learning_rate", "1e-3"}}),
              HasSubstr("it may destroy the model"));
  EXPECT_EQ(warning_of("learning rate", {pretrained, {"learner.learning_rate", "2e-5"}}), "");
  EXPECT_EQ(warning_of("learning rate", {pretrained, {"learner.trainer", "external"}}), "")
      << "an external trainer has a rate of its own";
  EXPECT_EQ(warning_of("sampling", {}), "");
  EXPECT_THAT(warning_of("sampling", {{"rollout.top_p", "0.5"}}), HasSubstr("its gradient is biased"));
}

// A resumed run keeps its plan, whatever the present offers are. Only the cost limits come from the run file.
TEST(Preflight, AResumedRunKeepsItsPlan) {
  const overlay::TemporaryFolder folder;
  const Preflight first = preflight(quickstart());
  ASSERT_TRUE(first.plan);
  const provisioner::Plan& plan = first.plan->plan;
  ASSERT_TRUE(write_file_atomic(folder / "plan.json", plan.to_json().dump()));
  const Preflight resumed = preflight(
      quickstart({{"fleet.offers", "no-such-offers.json"}, {"fleet.usd_per_hour_max", "7"}}), folder / "plan.json");
  ASSERT_TRUE(resumed.status()) << resumed.status().error().message();
  const provisioner::Plan& resumed_plan = resumed.plan->plan;
  ASSERT_EQ(resumed_plan.chosen().size(), plan.chosen().size());
  for (std::size_t i = 0; i < plan.chosen().size(); ++i) {
    EXPECT_EQ(resumed_plan.chosen()[i]->offer.id, plan.chosen()[i]->offer.id);
    EXPECT_EQ(resumed_plan.chosen()[i]->offer.rollouts_per_s, plan.chosen()[i]->offer.rollouts_per_s);
  }
  EXPECT_EQ(resumed_plan.standby, plan.standby);
  EXPECT_DOUBLE_EQ(resumed_plan.target.required_rollouts_per_s, plan.target.required_rollouts_per_s);
  EXPECT_EQ(resumed_plan.request.fleet.usd_per_hour_max, 7.0);
}

// A file of offers is read again if and only if it has changed.
TEST(Preflight, TheMarketOfARunFollowsItsFile) {
  const overlay::TemporaryFolder folder;
  const auto file = folder / "offers.json";
  const std::string offers_text = *read_file(quickstart().fleet.offers, 1 << 20);
  ASSERT_TRUE(write_file_atomic(file, offers_text));
  const RunConfig config = quickstart({{"fleet.offers", file.string()}});
  const Preflight first = preflight(config);
  ASSERT_TRUE(first.plan);
  const provisioner::Plan& plan = first.plan->plan;
  MarketSource source(config, *run_model_config(config), plan.request, plan.market);
  const std::atomic<bool> stop = false;
  EXPECT_FALSE(source.read_changed_offers(0, stop).value());
  auto document = nlohmann::json::parse(offers_text);
  document.at("offers").erase(document.at("offers").begin());
  ASSERT_TRUE(write_file_atomic(file, document.dump()));
  const auto changed_offers = source.read_changed_offers(0, stop).value();
  ASSERT_TRUE(changed_offers);
  EXPECT_EQ(changed_offers->size(), first.plan->offers.size() - 1);
  EXPECT_FALSE(source.read_changed_offers(0, stop).value());
  ASSERT_TRUE(write_file_atomic(file, "{"));
  EXPECT_THAT(source.read_changed_offers(0, stop).error().message(), HasSubstr("offers.json"));
  EXPECT_FALSE(source.read_changed_offers(0, stop).value()) << "the file is unchanged since it could not be read";
  std::filesystem::remove(file);
  EXPECT_FALSE(source.read_changed_offers(0, stop).value());
  // A run that continues with an old plan reads the file at once.
  ASSERT_TRUE(write_file_atomic(file, offers_text));
  provisioner::Market old_market = plan.market;
  *old_market.recorded_unix_s -= 1000;
  EXPECT_TRUE(
      MarketSource(config, *run_model_config(config), plan.request, old_market).read_changed_offers(0, stop).value());
}

// A search is repeated after a while, even if it has failed.
TEST(Preflight, TheMarketOfARunIsSearchedAgainAfterAWhile) {
  RunConfig config = quickstart();
  config.fleet.search = true;
  config.fleet.services["vast"].url = "http://127.0.0.1:1";
  const std::atomic<bool> stop = false;
  MarketSource source(config, *run_model_config(config), {},
                      {.source = "", .format = "vast", .recorded_unix_s = 1000.0});
  EXPECT_FALSE(source.read_changed_offers(1299, stop).value());
  EXPECT_EQ(source.read_changed_offers(1300, stop).error().code, Code::kUnavailable);
  EXPECT_FALSE(source.read_changed_offers(1599, stop).value());
  EXPECT_FALSE(source.read_changed_offers(1600, stop));
  EXPECT_FALSE(source.read_changed_offers(7, stop)) << "the clock was set back";
}

TEST(Preflight, EverythingThatIsWrongAtOnce) {
  const TakenPort taken_port;
  const RunConfig config =
      quickstart({{"model", "{path: no-such-model}"},
                  {"task", "{adapter: gsm8k, options: {train: no-train.jsonl, test: no-test.jsonl}}"},
                  {"network.port", std::to_string(taken_port.port())},
                  {"fleet.offers", "no-such-offers.json"}});
  const Status status = preflight(config).status();
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Code::kInvalid);
  for (const char* text : {"no-such-model", "no-train.jsonl", "in use", "no-such-offers.json"})
    EXPECT_THAT(status.error().detail, HasSubstr(text));
}

TEST(Preflight, NamesTheAssumptionForAnUnstatedUplink) {
  const auto warns = [](const Preflight& result) {
    return std::any_of(result.checks.begin(), result.checks.end(),
                       [](const Check& c) { return c.name == "uplink" && c.verdict == Verdict::kWarning; });
  };
  EXPECT_FALSE(warns(preflight(quickstart({{"network.uplink", "null"}})))) << "workers are on this machine";
  EXPECT_FALSE(warns(preflight(quickstart({{"fleet.provider", "none"}}))));
  const Preflight unstated = preflight(quickstart({{"fleet.provider", "none"}, {"network.uplink", "null"}}));
  ASSERT_TRUE(warns(unstated));
  EXPECT_THAT(check(unstated, "uplink").detail, HasSubstr("1 Gbit/s"));
}

TEST(Preflight, DevicesAreThere) {
  const Preflight learner = preflight(quickstart({{"learner.device", "cuda"}}));
  EXPECT_EQ(check(learner, "trainer").verdict, Verdict::kFailed);
  EXPECT_THAT(check(learner, "trainer").detail,
              HasSubstr("learner.device: device: 'cuda': this machine has no such device"));
  const Preflight worker = preflight(quickstart({{"worker.device", "cuda:1"}}));
  EXPECT_THAT(check(worker, "trainer").detail, HasSubstr("worker.device: device: 'cuda:1'"));
  EXPECT_EQ(check(preflight(quickstart({{"worker.device", "cuda:1"}, {"fleet.provider", "none"}})), "trainer").verdict,
            Verdict::kOk)
      << "workers are on other machines";
  BuiltIn without_cuda = kBuiltIn;
  without_cuda.has_cuda = [] { return false; };
  const auto over_ssh = [&](const std::string& device, const BuiltIn& built_in) {
    return check(learner::preflight(quickstart({{"worker.device", device}, {"fleet.provider", "ssh"}}),
                                    {.built_in = built_in}),
                 "trainer")
        .detail;
  };
  EXPECT_THAT(over_ssh("cuda", without_cuda), HasSubstr("its libtorch was built without CUDA"));
  EXPECT_THAT(over_ssh("cpu", without_cuda), HasSubstr("computes on cpu"));
  BuiltIn with_cuda = kBuiltIn;
  with_cuda.has_cuda = [] { return true; };
  EXPECT_THAT(over_ssh("cuda", with_cuda), HasSubstr("computes on cpu")) << "the hosts may have GPUs";
  const Preflight without_trainer = learner::preflight(quickstart(), {});
  EXPECT_THAT(check(without_trainer, "trainer").detail, HasSubstr("ECHOLINE_TORCH=ON"));
  EXPECT_EQ(check(learner::preflight(quickstart({{"learner.trainer", "external"}}), {}), "trainer").verdict,
            Verdict::kOk);
}

// A run that will start elsewhere is planned without this machine's devices, ports and files.
TEST(Preflight, FailuresOfThisMachineAreWarningsForARunElsewhere) {
  const TakenPort port;
  const RunConfig config = quickstart(
      {{"learner.device", "cuda"}, {"network.port", std::to_string(port.port())}, {"fleet.bundle", "no-such.tar.gz"}});
  EXPECT_FALSE(preflight(config).status());
  const Preflight elsewhere = learner::preflight(config, {.built_in = kBuiltIn, .plan = {}, .elsewhere = true});
  EXPECT_TRUE(elsewhere.status()) << elsewhere.status().error().message();
  EXPECT_TRUE(elsewhere.plan);
  std::string warnings;
  for (const Check& check : elsewhere.checks)
    if (check.verdict == Verdict::kWarning) warnings += check.name + " ";
  EXPECT_THAT(warnings, HasSubstr("trainer port"));
  EXPECT_THAT(warnings, HasSubstr("bundle"));
  const RunConfig wrong = quickstart({{"model", "{path: no-such-model}"}});
  EXPECT_FALSE(learner::preflight(wrong, {.built_in = kBuiltIn, .plan = {}, .elsewhere = true}).status());
}

TEST(Preflight, ABundleIsThereAndCanBeUnpacked) {
  const overlay::TemporaryFolder folder;
  const auto bundle_check = [&](const std::string& name) {
    const Preflight result = preflight(quickstart({{"fleet.bundle", (folder.path() / name).string()}}));
    return check(result, "bundle");
  };
  EXPECT_EQ(bundle_check("worker.tar.gz").verdict, Verdict::kFailed);
  EXPECT_THAT(bundle_check("worker.tar.gz").detail, HasSubstr("cannot be read; `echoline bundle -o "));
  for (const char* name : {"worker.tar.gz", "worker.tar.zst", "worker.zip"})
    ASSERT_TRUE(write_file_atomic(folder.path() / name, "x"));
  EXPECT_EQ(bundle_check("worker.tar.gz").verdict, Verdict::kOk);
  EXPECT_EQ(bundle_check("worker.tar.zst").verdict, Verdict::kWarning);
  EXPECT_EQ(bundle_check("worker.zip").verdict, Verdict::kFailed);
}

TEST(Preflight, APlanThatCannotBeIsTheOnlyKindOfInfeasible) {
  const Status too_slow = preflight(quickstart({{"fleet.install_time_expected", "90 s"}})).status();
  ASSERT_FALSE(too_slow);
  EXPECT_EQ(too_slow.error().code, Code::kInfeasible);
  const TakenPort taken_port;
  const Status both = preflight(quickstart({{"fleet.install_time_expected", "90 s"},
                                            {"network.port", std::to_string(taken_port.port())}}))
                          .status();
  ASSERT_FALSE(both);
  EXPECT_EQ(both.error().code, Code::kInvalid);
  EXPECT_THAT(both.error().detail, HasSubstr("kappa"));
}

TEST(Preflight, LengthsBeyondTheLimitsAreRefused) {
  // The tiny presets have 1024 positions.
  const Preflight long_responses = preflight(quickstart({{"rollout.response_tokens_max", "1024"}}));
  EXPECT_EQ(check(long_responses, "lengths").verdict, Verdict::kFailed);
  EXPECT_THAT(check(long_responses, "lengths").detail, HasSubstr("1024 positions (arithmetic/"));
  const Preflight large_groups =
      preflight(quickstart({{"rollout.response_tokens_max", "200000"}, {"rollout.group_size", "1024"}}));
  EXPECT_EQ(check(large_groups, "messages").verdict, Verdict::kFailed);
  EXPECT_THAT(check(large_groups, "messages").detail, HasSubstr("rollout.group_size = 1024"));
  const Preflight rare_checkpoints =
      preflight(quickstart({{"run.steps", "5000"}, {"learner.checkpoint_every", "1000"}}));
  EXPECT_EQ(check(rare_checkpoints, "store").verdict, Verdict::kFailed);
  EXPECT_THAT(check(rare_checkpoints, "store").detail, HasSubstr("learner.checkpoint_every"));
  EXPECT_TRUE(preflight(quickstart({{"run.steps", "1000"}, {"learner.checkpoint_every", "1000"}})).status());
  const Preflight small_chunks = preflight(quickstart({{"model.preset", "qwen3-0.6b"}, {"network.chunk", "1 KiB"}}));
  EXPECT_EQ(check(small_chunks, "publications").verdict, Verdict::kFailed);
  EXPECT_THAT(check(small_chunks, "publications").detail, HasSubstr("network.chunk"));
  const Preflight small_store = preflight(quickstart({{"model.preset", "qwen3-0.6b"}, {"network.store", "1 GB"}}));
  EXPECT_THAT(check(small_store, "publications").detail, HasSubstr("network.store"));
  const auto large = model::preset("qwen3-8b");
  ASSERT_TRUE(large);
  EXPECT_EQ(memory_check(*large, {}, 0, Bytes{64'000'000'000}).verdict, Verdict::kFailed);
  EXPECT_EQ(memory_check(*large, {}, 0, Bytes{512'000'000'000}).verdict, Verdict::kOk);
  EXPECT_EQ(memory_check(*large, {}, 20, Bytes{512'000'000'000}).verdict, Verdict::kWarning);
  // Two policies, and an eighth of one for deltas that are folded.
  const Bytes policies_held{static_cast<std::uint64_t>(2.125 * 2 * static_cast<double>(large->parameters()))};
  EXPECT_THAT(memory_check(*large, {}, 0, Bytes{512'000'000'000}).detail,
              HasSubstr("(" + to_text(policies_held) + " of it for the newest policy and the next"));
}

TEST(Preflight, AnExternalTrainersMemoryIsNotTheLearners) {
  const auto large = model::preset("qwen3-8b");
  EXPECT_EQ(memory_check(*large, {}, 0, Bytes{128'000'000'000}, std::nullopt).verdict, Verdict::kOk);
  const Check small = memory_check(*large, {}, 0, Bytes{32'000'000'000}, std::nullopt);
  EXPECT_EQ(small.verdict, Verdict::kFailed);
  EXPECT_THAT(small.detail, HasSubstr("policies of an external trainer"));
  EXPECT_THAT(small.detail, Not(HasSubstr("learner.recompute")));
  const auto memory_detail_with = [](const char* trainer) {
    return check(preflight(quickstart({{"model.preset", "qwen3-0.6b"}, {"learner.trainer", trainer}})), "memory")
        .detail;
  };
  // The policies of a model that is only carried are in files.
  model::ModelConfig carried = *large;
  carried.family = model::Family::kCarried;
  carried.carried_bytes = {1'000'000'000'000};
  const Check of_carried = memory_check(carried, {}, 3, Bytes{16'000'000'000}, std::nullopt);
  EXPECT_EQ(of_carried.verdict, Verdict::kOk);
  EXPECT_THAT(of_carried.detail, HasSubstr("the policies, up to 5.19 TB, are in files on the disk"));
  carried.carried_bytes = {1'000'000};
  EXPECT_THAT(memory_check(carried, {}, 3, Bytes{16'000'000'000}, std::nullopt).detail,
              HasSubstr("holding the policies of an external trainer takes"));
  EXPECT_THAT(memory_detail_with("external"), HasSubstr("holding the policies of an external trainer takes"));
  EXPECT_THAT(memory_detail_with("built_in"), HasSubstr("training"));
}

PreflightOptions with_gpu(std::optional<Bytes> memory) {
  BuiltIn built_in;
  built_in.load = [](const SourceHost&, bool) -> Result<std::unique_ptr<PolicySource>> {
    return fail(Code::kInternal, "test", "not to be loaded");
  };
  built_in.can_compute_on = [](const std::string&) -> Status { return ok(); };
  built_in.device_memory = [memory](const std::string& device) {
    EXPECT_TRUE(device == "cuda" || device == "cuda:0" || device == "cuda:1") << device;
    return memory;
  };
  return {.built_in = built_in};
}

TEST(Preflight, TrainingMemoryIsComparedWithTheGpus) {
  const auto preflight_with = [](std::optional<Bytes> memory) {
    return preflight(
        quickstart({{"model.preset", "qwen3-0.6b"}, {"learner.device", "cuda"}, {"learner.compute", "bf16"}}),
        with_gpu(memory));
  };
  const Bytes large{143'000'000'000}, small{12'000'000'000};
  const Check fits = check(preflight_with(large), "GPU memory");
  EXPECT_EQ(fits.verdict, Verdict::kOk);
  EXPECT_EQ(check(preflight_with(large), "trainer").detail, "the built-in one computes on cuda");
  EXPECT_THAT(fits.detail, HasSubstr("on cuda, training this model takes up to "));
  EXPECT_THAT(fits.detail, HasSubstr("and it has 143 GB"));
  const Preflight too_small = preflight_with(small);
  EXPECT_EQ(check(too_small, "GPU memory").verdict, Verdict::kFailed);
  EXPECT_THAT(check(too_small, "GPU memory").detail, HasSubstr("learner.recompute"));
  EXPECT_FALSE(too_small.status());
  const Check unknown = check(preflight_with(std::nullopt), "GPU memory");
  EXPECT_EQ(unknown.verdict, Verdict::kWarning);
  EXPECT_THAT(unknown.detail, HasSubstr("cannot tell how much cuda has"));
  // On a CPU there is no such check.
  for (const Check& c : preflight(quickstart(), with_gpu(small)).checks) EXPECT_NE(c.name, "GPU memory");
}

TEST(Preflight, WorkersOnTheGpuAreCountedThereAndNotHere) {
  const auto config_with_worker_on = [](const char* worker) {
    return quickstart({{"learner.device", "cuda:0"}, {"worker.device", worker}, {"learner.compute", "bf16"}});
  };
  const Preflight fits = preflight(config_with_worker_on("cuda"), with_gpu(Bytes{143'000'000'000}));
  EXPECT_THAT(check(fits, "GPU memory").detail,
              ContainsRegex("training this model takes up to .*, [0-9]+ workers take"));
  const auto large = model::preset("qwen3-8b").value();
  const Bytes policy = model::memory_estimate(large).policy_bf16;
  EXPECT_THAT(memory_check(large, {}, 2, Bytes{512'000'000'000}, {}, /*workers_on_gpu=*/true).detail,
              HasSubstr("the workers on it " + to_text(Bytes{2 * policy.count})));
  EXPECT_THAT(memory_check(large, {}, 2, Bytes{512'000'000'000}, {}).detail,
              HasSubstr("the workers on it " + to_text(Bytes{6 * policy.count})));
  std::size_t checks = 0;
  for (const Check& c : fits.checks) checks += c.name == "GPU memory" ? 1 : 0;
  EXPECT_EQ(checks, 1u) << "cuda and cuda:0 are one device";

  checks = 0;
  for (const Check& c : preflight(config_with_worker_on("cuda:1"), with_gpu(Bytes{143'000'000'000})).checks)
    checks += c.name == "GPU memory" ? 1 : 0;
  EXPECT_EQ(checks, 2u);

  const GpuLoad load{.device = "cuda", .learner = Bytes{30'000'000'000}, .worker = Bytes{5'000'000'000}, .workers = 2};
  EXPECT_EQ(gpu_memory_check(load, Bytes{40'000'000'000}).verdict, Verdict::kOk);
  const Check crowded = gpu_memory_check(load, Bytes{39'000'000'000});
  EXPECT_EQ(crowded.verdict, Verdict::kWarning);
  EXPECT_THAT(crowded.detail,
              HasSubstr("2 workers take up to 10 GB (5 GB each), and it has 39 GB: together they may not"));
  EXPECT_EQ(gpu_memory_check(load, Bytes{29'000'000'000}).verdict, Verdict::kFailed);
  const Check worker = gpu_memory_check(
      {.device = "cuda:1", .learner = {}, .worker = Bytes{5'000'000'000}, .workers = 1}, Bytes{4'000'000'000});
  EXPECT_EQ(worker.verdict, Verdict::kFailed);
  EXPECT_THAT(worker.detail,
              HasSubstr("on cuda:1, 1 worker takes up to 5 GB, and it has 4 GB: not even one worker fits"));
}

TEST(Preflight, PromptsAreLookedAtAsTheModelSeesThem) {
  const Preflight other_alphabet = preflight(quickstart({{"task.prompt", "\u00a3{prompt}"}}));
  EXPECT_EQ(check(other_alphabet, "lengths").verdict, Verdict::kFailed);
  EXPECT_THAT(check(other_alphabet, "lengths").detail, HasSubstr("cannot be put in the model's tokens"));
  const Preflight bytes = preflight(quickstart({{"task.prompt", "\u00a3{prompt}"}, {"model.preset", "bytes-64"}}));
  EXPECT_EQ(check(bytes, "lengths").verdict, Verdict::kOk) << check(bytes, "lengths").detail;
  const Preflight chat = preflight(quickstart({{"task.chat", "true"}, {"task.system", "Add."}}));
  EXPECT_EQ(check(chat, "lengths").verdict, Verdict::kOk) << check(chat, "lengths").detail;
}

TEST(Preflight, ABindAddressIsOneOfThisMachine) {
  for (const char* address : {"127.0.0.1", "localhost"}) EXPECT_TRUE(can_listen(address, 0)) << address;
  const Status refused = can_listen("not a name", 0);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("'not a name'"));
  EXPECT_FALSE(can_listen("192.0.2.1", 0));  // an address of no machine
}

TEST(PlanRun, FollowsTheRunFile) {
  const auto plan_of = [](const std::vector<std::pair<std::string, std::string>>& overrides) {
    const RunConfig config = quickstart(overrides);
    auto plan = plan_run(config, *model::preset("tiny-64"), 6);
    EXPECT_TRUE(plan) << plan.error().message();
    return std::move(plan->plan);
  };
  // Auto is one of the others, and no slower than any.
  const provisioner::Plan automatic = plan_of({});
  EXPECT_EQ(automatic.request.topology, chains::TopologyPolicy::kAuto);
  EXPECT_EQ(automatic.topology.policy, chains::TopologyPolicy::kStripes);
  EXPECT_LT(automatic.broadcast_time, plan_of({{"network.topology", "trees"}}).broadcast_time);
  EXPECT_EQ(plan_of({{"network.topology", "trees"}}).topology.policy, chains::TopologyPolicy::kTrees);
  EXPECT_EQ(plan_of({{"network.topology", "star"}}).topology.depth(), 1u);
  const provisioner::Plan wide = plan_of({{"staleness.budget", "6"}, {"staleness.lookahead", "5"}}),
                          narrow = plan_of({{"staleness.budget", "6"}, {"staleness.lookahead", "1"}});
  EXPECT_EQ(wide.staleness_worst, 6);
  EXPECT_EQ(wide.to_json().at("staleness").at("bound_by"), "budget");
  EXPECT_EQ(narrow.staleness_worst, 3);
  EXPECT_EQ(narrow.to_json().at("staleness").at("bound_by"), "lookahead");
  EXPECT_THAT(narrow.to_table(), HasSubstr("staleness: at worst 3 steps; the lookahead bounds it (S 6, lookahead 1)"));
  for (const char* budget : {"1", "3", "11"}) {  // the lookahead follows the budget
    const provisioner::Plan plan = plan_of({{"staleness.lookahead", "auto"}, {"staleness.budget", budget}});
    EXPECT_EQ(std::to_string(plan.staleness_worst), budget);
    EXPECT_EQ(plan.to_json().at("staleness").at("bound_by"), "budget");
  }
  const auto short_lived = plan_of({{"fleet.duration_min", "24 h"}});
  for (const auto& row : short_lived.rows)
    if (row.offer.id == "q17") {
      EXPECT_EQ(row.rank, 0) << row.reason;
    }
  const auto long_run = plan_of({{"run.steps", "10000"}});
  for (const auto& row : long_run.rows)
    if (row.offer.id == "q17") {
      EXPECT_THAT(row.reason, HasSubstr("the run takes"));
    }
}

// A row that cannot be used must not hide the others, and must not vanish without a word.
TEST(PlanRun, NotesWhatACatalogueLacks) {
  const overlay::TemporaryFolder folder;
  const std::string catalogue = (folder / "vms.csv").string();
  std::string text = *read_file("tests/provisioner/catalogues/nebius/vms.csv");
  text += "bad,H100,1,16,200,-3,eu-north1,,\n";
  ASSERT_TRUE(write_file_atomic(catalogue, text));
  const std::string profile = std::filesystem::absolute("configs/profiles/gpus.yaml").string();
  const RunConfig config = quickstart({{"fleet.offers", catalogue},
                                       {"fleet.provider", "exec"},
                                       {"fleet.profile", profile},
                                       {"worker.device", "cuda"},
                                       {"fleet.reliability_min", "null"},
                                       {"fleet.assume.storage_usd_per_hour", "0"},
                                       {"fleet.assume.upload_usd_per_gb", "0"},
                                       {"fleet.assume.download_usd_per_gb", "0"},
                                       {"fleet.assume.up", "1 Gbit/s"},
                                       {"fleet.assume.down", "1 Gbit/s"},
                                       {"fleet.step_time_expected", "10 s"}});
  const auto plan = plan_run(config, *model::preset("tiny-64"), 6);
  ASSERT_TRUE(plan) << plan.error().message();
  EXPECT_EQ(plan->plan.chosen().size(), 1u);
  EXPECT_THAT(plan->plan.notes, testing::Contains(HasSubstr("line 7: price: expected a number")));
}

TEST(PlanRun, AGpuMustHoldModelAndGroup) {
  RunConfig config = quickstart();
  const auto model = model::preset("qwen3-8b");
  ASSERT_TRUE(model);
  const model::MemoryEstimate needs = model::memory_estimate(*model);
  config.rollout.group_size = 16;
  config.rollout.response_tokens_max = 4096;
  const Bytes needed = gpu_memory_needed(config, *model, 512);
  EXPECT_GT(needed.count, needs.policy_bf16.count + 16ull * (4096 + 512) * needs.kv_cache_per_token.count);
  EXPECT_LT(needed.count,
            needs.policy_bf16.count + 16ull * (4096 + 512) * needs.kv_cache_per_token.count + 2'000'000'000);
  const auto plan = plan_run(config, *model, 512);
  ASSERT_FALSE(plan);  // 27 GB: one RTX 5090 remains
  EXPECT_THAT(plan.error().detail, HasSubstr("GB per GPU"));
}

}  // namespace
}  // namespace echoline::learner
