// A cloud that only this file knows, from its section of the run file to the final check for rented machines.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "base/config.hpp"
#include "base/files.hpp"
#include "base/secret.hpp"
#include "learner/planning.hpp"
#include "provisioner/bill.hpp"
#include "provisioner/down.hpp"
#include "provisioner/fleet_driver.hpp"
#include "provisioner/host_script.hpp"
#include "provisioner/providers/registry.hpp"
#include "tests/overlay/folder.hpp"

namespace echoline::provisioner {
namespace {

using testing::HasSubstr;

// ---- the code of a new cloud ----

// The service, which rents out rooms.
struct Nimbus {
  std::mutex mutex;
  std::map<int, LaunchSpec> rented;  // by the room's number
  int newest = 0;
  bool refuses_first = false;  // the first request is refused, and answered again by its room
  std::string searched_url, searched_region, billed_url;  // of the latest calls

  std::vector<int> numbers() {
    const std::lock_guard lock(mutex);
    std::vector<int> rented_numbers;
    for (const auto& [number, spec] : rented) rented_numbers.push_back(number);
    return rented_numbers;
  }
  int rent(const LaunchSpec& spec) {
    const std::lock_guard lock(mutex);
    rented[++newest] = spec;
    return newest;
  }
  bool end(int number) {
    const std::lock_guard lock(mutex);
    return rented.erase(number) > 0;
  }
};

constexpr const char* kNimbus = "nimbus";
constexpr const char* kKey = "NIMBUS_KEY";

InstanceId id_of(int number) { return {fmt::format("{}:{}", kNimbus, number)}; }

class NimbusProvider final : public Provider {
 public:
  explicit NimbusProvider(Nimbus& service) : service_(service) {}
  void start(Ticket ticket, const LaunchSpec& spec) override {
    if (std::exchange(service_.refuses_first, false))
      events_.push_back(StartFailed{.ticket = ticket,
                                    .error = {Code::kUnavailable, kNimbus, "no room"},
                                    .retryable = false,
                                    .perhaps_rented = false});
    events_.push_back(Started{ticket, id_of(service_.rent(spec)), 0.4});
  }
  void stop(Ticket ticket, const InstanceId& instance, Duration) override {
    const bool was_rented = service_.end(std::atoi(instance.text.c_str() + std::string_view(kNimbus).size() + 1));
    events_.push_back(Stopped{ticket, instance, was_rented ? "returned" : "not there", !was_rented});
  }
  void list(Ticket ticket, const std::string& label_prefix) override {
    Listed listed{ticket, true, {}, std::nullopt};
    const std::lock_guard lock(service_.mutex);
    for (const auto& [number, spec] : service_.rented)
      if (spec.label.starts_with(label_prefix)) listed.instances.push_back({id_of(number), spec.label, 0.4});
    events_.push_back(std::move(listed));
  }
  std::vector<ProviderEvent> poll(TimePoint) override { return std::exchange(events_, {}); }

