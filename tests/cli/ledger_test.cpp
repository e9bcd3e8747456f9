// echoline ledger and echoline down, from the outside.
#include "provisioner/ledger.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "base/clock.hpp"
#include "learner/planning.hpp"
#include "overlay/uv/hosts.hpp"
#include "provisioner/down.hpp"
#include "provisioner/providers/registry.hpp"
#include "tests/cli/program.hpp"
#include "tests/provisioner/vast_server.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using provisioner::Ledger;

TEST(LedgerVerbs, ShowRentedMachinesAndDownReleasesThem) {
  const TemporaryFolder folder;
  const auto run = folder.path() / "night";
  std::filesystem::create_directories(run);
  std::ofstream(run / "status.json") << "{}";
  const pid_t worker = fork();
  if (worker == 0) {
    setpgid(0, 0);
    execl("/bin/sleep", "sleep", "100", nullptr);
    _exit(127);
  }
  setpgid(worker, worker);
  std::string started;  // field 22, as the provider names processes
  for (std::string word; started.empty();) {
    std::ifstream stat(fmt::format("/proc/{}/stat", worker));
    for (int i = 0; i < 22 && stat >> word; ++i) started = i == 21 ? word : "";
  }
  {
    auto ledger = Ledger::open(run / "ledger.sqlite", "night");
    provisioner::Offer offer;
    offer.provider = "local";
    offer.id = "a";
    offer.host = "host-a";
    offer.gpu_usd_per_hour = 0.36;
    offer.storage_usd_per_hour = 0;
    offer.rollouts_per_s = 2;
    const auto a = ledger->record_intent(offer, 1'700'000'000);
    ASSERT_TRUE(ledger->record_price(a->id, 0.72, 1'700'001'000));  // 1000 s at 36 cents, 2000 s at 72
    ASSERT_TRUE(ledger->record_measurement(a->id, {1.5, std::nullopt, std::nullopt}, 1'700'002'000));
    ASSERT_TRUE(ledger->record_failure(a->id, "never rented", 1'700'002'000));
    const auto b = ledger->record_intent(offer, 1'700'000'000);
    ASSERT_TRUE(ledger->record_start(b->id, "local:1:1", 1'700'000'000));
    ASSERT_TRUE(ledger->record_price(b->id, 0.72, 1'700'001'000));
    ASSERT_TRUE(ledger->record_end(b->id, "stopped", 1'700'003'000));
    const auto c = ledger->record_intent(offer, SystemClock().unix_seconds());
    ASSERT_TRUE(ledger->record_start(c->id, fmt::format("local:{}:{}", worker, started), SystemClock().unix_seconds()));
    ASSERT_TRUE(ledger->record_decision({1'700'000'000, "book", "12.3 of 14.0 rollouts/s", R"({"required":14})"}));
  }
  const json costs = json::parse(run_program({"ledger", "costs", run.string(), "--json"}).out);
  EXPECT_NEAR(costs["instances"][1]["usd"].get<double>(), 0.50, 1e-9);
  EXPECT_EQ(costs["instances"][0]["usd"], 0);
  EXPECT_NEAR(costs["usd_per_hour"].get<double>(), 0.36, 1e-9);
  const Outcome text = run_program({"ledger", "costs", run.string()});
  EXPECT_NE(text.out.find("0.1000"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("0.4000"), std::string::npos) << text.out;
  const json shown = json::parse(run_program({"ledger", "show", run.string(), "--json"}).out);
  EXPECT_EQ(shown["decisions"][0]["numbers"]["required"], 14);
  EXPECT_EQ(shown["states"].size(), 7u);
  EXPECT_EQ(shown["instances"][2]["state"], "running");
  const json hosts = json::parse(run_program({"ledger", "hosts", run.string(), "--json"}).out);
  ASSERT_EQ(hosts.size(), 3u);
  EXPECT_EQ(
      std::count_if(hosts.begin(), hosts.end(), [](const json& h) { return h["measured_rollouts_per_s"] == 1.5; }), 1);

  const Outcome down = run_program({"down", run.string()});
  EXPECT_EQ(down.status, 0) << down.out << down.err;
  EXPECT_NE(down.out.find("nothing of"), std::string::npos);
  int status = 0;
  ASSERT_EQ(waitpid(worker, &status, 0), worker);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ((*Ledger::open(run / "ledger.sqlite", "night")->rows())[2].state, provisioner::InstanceState::kEnded);
  const json again = json::parse(run_program({"down", run.string(), "--json"}).out);
  EXPECT_TRUE(again["released"].empty() && again["problems"].empty());
  EXPECT_EQ(run_program({"ledger", "show", folder.path().string()}).status, 2);
}

TEST(RentedWorker, EndsItsOwnInstanceWhenItEnds) {
  provisioner::VastServer server;  // accepts the key of any instance
  provisioner::VastInstance instance;
  instance.id = 4321;
  server.put(instance);
  setenv("CONTAINER_API_KEY", provisioner::VastServer::kKey, 1);
  setenv("CONTAINER_ID", "4321", 1);
  setenv("ECHOLINE_VAST_URL", server.url().c_str(), 1);
  const Outcome outcome =
      run_program({"worker", "--join", fmt::format("127.0.0.1:{}", free_port()), "--away-max", "1 s"});
  for (const char* name : {"CONTAINER_API_KEY", "CONTAINER_ID", "ECHOLINE_VAST_URL"}) unsetenv(name);
  EXPECT_NE(outcome.status, 0);  // it never got to work
  EXPECT_TRUE(server.rented().empty()) << outcome.err;
  EXPECT_EQ(outcome.err.find(provisioner::VastServer::kKey), std::string::npos);
}

// The children of a process.
std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> children;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream stat(entry.path() / "stat");
    std::string line;
    if (!std::getline(stat, line)) continue;
    std::istringstream fields(line.substr(line.rfind(')') + 2));
    char state = 0;
    pid_t ppid = 0;
    if (fields >> state >> ppid && ppid == parent) children.push_back(std::stoi(entry.path().filename()));
  }
  return children;
}

// The supervisor ends the instance if its worker is killed, and if the worker does not run any more.
TEST(RentedWorker, ItsSupervisorEndsTheInstanceOfAKilledOrFrozenWorker) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    SCOPED_TRACE(signal);
    provisioner::VastServer server;
    provisioner::VastInstance instance;
    instance.id = 4321;
    server.put(instance);
    server.fail_randomly(0.1, 5);
    setenv("CONTAINER_API_KEY", provisioner::VastServer::kKey, 1);
    setenv("CONTAINER_ID", "4321", 1);
    setenv("ECHOLINE_VAST_URL", server.url().c_str(), 1);
    const pid_t supervisor = fork();
    if (supervisor == 0) {
      execl(ECHOLINE_PROGRAM, "echoline", "worker", "--join", fmt::format("127.0.0.1:{}", free_port()).c_str(),
            "--away-max", "10 min", "--silence-max", signal == SIGSTOP ? "2 s" : "10 min", nullptr);
      _exit(127);
    }
    for (const char* name : {"CONTAINER_API_KEY", "CONTAINER_ID", "ECHOLINE_VAST_URL"}) unsetenv(name);
    std::vector<pid_t> workers;
    ASSERT_TRUE(eventually(std::chrono::seconds(20), [&] { return !(workers = children_of(supervisor)).empty(); }));
    ASSERT_EQ(::kill(workers.front(), signal), 0);
    EXPECT_TRUE(eventually(std::chrono::seconds(60), [&] { return server.rented().empty(); }));
    int status = 0;
    waitpid(supervisor, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGKILL);
  }
}

TEST(LedgerVerbs, DownReleasesWithoutFolderOrLedger) {
  provisioner::VastServer server;
  setenv("VAST_API_KEY", provisioner::VastServer::kKey, 1);
  setenv("ECHOLINE_VAST_URL", server.url().c_str(), 1);
  for (const char* label : {"night.1a2b3c4d/1", "night.1a2b3c4d/2", "day.00000000/1", "of the user"}) {
    provisioner::VastInstance instance;
    instance.label = label;
    server.put(instance);
  }
  const TemporaryFolder folder;
  const Outcome lost = run_program({"down", (folder.path() / "night").string()});
  EXPECT_EQ(lost.status, 2);
  EXPECT_NE(lost.err.find("echoline down night --by-label"), std::string::npos) << lost.err;
  // A corrupt ledger names the same way.
  std::filesystem::create_directories(folder.path() / "night");
  std::ofstream(folder.path() / "night" / "status.json") << "{}";
  std::ofstream(folder.path() / "night" / "ledger.sqlite") << std::string(5000, 'x');
  const Outcome corrupt = run_program({"down", (folder.path() / "night").string()});
  EXPECT_NE(corrupt.status, 0);
  EXPECT_NE(corrupt.err.find("--by-label"), std::string::npos) << corrupt.err;
  EXPECT_EQ(server.rented().size(), 4u);
  const Outcome one = run_program({"down", (folder.path() / "night").string(), "--by-label"});
  EXPECT_EQ(one.status, 0) << one.err;
  EXPECT_EQ(server.rented().size(), 2u);
  const Outcome all = run_program({"down", "--all-runs"});
  EXPECT_EQ(all.status, 0) << all.err;
  EXPECT_EQ(server.rented().size(), 1u);
  EXPECT_EQ(run_program({"down"}).status, 2);
  server.expire_key();
  EXPECT_NE(run_program({"down", "--all-runs"}).status, 0);
  unsetenv("VAST_API_KEY");
  unsetenv("ECHOLINE_VAST_URL");
}

// The system clock, moved forward by each pause.
struct FastClock final : Clock {
  TimePoint now() const override { return system.now() + advanced; }
  double unix_seconds() const override { return system.unix_seconds() + seconds(advanced); }
  SystemClock system;
  Duration advanced{};
};

// The learner is killed right after a machine was created, before the answer arrives, and right after it released both.
// Its ledger has every rented machine, and `down` leaves none.
TEST(LedgerVerbs, DownReleasesTheMachinesOfAKilledLearner) {
  if (!kWithTorch) GTEST_SKIP() << "the program was built without libtorch";
  if (overlay::remote_endpoints_of({"::", 1}).empty())
    GTEST_SKIP() << "rented hosts need an address that is not loopback";
  setenv("VAST_API_KEY", provisioner::VastServer::kKey, 1);
  for (const int point : {1, 5}) {
    SCOPED_TRACE(point);
    provisioner::VastServer server;
    const TemporaryFolder folder;
    const auto run = folder.path() / "quickstart";
    json offers = {{"schema_version", 1}, {"offers", json::array()}};
    for (int i = 0; i < 3; ++i)
      offers["offers"].push_back({{"id", std::to_string(101 + i)},
                                  {"provider", "vast"},
                                  {"host", fmt::format("h{}", i)},
                                  {"gpu", "L4"},
                                  {"gpu_count", 1},
                                  {"vram_gb", 24},
                                  {"up_mbit_per_s", 100},
                                  {"down_mbit_per_s", 100},
                                  {"reliability", 0.99},
                                  {"rollouts_per_s", 60},
                                  {"rollouts_source", "profile"},
                                  {"gpu_usd_per_hour", 0.3},
                                  {"storage_usd_per_hour", 0},
                                  {"upload_usd_per_gb", 0},
                                  {"download_usd_per_gb", 0}});
    std::ofstream(folder.path() / "offers.json") << offers;
    std::atomic<bool> two = false, killed = false;
    server.at_points([&](int at) {
      two = two || at == 3;
      if (at != point || killed.exchange(true)) return;
      ::kill(json_file(run / "status.json").at("pid").get<pid_t>(), SIGKILL);
    });
    Program program({"up", "configs/quickstart.yaml", "--json", "--set", "run.folder=" + folder.path().string(),
                     "--set", "fleet.offers=" + (folder.path() / "offers.json").string(), "--set",
                     "fleet.provider=vast", "--set", "fleet.image=debian:12", "--set", "fleet.vast.url=" + server.url(),
                     "--set", "network.bind=::", "--set", "rollout.prompts_per_step=8", "--set",
                     "learner.warm_start.steps_max=1"});
    if (point > 3) {  // with both machines rented, the run is asked to end
      EXPECT_TRUE(eventually(std::chrono::seconds(60), [&] { return two || !program.running(); }));
      program.signal(SIGINT);
    }
    EXPECT_EQ(program.wait(std::chrono::seconds(60)).status, 1);
    ASSERT_TRUE(killed);
    server.at_points({});
    {
      const auto ledger = Ledger::open(run / "ledger.sqlite", "quickstart");
      std::set<std::string> known;
      for (const auto& row : *ledger->rows())
        if (row.is_open()) known.insert(row.label);
      EXPECT_TRUE(point > 3 || !server.rented().empty());
      for (const auto& [id, instance] : server.rented()) EXPECT_TRUE(known.contains(instance.label)) << id;
    }
    {  // as `echoline down` does, which waits a minute for machines that were requested a moment ago
      auto ledger = Ledger::open(run / "ledger.sqlite", "quickstart");
      FastClock clock;
      provisioner::DownOptions options;
      options.provider = [&](const std::string& name) {
        provisioner::ProviderOptions made;
        made.services["vast"].url = server.url();
        return provisioner::make_provider(name, made);
      };
      options.providers = {"vast"};
      options.pause = [&](Duration d) {
        clock.advanced += std::max<Duration>(d, std::chrono::milliseconds(500));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      };
      const auto report = provisioner::bring_down(*ledger, clock, options);
      ASSERT_TRUE(report) << report.error().message();
      EXPECT_TRUE(report->problems.empty());
    }
    EXPECT_TRUE(server.rented().empty());
    const json again = json::parse(run_program({"down", run.string(), "--json"}).out);
    EXPECT_TRUE(again["released"].empty() && again["problems"].empty()) << again.dump();
  }
  unsetenv("VAST_API_KEY");
}

TEST(EarlierRun, ItsMachinesAreReleasedBeforeANewRunRents) {
  provisioner::VastServer server;
  const TemporaryFolder folder;
  learner::RunConfig config;
  config.run.name = "night";
  config.run.folder = folder.path();
  config.fleet.services["vast"].url = server.url();
  {
    auto ledger = Ledger::open(folder.path() / "night.1" / "ledger.sqlite", "night");
    provisioner::Offer offer;
    offer.id = "7";
    offer.provider = "vast";
    const auto row = ledger->record_intent(offer, SystemClock().unix_seconds() - 3600);
    provisioner::VastInstance instance;
    instance.label = row->label;
    server.put(instance);
  }
  unsetenv("VAST_API_KEY");
  const Status without_key = learner::release_earlier(config, folder.path() / "night.1");
  ASSERT_FALSE(without_key);
  EXPECT_NE(without_key.error().message().find("echoline down"), std::string::npos);
  setenv("VAST_API_KEY", provisioner::VastServer::kKey, 1);
  EXPECT_TRUE(learner::release_earlier(config, folder.path() / "night.1"));
  EXPECT_TRUE(server.rented().empty());
  EXPECT_TRUE(learner::release_earlier(config, folder.path() / "night.1"));
  EXPECT_TRUE(learner::release_earlier(config, folder.path() / "nothing"));
  unsetenv("VAST_API_KEY");
}

// A faulty key is reported before the model is made, a file is moved aside, or a program is asked.
TEST(Providers, AnUnusableKeyOrFileIsReportedAtOnce) {
  const TemporaryFolder folder;
  json offers = json_file("configs/offers/quickstart.json");
  for (json& offer : offers.at("offers")) offer["provider"] = "vast";
  std::ofstream(folder.path() / "offers.json") << offers;
  std::ofstream(folder.path() / "key") << "secret\n";
  std::filesystem::permissions(folder.path() / "key", std::filesystem::perms(0644));
  unsetenv("VAST_API_KEY");
  const auto up = [&](const std::string& provider, const std::string& more) {
    return run_program({"up", "configs/quickstart.yaml", "--set", "run.folder=" + (folder.path() / "runs").string(),
                        "--set", "fleet.offers=" + (folder.path() / "offers.json").string(), "--set",
                        "fleet.provider=" + provider, "--set", more});
  };
  const std::string key = (folder.path() / "key").string();
  for (const auto& [more, words] :
       {std::pair<std::string, std::string>{"fleet.image=debian", "no key: set VAST_API_KEY"},
        {"fleet.vast={key_file: " + key + "}", key + ": others can read this key; chmod 600 it"},
        {"fleet.vast={key_file: " + key + "x}", key + "x: No such file"}}) {
    const Outcome refused = up("vast", more);
    EXPECT_EQ(refused.status, 2) << refused.err;
    EXPECT_NE(refused.err.find(words), std::string::npos) << refused.err;
    EXPECT_EQ(refused.err.find("accuracy before"), std::string::npos);
  }
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "runs"));
}

TEST(LedgerVerbs, CostsAreShownBesideTheCharges) {
  provisioner::VastServer server;
  const TemporaryFolder folder;
  const auto run = folder.path() / "quickstart";
  std::filesystem::create_directories(run);
  const auto config =
      learner::load_run_config("configs/quickstart.yaml", {{"fleet.vast", "{url: '" + server.url() + "'}"}});
  ASSERT_TRUE(config) << config.error().message();
  std::ofstream(run / "config.yaml") << config->resolved_yaml;
  std::ofstream(run / "status.json") << "{}";
  const double now = SystemClock().unix_seconds();
  {
    auto ledger = Ledger::open(run / "ledger.sqlite", "quickstart");
    provisioner::Offer offer;
    offer.provider = "vast";
    offer.id = "77";
    offer.gpu_usd_per_hour = 0.36;
    const auto row = ledger->record_intent(offer, now - 7200);
    ASSERT_TRUE(ledger->record_start(row->id, "vast:1001", now - 7200));
    ASSERT_TRUE(ledger->record_end(row->id, "stopped", now - 3600));
  }
  server.charge({1001, now - 7200, 0.35, 0.01, 0.02, 0});
  server.charge({4711, now - 7200, 100, 0, 0, 0});  // of another run
  server.credit(12.5);
  unsetenv("VAST_API_KEY");
  const Outcome keyless = run_program({"ledger", "costs", run.string(), "--charges"});
  EXPECT_EQ(keyless.status, 2) << keyless.err;
  EXPECT_NE(keyless.err.find("set VAST_API_KEY"), std::string::npos) << keyless.err;
  EXPECT_TRUE(json::parse(run_program({"ledger", "costs", run.string(), "--json"}).out).at("charged").is_null());
  setenv("VAST_API_KEY", provisioner::VastServer::kKey, 1);
  const Outcome asked = run_program({"ledger", "costs", run.string(), "--charges"});
  unsetenv("VAST_API_KEY");
  EXPECT_EQ(asked.status, 0) << asked.err;
  EXPECT_NE(asked.out.find("for these, $0.36 by our count and $0.38 charged"), std::string::npos) << asked.out;
  EXPECT_NE(asked.out.find("left on the account of vast: $12.50"), std::string::npos) << asked.out;
  const json kept = json::parse(run_program({"ledger", "costs", run.string(), "--json"}).out);  // without asking again
  EXPECT_NEAR(kept.at("charged").at("usd").get<double>(), 0.38, 1e-9);
  EXPECT_NEAR(kept.at("charged").at("usd_ours").get<double>(), 0.36, 1e-9);
  EXPECT_NEAR(kept.at("instances").at(0).at("usd_charged").get<double>(), 0.38, 1e-9);
  EXPECT_EQ(kept.at("credits").at("vast").at("usd"), 12.5);
}

}  // namespace
}  // namespace echoline::testing