 private:
  Nimbus& service_;
  std::vector<ProviderEvent> events_;
};

// "nimbus", and a line for each offer: its id and rollouts a second.
Result<OfferList> read_nimbus(std::string_view text, std::string_view, const OfferReadOptions&) {
  std::istringstream lines{std::string(text)};
  std::string title;
  lines >> title;
  std::vector<Offer> offers;
  for (Offer offer; lines >> offer.id >> offer.rollouts_per_s; offers.push_back(offer)) {
    offer.provider = kNimbus;
    offer.host = "host-" + offer.id;
    offer.gpu = "L4";
    offer.vram_gb = 24;
    offer.up = offer.down = BitRate{1e8};
    offer.reliability = 0.99;
    offer.rollouts_source = RateSource::kMeasured;
    offer.gpu_usd_per_hour = 0.4;
    offer.storage_usd_per_hour = offer.upload_usd_per_gb = offer.download_usd_per_gb = 0;
  }
  return OfferList{.offers = std::move(offers), .format = {}};
}

ProviderKind nimbus_kind(Nimbus& service) {
  return {.name = kNimbus,
          .meaning = "rooms of Nimbus",
          .make = [&](const ProviderOptions&) -> Result<std::unique_ptr<Provider>> {
            ECHO_ASSIGN(const std::string key, read_secret(kKey, ""));
            if (key.empty()) return fail(Code::kInvalid, kNimbus, "no key: set {}", kKey);
            return std::unique_ptr<Provider>(std::make_unique<NimbusProvider>(service));
          },
          .secrets = {kKey},
          .settings_meaning = "Nimbus.",
          .read_settings =
              [](ConfigSection section, ServiceSettings& settings) {
                section.read("url", settings.url, "where Nimbus is");
                section.read("region", settings.others["region"], "of its rooms");
              },
          .offer_format = OfferFormat{kNimbus, "a list of Nimbus",
                                      [](std::string_view head) { return head.starts_with("nimbus\n"); }, read_nimbus},
          .search = [&](const ProviderOptions& options, const MarketQuestion&) -> Result<MarketAnswer> {
            service.searched_url = options.service(kNimbus).url;
            service.searched_region = options.service(kNimbus).others.at("region");
            ECHO_ASSIGN(OfferList list, read_nimbus("nimbus\na 2500\nb 2500\nc 2500\n", "", {}));
            return MarketAnswer{service.searched_url, kNimbus, std::move(list.offers)};
          },
          .title = "Nimbus",
          .bill = [&](const ProviderOptions& options, double, double to_unix_s) -> Result<Bill> {
            service.billed_url = options.service(kNimbus).url;
            return Bill{{{id_of(1), to_unix_s, 0.25, 0.2, 0.05}, {id_of(99), to_unix_s, 7, 7, 0}}, 12.5};
          },
          .mapped_port = [](std::uint16_t port, const Environment& environment) -> std::optional<MappedPort> {
            const char* mapped = environment(fmt::format("NIMBUS_PORT_{}", port).c_str());
            if (!mapped) return std::nullopt;
            return MappedPort{"203.0.113.5", static_cast<std::uint16_t>(std::atoi(mapped))};
          },
          .own_instance = [&]() -> std::optional<OwnInstance> {
            const char* id = std::getenv("NIMBUS_ROOM");
            if (!id) return std::nullopt;
            ::unsetenv("NIMBUS_ROOM_KEY");
            return OwnInstance{id, [&service, number = std::atoi(id)] {
                                 return service.end(number)
                                            ? ok()
                                            : Status(fail(Code::kNotFound, kNimbus, "room {} is not there", number));
                               }};
          },
          .end_own_instance = "  [ -z \"${NIMBUS_ROOM-}\" ] || echo \"$NIMBUS_ROOM\" >\"$NIMBUS_ENDED\"\n"};
}

// ---- the rest of the program with it ----

class NewCloud : public testing::Test {
 protected:
  NewCloud() { ::setenv(kKey, "the-key-of-the-test", 1); }
  ~NewCloud() override { ::unsetenv(kKey); }

  learner::RunConfig config() const {
    auto config = learner::load_run_config("configs/quickstart.yaml",
                                           {{"run.folder", folder.path().string()},
                                            {"fleet.provider", kNimbus},
                                            {"fleet.offers", "null"},
                                            {"fleet.search", "true"},
                                            {"fleet.nimbus", "{url: \"nimbus://here\", region: north}"}});
    EXPECT_TRUE(config) << config.error().message();
    return std::move(*config);
  }
  std::filesystem::path ledger_file() const { return folder.path() / "ledger.sqlite"; }
  Ledger ledger() const { return std::move(*Ledger::open(ledger_file(), "quickstart")); }

  FleetOptions fleet_options(const learner::RunConfig& run) const {
    FleetOptions options;
    options.run = run.run.name;
    auto plan = learner::plan_run(run, *learner::run_model_config(run), 16);
    EXPECT_TRUE(plan) << plan.error().message();
    options.plan = std::move(plan->plan);
    options.ledger_file = ledger_file();
    options.providers = learner::provider_options(run);
    options.launch = [](const Offer& offer) -> Result<LaunchSpec> {
      LaunchSpec spec;
      set_worker_command(spec, offer.provider, HostScript{"192.0.2.1:7000", "sum", "pin", "ca"}, {"worker"});
      return spec;
    };
    options.record = [](std::string_view, const std::string&, const std::string&) {};
    return options;
  }

  const overlay::TemporaryFolder folder;
  Nimbus service;
  const AddedProvider added{nimbus_kind(service)};
};

TEST_F(NewCloud, IsSearchedPlannedRentedBilledAndReturned) {
  const learner::RunConfig run = config();
  FleetOptions options = fleet_options(run);
  EXPECT_EQ(service.searched_url, "nimbus://here");
  EXPECT_EQ(service.searched_region, "north");
  EXPECT_EQ(options.plan.market.format, kNimbus);
  ASSERT_EQ(options.plan.chosen().size(), 2u);
  auto fleet = FleetDriver::start(std::move(options));
  ASSERT_TRUE(fleet) << fleet.error().message();
  EXPECT_EQ((*fleet)->summary().started, 2u);
  ASSERT_EQ(service.numbers(), (std::vector{1, 2}));
  {
    const std::lock_guard lock(service.mutex);
    const LaunchSpec& spec = service.rented.at(1);
    EXPECT_EQ(spec.ports, std::vector{kMappedPort});
    EXPECT_THAT(spec.argv, testing::IsSupersetOf(std::vector<std::string>{"--port", "7070"}));
    EXPECT_THAT(spec.argv.at(2), HasSubstr("NIMBUS_ROOM"));
    EXPECT_THAT(spec.argv.at(2), testing::Not(HasSubstr("vast"))) << "the script is for this cloud only";
  }
  (*fleet)->stop();
  EXPECT_THAT(service.numbers(), testing::IsEmpty());

  Ledger machines = ledger();
  for (const LedgerRow& row : *machines.rows()) {
    EXPECT_EQ(row.provider, kNimbus);
    EXPECT_EQ(row.state, InstanceState::kEnded);
    EXPECT_EQ(row.usd_per_hour, 0.4);
  }
  ASSERT_TRUE(book_bills(machines, learner::provider_options(run), SystemClock().unix_seconds()));
  EXPECT_EQ(service.billed_url, "nimbus://here");
  const auto charges = *machines.charges();
  ASSERT_EQ(charges.size(), 1u);  // the other one is of another run
  EXPECT_EQ(charges[0].row, 1);
  EXPECT_EQ(charges[0].usd, 0.25);
  ASSERT_EQ(machines.credits()->size(), 1u);
  EXPECT_EQ(machines.credits()->front().provider, kNimbus);
  EXPECT_EQ(machines.credits()->front().usd, 12.5);
}

// The first request is refused, so its row is closed as failed. The room that the service reports afterwards costs
// money.
TEST_F(NewCloud, AMachineThatStartsAfterItsEndWasBookedIsReturned) {
  service.refuses_first = true;
  auto fleet = FleetDriver::start(fleet_options(config()));
  ASSERT_TRUE(fleet) << fleet.error().message();
  const SystemClock clock;
  const auto first_is_returned = [&] {
    const std::vector<int> rented = service.numbers();
    return rented.size() >= 2 && std::find(rented.begin(), rented.end(), 1) == rented.end();
  };
  for (const TimePoint deadline = clock.now() + std::chrono::seconds(20);
       !first_is_returned() && clock.now() < deadline;)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(first_is_returned()) << "the room is rented until the run ends";
  (*fleet)->stop();
  EXPECT_THAT(service.numbers(), testing::IsEmpty());
  std::vector<std::string> booked;
  for (const LedgerRow& row : *ledger().rows()) {
    EXPECT_FALSE(row.is_open()) << row.label;
    if (row.instance == id_of(1).text) booked.push_back(std::string(to_string(row.state)));
  }
  EXPECT_THAT(booked, testing::ElementsAre("ended"));
}

// One machine that the ledger has as running, one that was requested, and one without a row.
TEST_F(NewCloud, MachinesOfAKilledLearnerAreFoundAndReleased) {
  const learner::RunConfig run = config();
  const double an_hour_ago_s = SystemClock().unix_seconds() - 3600;
  for (const bool by_next_learner : {false, true}) {
    SCOPED_TRACE(by_next_learner);
    {
      Ledger earlier_ledger = ledger();
      Offer offer;
      offer.id = "a";
      offer.provider = kNimbus;
      LaunchSpec spec;
      const auto running = earlier_ledger.record_intent(offer, an_hour_ago_s),
                 requested = earlier_ledger.record_intent(offer, an_hour_ago_s);
      spec.label = running->label;
      ASSERT_TRUE(earlier_ledger.record_start(running->id, id_of(service.rent(spec)).text, an_hour_ago_s));
      spec.label = requested->label;
      service.rent(spec);
      spec.label = earlier_ledger.label_prefix() + "lost";
      service.rent(spec);
    }
    if (by_next_learner) {
      auto fleet = FleetDriver::start(fleet_options(run));
      ASSERT_TRUE(fleet) << fleet.error().message();
      (*fleet)->stop();
    } else {
      DownOptions options;
      options.provider = [&](const std::string& name) { return make_provider(name, learner::provider_options(run)); };
      Ledger earlier_ledger = ledger();
      const auto report = bring_down(earlier_ledger, SystemClock(), options);
      ASSERT_TRUE(report) << report.error().message();
      EXPECT_THAT(report->problems, testing::IsEmpty());
      EXPECT_EQ(report->released.size(), 3u);
    }
    EXPECT_THAT(service.numbers(), testing::IsEmpty());
    for (const LedgerRow& row : *ledger().rows()) EXPECT_FALSE(row.is_open()) << row.label;
  }
}

TEST_F(NewCloud, AHostKnowsItsPortAndEndsItself) {
  const auto port = mapped_port(kMappedPort, [](const char* name) -> const char* {
    return std::string_view(name) == "NIMBUS_PORT_7070" ? "41000" : nullptr;
  });
  ASSERT_TRUE(port);
  EXPECT_EQ(port->host, "203.0.113.5");
  EXPECT_EQ(port->port, 41000);

  EXPECT_FALSE(own_instance());
  ::setenv("NIMBUS_ROOM", std::to_string(service.rent({})).c_str(), 1);
  ::setenv("NIMBUS_ROOM_KEY", "secret", 1);
  const auto own = own_instance();
  EXPECT_EQ(std::getenv("NIMBUS_ROOM_KEY"), nullptr);
  ASSERT_TRUE(own && own->end());
  EXPECT_THAT(service.numbers(), testing::IsEmpty());
  EXPECT_FALSE(own->end());

  // A host on which the script finds no program, not even mkdir.
  const auto end_file = folder.path() / "ended";
  std::vector<std::string> command = host_command({"192.0.2.1:7000", "sum", "pin", "ca"}, kNimbus, {"worker"});
  std::vector<char*> argv;
  for (std::string& argument : command) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const std::string variables[] = {"PATH=" + folder.path().string(), "NIMBUS_ROOM=4711",
                                   "NIMBUS_ENDED=" + end_file.string()};
  const char* const environment[] = {variables[0].c_str(), variables[1].c_str(), variables[2].c_str(), nullptr};
  const pid_t child = ::fork();
  if (child == 0) {
    ::execve("/bin/sh", argv.data(), const_cast<char* const*>(environment));
    ::_exit(127);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 1);
  EXPECT_EQ(read_file(end_file).value(), "4711\n");
  ::unsetenv("NIMBUS_ROOM");
}

TEST_F(NewCloud, ItsFilesAreRecognisedAndItsKeyStaysHere) {
  const auto list = parse_offers("nimbus\na 5\n", "file");
  ASSERT_TRUE(list) << list.error().message();
  EXPECT_EQ(list->format, kNimbus);
  EXPECT_EQ(list->offers.size(), 1u);
  EXPECT_THAT(parse_offers("", "file", {.format = "stratus"}).error().message(),
              HasSubstr("expected auto, own, vast, skypilot or nimbus, found 'stratus'"));

  auto local = std::move(*make_provider("local", {.log_folder = folder.path()}));
  LaunchSpec spec;
  spec.label = "r/1";
  spec.argv = {"/usr/bin/env"};
  local->start(1, spec);
  const SystemClock clock;
  bool has_exited = false;
  for (const TimePoint deadline = clock.now() + std::chrono::seconds(20); !has_exited && clock.now() < deadline;
       std::this_thread::sleep_for(std::chrono::milliseconds(5)))
    for (const ProviderEvent& event : local->poll(clock.now())) has_exited = has_exited || std::get_if<Exited>(&event);
  const std::string log = read_file(folder.path() / "r.1.log").value();
  EXPECT_THAT(log, HasSubstr("ECHOLINE_INSTANCE=r/1"));
  EXPECT_THAT(log, testing::Not(HasSubstr(kKey)));

  ::unsetenv(kKey);
  EXPECT_THAT(make_provider(kNimbus, {}).error().message(), HasSubstr("set NIMBUS_KEY"));
}

TEST(Providers, OneThatIsNotThereIsNamedWithThoseThatAre) {
  EXPECT_EQ(make_provider(kNimbus, {}).error().detail, "expected local, vast, ssh or exec, found 'nimbus'");
  EXPECT_FALSE(is_local_provider(kNimbus));
  EXPECT_TRUE(is_local_provider("local"));
}

}  // namespace
}  // namespace echoline::provisioner
