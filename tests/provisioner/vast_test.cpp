// The provider of vast.ai against a server on loopback: its requests, its reading of every answer, and the resulting
// rentals.
#include "provisioner/providers/vast.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "provisioner/host_script.hpp"
#include "provisioner/providers/registry.hpp"
#include "provisioner/providers/vast_bill.hpp"
#include "vast_server.hpp"

namespace echoline::provisioner {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;

class VastTest : public testing::Test {
 protected:
  void SetUp() override {
    options.url = server.url();
    options.key = VastServer::kKey;
    options.timeout = std::chrono::seconds(5);
    clock.advance(std::chrono::hours(1));
  }
  LaunchSpec spec(const std::string& label = "run.1234/1", const std::string& ask = "77") {
    LaunchSpec s;
    s.offer.id = ask;
    s.label = label;
    s.image = "debian:12";
    s.argv = {"/opt/echoline", "worker", "--name", "it's"};
    s.env = {{"ECHOLINE_TOKEN", "secret"}};
    s.ports = {7070};
    s.disk = Bytes{80'000'000'000};
    return s;
  }
  // Returns the next event of a kind; events of other kinds are kept. Virtual time runs much faster than the server
  // answers.
  template <class Event>
  std::optional<Event> next(VastProvider& provider) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (true) {
      for (auto it = seen.begin(); it != seen.end(); ++it)
        if (auto* event = std::get_if<Event>(&*it)) {
          Event next_event = std::move(*event);
          seen.erase(it);
          return next_event;
        }
      if (std::chrono::steady_clock::now() > deadline) return std::nullopt;
      poll(provider);
      clock.advance(milliseconds(800));
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  void poll(VastProvider& provider) {
    for (ProviderEvent& event : provider.poll(clock.now()))
      if (auto* account = std::get_if<AccountChanged>(&event))
        accounts.push_back(*account);
      else
        seen.push_back(std::move(event));
  }
  // Polls until `condition` holds, or ten seconds are over.
  bool until(VastProvider& provider, const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!condition() && std::chrono::steady_clock::now() < deadline) {
      poll(provider);
      clock.advance(milliseconds(800));
      std::this_thread::sleep_for(milliseconds(1));
    }
    return condition();
  }
  InstanceId started(VastProvider& provider, const std::string& label = "run.1234/1") {
    provider.start(1, spec(label));
    const auto event = next<Started>(provider);
    EXPECT_TRUE(event);
    return event ? event->instance : InstanceId{};
  }
  StartFailed refused(VastProvider& provider, const LaunchSpec& s) {
    provider.start(9, s);
    auto event = next<StartFailed>(provider);
    EXPECT_TRUE(event);
    return event.value_or(StartFailed{});
  }
  static std::int64_t number(const InstanceId& id) { return std::stoll(id.text.substr(5)); }

  VastServer server;
  VastOptions options;
  ManualClock clock;
  std::vector<ProviderEvent> seen;
  std::vector<AccountChanged> accounts;  // not in `seen`
};

TEST_F(VastTest, RentsWatchesAndDestroys) {
  VastProvider provider(options);
  const InstanceId id = started(provider);
  ASSERT_EQ(server.rented().size(), 1u);
  const json body = json::parse(server.bodies().at(0));
  EXPECT_EQ(body["label"], "run.1234/1");
  EXPECT_EQ(body["image"], "debian:12");
  EXPECT_EQ(body["disk"], 80.0);
  EXPECT_EQ(body["runtype"], "args");
  EXPECT_EQ(body["args"][1], R"(exec '/opt/echoline' 'worker' '--name' 'it'\''s')");
  EXPECT_EQ(body["env"], json({{"-p 7070:7070", "1"},
                               {"ECHOLINE_TOKEN", "secret"},
                               {"ECHOLINE_VAST_URL", server.url()}}));  // no key of the account
  EXPECT_FALSE(body.contains("price"));
  EXPECT_THAT(server.all_headers(), HasSubstr("Bearer the-key-of-the-test"));

  EXPECT_EQ(next<PriceChanged>(provider)->usd_per_hour, 0.4);
  server.change(number(id), [](VastInstance& i) { i.usd_per_hour = 0.55; });
  EXPECT_EQ(next<PriceChanged>(provider)->usd_per_hour, 0.55);
  // An instance that never starts is listed with its state, and has not ended.
  provider.list(5, "run.1234/");
  const auto listed = next<Listed>(provider);
  ASSERT_TRUE(listed && listed->complete);
  ASSERT_EQ(listed->instances.size(), 1u);
  EXPECT_EQ(listed->instances[0].instance, id);

  provider.stop(7, id, {});
  provider.stop(8, id, {});
  EXPECT_EQ(next<Stopped>(provider)->ticket, 7);
  EXPECT_EQ(next<Stopped>(provider)->ticket, 8);
  EXPECT_EQ(server.count("destroy"), 1);
  EXPECT_TRUE(server.rented().empty());
  provider.stop(9, id, {});
  EXPECT_EQ(next<Stopped>(provider)->how, "no such instance");
  EXPECT_TRUE(seen.empty());  // nothing ended by itself
}

// An image without the program gets it from the learner. The script for this fits the service's limit.
TEST_F(VastTest, TheScriptThatFetchesTheProgramFits) {
  VastProvider provider(options);
  LaunchSpec far = spec();
  const std::string learner = "[2001:0db8:85a3:0000:0000:8a2e:0370:7334]:65535", offer(20, '9');
  far.argv =
      host_command({learner, std::string(64, 'f'), "sha256//" + std::string(44, 'p'), std::string(480, 'A')}, "vast",
                   {"worker",
                    "--join",
                    learner,
                    "--name",
                    offer,
                    "--folder",
                    "/var/tmp/echoline-" + offer,
                    "--bind",
                    "::",
                    "--engine",
                    "sglang",
                    "--engine-patience",
                    "86400 s",
                    "--gpus-per-engine",
                    "1024",
                    "--threads",
                    "1024",
                    "--engines",
                    "1024",
                    "--silence-max",
                    "259200 s",
                    "--port",
                    "7070"});
  far.env.emplace_back("ECHOLINE_ENGINE_COMMAND", std::string(5000, 'v'));  // the limit is not for variables
  provider.start(1, far);
  ASSERT_TRUE(next<Started>(provider));
  const json body = json::parse(server.bodies().at(0));
  EXPECT_EQ(body["onstart"], "/bin/sh");
  EXPECT_THAT(body["args"][1].get<std::string>(), HasSubstr("/bundle"));
  EXPECT_THAT(body["args"][1].get<std::string>(), HasSubstr("/instances/$CONTAINER_ID/"));
  EXPECT_THAT(body["args"][1].get<std::string>(), Not(HasSubstr("secret")));
}

TEST_F(VastTest, ACreateThatErrsButRentsIsFoundByItsLabel) {
  server.fault({.kind = "create", .status = 500, .acts = true});
  VastProvider provider(options);
  const InstanceId id = started(provider);
  EXPECT_EQ(server.rented().count(number(id)), 1u);
  EXPECT_EQ(server.count("create"), 1);  // and is not asked for again

  // The answer is lost, is a success without JSON, or comes too late.
  server.fault({.kind = "create", .status = 200, .body = "<html>", .acts = true});
  const InstanceId second = started(provider, "run.1234/2");
  EXPECT_EQ(server.rented().count(number(second)), 1u);
  options.timeout = milliseconds(250);
  VastProvider hasty(options);
  server.fault({.kind = "create", .acts = true, .hangs = milliseconds(400)});
  const InstanceId third = started(hasty, "run.1234/3");
  EXPECT_EQ(server.rented().count(number(third)), 1u);
  EXPECT_EQ(server.rented().size(), 3u);
}

TEST_F(VastTest, ACreateThatMayHaveRentedAndIsNotFoundIsSaidToBeSo) {
  server.fault({.kind = "create", .status = 502});
  VastProvider provider(options);
  const auto failed = refused(provider, spec());
  EXPECT_TRUE(failed.perhaps_rented && failed.retryable);
  EXPECT_GE(server.count("list"), 3);
  // The same holds if the listing itself fails.
  server.fault({.kind = "create", .status = 500, .acts = true});
  server.fault({.kind = "list", .status = 503, .times = 1000});
  EXPECT_TRUE(refused(provider, spec("run.1234/2")).perhaps_rented);
  EXPECT_EQ(server.rented().size(), 1u);
}

TEST_F(VastTest, ASecondOneUnderTheSameLabelIsDestroyed) {
  VastInstance twin;
  twin.label = "run.1234/1";
  server.put(twin);
  server.fault({.kind = "create", .status = 500, .acts = true});
  VastProvider provider(options);
  const InstanceId id = started(provider);
  EXPECT_TRUE(until(provider, [&] { return server.rented().size() == 1; }));
  EXPECT_EQ(server.rented().begin()->first, number(id));
}

TEST_F(VastTest, AnErrorThatComesWithAContractIsDestroyed) {
  VastProvider provider(options);
  LaunchSpec low = spec();
  low.bid_usd_per_hour = 0.1;
  server.fault({.kind = "destroy", .status = 500});  // and is not given up at once
  const auto failed = refused(provider, low);
  EXPECT_EQ(json::parse(server.bodies().at(0))["price"], 0.1);
  EXPECT_FALSE(failed.retryable || failed.perhaps_rented);
  EXPECT_THAT(failed.error.message(), HasSubstr("invalid_price: bid too low"));
  EXPECT_TRUE(server.rented().empty());
  EXPECT_EQ(server.count("destroy"), 2);
  // A failed destroy is reported.
  server.fault({.kind = "destroy", .status = 500, .times = 1000});
  EXPECT_TRUE(refused(provider, low).perhaps_rented);
}

TEST_F(VastTest, ARefusedRequestRentsNothingAndNamesTheReason) {
  VastProvider provider(options);
  server.remove_ask(77);
  auto failed = refused(provider, spec());
  EXPECT_FALSE(failed.retryable || failed.perhaps_rented);
  EXPECT_THAT(failed.error.message(), HasSubstr("no_such_ask"));
  server.fault({.kind = "create", .status = 409, .body = R"({"success":false,"error":"conflict"})"});
  EXPECT_FALSE(refused(provider, spec("l", "78")).retryable);
  server.fault({.kind = "create", .status = 200, .body = R"({"success":false,"error":"no_such_ask"})"});
  EXPECT_FALSE(refused(provider, spec("l", "78")).perhaps_rented);
  EXPECT_EQ(server.count("create"), 3);

  LaunchSpec bad = spec();
  bad.offer.id = "../instances/5";
  EXPECT_EQ(refused(provider, bad).error.code, Code::kInvalid);
  bad = spec(std::string(300, 'x'));
  EXPECT_EQ(refused(provider, bad).error.code, Code::kInvalid);
  bad = spec();
  bad.argv.push_back(std::string(5000, 'x'));
  EXPECT_THAT(refused(provider, bad).error.message(), HasSubstr("4096"));
  bad = spec();
  bad.image.clear();
  EXPECT_THAT(refused(provider, bad).error.message(), HasSubstr("fleet.image"));
  EXPECT_EQ(server.count("create"), 3);
  EXPECT_TRUE(server.rented().empty());
}

TEST_F(VastTest, HasteIsAnsweredWithPatience) {
  server.fault({.kind = "create", .status = 429, .body = "Too Many Requests", .times = 3});
  VastProvider provider(options);
  const TimePoint begin = clock.now();
  started(provider);
  EXPECT_GE(clock.now() - begin, std::chrono::seconds(2 + 4 + 8));
  EXPECT_EQ(server.count("create"), 4);
  EXPECT_EQ(server.rented().size(), 1u);
  server.fault({.kind = "create", .status = 429, .body = "Too Many Requests", .times = 1000});
  const auto failed = refused(provider, spec("run.1234/2"));
  EXPECT_TRUE(failed.retryable);
  EXPECT_FALSE(failed.perhaps_rented);
}

TEST_F(VastTest, RequestsOfAKindKeepTheirDistance) {
  VastProvider provider(options);
  for (int i = 0; i < 3; ++i) provider.start(i, spec("run.1234/" + std::to_string(i)));
  const auto settle = [&] {  // with the clock standing
    for (int i = 0; i < 60; ++i) {
      poll(provider);
      std::this_thread::sleep_for(milliseconds(1));
    }
  };
  settle();
  EXPECT_EQ(server.count("create"), 1);
  clock.advance(milliseconds(4499));
  settle();
  EXPECT_EQ(server.count("create"), 1);
  clock.advance(milliseconds(1));
  settle();
  EXPECT_EQ(server.count("create"), 2);
}

// A create that waits for its turn is forgotten without a trace. One that has left has an answer.
TEST_F(VastTest, AQueuedCreateIsCancelled) {
  VastProvider provider(options);
  for (int i = 0; i < 3; ++i) provider.start(i, spec("run.1234/" + std::to_string(i)));
  for (int i = 0; i < 5000 && server.count("create") == 0; ++i) {  // with the clock standing
    poll(provider);
    std::this_thread::sleep_for(milliseconds(1));
  }
  ASSERT_EQ(server.count("create"), 1);
  EXPECT_TRUE(provider.cancel(2));
  EXPECT_FALSE(provider.cancel(2));
  EXPECT_FALSE(provider.cancel(0));
  EXPECT_EQ(next<Started>(provider)->ticket, 0);
  EXPECT_EQ(next<Started>(provider)->ticket, 1);
  clock.advance(std::chrono::minutes(5));
  provider.poll(clock.now());
  EXPECT_EQ(server.count("create"), 2);
}

// The interval counts from request to request: a slow answer does not delay the next create.
TEST_F(VastTest, CreatesLeaveWhileOthersWaitForTheirAnswers) {
  server.fault({.kind = "create", .acts = true, .hangs = milliseconds(600)});
  server.fault({.kind = "create", .acts = true, .hangs = milliseconds(600)});
  VastProvider provider(options);
  for (int i = 0; i < 3; ++i) provider.start(i, spec("run.1234/" + std::to_string(i)));
  ASSERT_TRUE(until(provider, [&] { return server.count("create") == 3; }));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(next<Started>(provider));
}

// A machine that the service cannot end just now does not delay the others.
TEST_F(VastTest, ADestroyThatFailsDelaysNoOther) {
  VastProvider provider(options);
  const InstanceId first = started(provider, "run.1234/1"), second = started(provider, "run.1234/2");
  server.fault({.kind = "destroy", .status = 500, .times = 1});
  provider.stop(7, first, {});
  ASSERT_TRUE(until(provider, [&] { return server.count("destroy") >= 1; }));
  provider.stop(8, second, {});
  const TimePoint begin = clock.now();
  const auto one = next<Stopped>(provider), other = next<Stopped>(provider);
  ASSERT_TRUE(one && other);
  EXPECT_EQ(one->ticket + other->ticket, 7 + 8);
  EXPECT_LT(clock.now() - begin, std::chrono::minutes(1));
}

// Instances that this account has shown are destroyed 64 at a time, and listings confirm it.
class ManyInstances : public VastTest {
 protected:
  void SetUp() override {
    VastTest::SetUp();
    for (int i = 0; i < 100; ++i) {
      VastInstance instance;
      instance.label = "run.1234/" + std::to_string(i);
      server.put(instance);
    }
    VastInstance other;
    other.id = 7;
    other.label = "other.1/1";
    server.put(other);
    provider.emplace(options);
    provider->list(3, "run.1234/");
    listed = *next<Listed>(*provider);
    ASSERT_EQ(listed.instances.size(), 100u);
  }
  void stop_all() {
    Ticket ticket = 100;
    for (const InstanceInfo& info : listed.instances) provider->stop(ticket++, info.instance, {});
    for (int i = 0; i < 100; ++i) {
      const auto stopped = next<Stopped>(*provider);
      ASSERT_TRUE(stopped) << i;
      EXPECT_FALSE(stopped->absent);
    }
    EXPECT_EQ(server.rented().size(), 1u);
  }
  std::optional<VastProvider> provider;
  Listed listed;
};

TEST_F(ManyInstances, AreDestroyedTogether) {
  stop_all();
  EXPECT_EQ(server.count("destroy"), 2);
  EXPECT_EQ(server.count("show"), 0);
}

TEST_F(ManyInstances, AreDestroyedOneByOneIfTheServiceTakesNoSeveral) {
  server.destroys_several(false);
  stop_all();
  EXPECT_LE(server.count("destroy"), 102);
}

TEST_F(ManyInstances, AnInstanceThatStaysIsDestroyedByItself) {
  server.keep_in_spite_of_success(number(listed.instances[30].instance));
  stop_all();
  EXPECT_EQ(server.count("destroy"), 3);
}

// An empty listing alone proves nothing.
TEST_F(ManyInstances, AnEmptyListingIsNoConfirmation) {
  server.remove(7);
  server.keep_in_spite_of_success(number(listed.instances[63].instance));
  server.lists_nothing(true);
  Ticket ticket = 100;
  for (const InstanceInfo& info : listed.instances) provider->stop(ticket++, info.instance, {});
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(next<Stopped>(*provider)) << i;
  EXPECT_TRUE(server.rented().empty());
}

// A revoked key is reported at the first answer, and ends when the service accepts the key again.
TEST_F(VastTest, ARefusedKeyIsAStateOfTheAccount) {
  server.credit(12.5);
  VastProvider provider(options);
  started(provider);
  ASSERT_TRUE(until(provider, [&] { return !accounts.empty(); }));
  EXPECT_EQ(accounts.back().credit_usd, 12.5);
  EXPECT_EQ(accounts.back().trouble, "");
  server.expire_key();
  const TimePoint begin = clock.now();
  ASSERT_TRUE(until(provider, [&] { return !accounts.back().trouble.empty(); }));
  EXPECT_LT(clock.now() - begin, std::chrono::seconds(30));
  EXPECT_THAT(accounts.back().trouble, HasSubstr("the key is refused"));
  EXPECT_THAT(accounts.back().trouble, Not(HasSubstr(VastServer::kKey)));
  EXPECT_TRUE(accounts.back().needs_user);
  const StartFailed failed = refused(provider, spec("run.1234/2"));
  EXPECT_TRUE(failed.by_account);
  EXPECT_EQ(accounts.size(), 2u);  // it is said once
}

TEST_F(VastTest, AnAccountWithoutCreditIsAState) {
  server.credit(0);
  VastProvider provider(options);
  const char* kBody = R"({"success":false,"error":"insufficient_credit","msg":"Your account lacks credit"})";
  server.fault({.kind = "create", .status = 400, .body = kBody, .type = "application/json"});
  const StartFailed failed = refused(provider, spec());
  EXPECT_TRUE(failed.by_account);
  EXPECT_FALSE(failed.perhaps_rented);
  ASSERT_TRUE(until(provider, [&] { return !accounts.empty(); }));
  EXPECT_THAT(accounts.back().trouble, HasSubstr("no credit left"));
  EXPECT_TRUE(accounts.back().needs_user);
  server.credit(20);
  ASSERT_TRUE(until(provider, [&] { return accounts.back().trouble.empty(); }));
  EXPECT_EQ(accounts.back().credit_usd, 20);
}

// The service has two words for an instance that it does not know. A proxy's 404 is neither.
TEST_F(VastTest, AnInstanceThatIsNotFoundIsGone) {
  VastProvider provider(options);
  const InstanceId id = started(provider);
  server.fault({.kind = "destroy",
                .status = 404,
                .body = R"({"success":false,"error":"not_found","msg":"Instance not found"})",
                .type = "application/json"});
  provider.stop(7, id, {});
  const auto stopped = next<Stopped>(provider);
  ASSERT_TRUE(stopped);
  EXPECT_TRUE(stopped->absent);
  server.fault({.kind = "destroy", .status = 404, .body = "<html>not_found</html>"});
  provider.stop(8, id, {});
  EXPECT_TRUE(next<StopFailed>(provider));
}

TEST_F(VastTest, AContainerThatRunsIsReportedOnce) {
  VastProvider provider(options);
  const InstanceId id = started(provider);
  ASSERT_TRUE(until(provider, [&] { return server.count("list") >= 2; }));
  EXPECT_THAT(seen, Not(testing::Contains(testing::VariantWith<Running>(testing::_))));
  server.change(number(id), [](VastInstance& i) { i.actual_status = "running"; });
  EXPECT_EQ(next<Running>(provider)->instance, id);
  // An instance that an earlier process has rented reports as well.
  VastInstance adopted;
  adopted.label = "run.1234/9";
  adopted.actual_status = "running";
  server.put(adopted);
  const std::int64_t number_of_adopted = server.rented().rbegin()->first;
  provider.watch({fmt::format("vast:{}", number_of_adopted)}, adopted.label);
  EXPECT_EQ(next<Running>(provider)->instance.text, fmt::format("vast:{}", number_of_adopted));
}

TEST_F(VastTest, AListingHasAllPagesOrIsNotComplete) {
  for (int i = 0; i < 60; ++i) {
    VastInstance instance;
    instance.label = i < 40 ? "run.1234/" + std::to_string(i) : "other.1/1";
    server.put(instance);
  }
  VastProvider provider(options);
  provider.list(3, "run.1234/");
  auto listed = next<Listed>(provider);
  ASSERT_TRUE(listed);
  EXPECT_TRUE(listed->complete);
  EXPECT_EQ(listed->instances.size(), 40u);
  EXPECT_EQ(server.count("list"), 3);
  const auto expect_partial = [&](int status, const std::string& body, const std::string& why) {
    server.fault({.kind = "list", .status = 503, .times = 2});  // overcome
    server.fault({.kind = "list", .status = status, .body = body, .times = 1000});
    VastProvider fresh(options);
    fresh.list(4, "run.1234/");
    const auto partial = next<Listed>(fresh);
    ASSERT_TRUE(partial);
    EXPECT_FALSE(partial->complete) << body.substr(0, 100);
    EXPECT_THAT(partial->error->message(), HasSubstr(why));
  };
  expect_partial(410, R"({"success":false,"error":"deprecated_endpoint"})", "deprecated_endpoint");
}

TEST_F(VastTest, NonsenseIsNoListing) {
  VastProvider provider(options);
  for (const std::string& body :
       {std::string(R"({"instances":null})"), std::string(R"({"instances":[{"label":"run.1234/1"}]})"),
        std::string("[]"), std::string(R"({"instances":[{"id":-4}]})"),
        std::string(R"({"instances":[],"next_token":"again"})"),
        R"({"instances":[{"id":1}], "x":")" + std::string(17u << 20, 'x') + "\"}",
        std::string(R"({"instances":[],)")}) {
    constexpr int kTries = 7;  // of a request whose answer is broken: too long, or no JSON object
    const bool is_broken = body.size() > 1000 || body == "[]" || body.back() == ',';
    const int times = body.find("again") != std::string::npos ? 2 : is_broken ? kTries : 1;
    server.fault({.kind = "list", .status = 200, .body = body, .times = times});
    provider.list(4, "run.1234/");
    const auto listed = next<Listed>(provider);
    ASSERT_TRUE(listed) << body.substr(0, 100);
    EXPECT_FALSE(listed->complete) << body.substr(0, 100);
    EXPECT_LT(listed->error->message().size(), 400u);
  }
  // An invalid price is ignored, and an invalid field loses only itself.
  server.fault({.kind = "list",
                .status = 200,
                .body = R"({"instances":[{"id":5,"label":"run.1234/1","dph_total":-3,"actual_status":7},
                           {"id":"6","label":"run.1234/2","dph_total":1e300}]})"});
  provider.list(4, "run.1234/");
  const auto listed = next<Listed>(provider);
  ASSERT_TRUE(listed && listed->complete);
  ASSERT_EQ(listed->instances.size(), 2u);
  for (const InstanceInfo& info : listed->instances) EXPECT_FALSE(info.usd_per_hour);
}

TEST_F(VastTest, AnEmptyListingEndsNothing) {
  VastProvider provider(options);
  const InstanceId id = started(provider);
  server.lists_nothing(true);
  const int before = server.count("show");
  ASSERT_TRUE(until(provider, [&] { return server.count("show") >= before + 2; }));
  seen.erase(std::remove_if(seen.begin(), seen.end(), [](auto& e) { return std::holds_alternative<PriceChanged>(e); }),
             seen.end());
  EXPECT_TRUE(seen.empty());
  server.remove(number(id));
  const auto gone = next<Exited>(provider);
  ASSERT_TRUE(gone);
  EXPECT_EQ(gone->instance, id);
  EXPECT_FALSE(gone->still_rented || gone->outbid);
}

TEST_F(VastTest, AnOutbidOrEndedInstanceIsReportedOnceAndStillCosts) {
  VastProvider provider(options);
  LaunchSpec bid = spec();
  bid.bid_usd_per_hour = 0.35;
  provider.start(1, bid);
  const InstanceId first = next<Started>(provider)->instance;
  const InstanceId second = started(provider, "run.1234/2");
  server.change(number(first), [](VastInstance& i) { i.state = "stopped"; });
  const auto outbid = next<Exited>(provider);
  ASSERT_TRUE(outbid);
  EXPECT_EQ(outbid->instance, first);
  EXPECT_EQ(outbid->label, "run.1234/1");
  EXPECT_TRUE(outbid->outbid && outbid->still_rented);
  server.change(number(second), [](VastInstance& i) { i.actual_status = "exited"; });
  const auto exited = next<Exited>(provider);
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->instance, second);
  EXPECT_TRUE(exited->still_rented && !exited->outbid);
  const int lists = server.count("list");
  ASSERT_TRUE(until(provider, [&] { return server.count("list") >= lists + 2; }));
  for (const ProviderEvent& event : seen) EXPECT_FALSE(std::holds_alternative<Exited>(event));
}

// The provider reports an instance that will be stopped, so that its worker can submit its work.
TEST_F(VastTest, AnInstanceThatWillBeOutbidIsReportedBefore) {
  VastProvider provider(options);
  LaunchSpec bid = spec();
  bid.bid_usd_per_hour = 0.35;
  provider.start(1, bid);
  const InstanceId id = next<Started>(provider)->instance;
  server.change(number(id), [](VastInstance& i) { i.intended = "stopped"; });
  const auto ending = next<Ending>(provider);
  ASSERT_TRUE(ending);
  EXPECT_EQ(ending->instance, id);
  EXPECT_TRUE(ending->outbid);
  const int lists = server.count("list");
  ASSERT_TRUE(until(provider, [&] { return server.count("list") >= lists + 2; }));
  for (const ProviderEvent& event : seen) EXPECT_FALSE(std::holds_alternative<Ending>(event));
  server.change(number(id), [](VastInstance& i) { i.state = "stopped"; });
  const auto outbid = next<Exited>(provider);
  ASSERT_TRUE(outbid);
  EXPECT_TRUE(outbid->outbid && outbid->still_rented);
}

TEST_F(VastTest, AKeyThatIsRefusedEndsNothingAndIsNotShown) {
  VastProvider provider(options);
  const InstanceId id = started(provider);
  server.expire_key();
  provider.stop(3, id, {});
  const auto kept = next<StopFailed>(provider);
  ASSERT_TRUE(kept);
  EXPECT_EQ(kept->error.code, Code::kInvalid);
  EXPECT_THAT(kept->error.message(), HasSubstr("the key was refused"));
  EXPECT_THAT(kept->error.message(), Not(HasSubstr(VastServer::kKey)));  // which the server repeats
  provider.list(4, "");
  EXPECT_FALSE(next<Listed>(provider)->complete);
  const auto failed = refused(provider, spec("run.1234/2"));
  EXPECT_FALSE(failed.retryable || failed.perhaps_rented);
  EXPECT_EQ(failed.error.code, Code::kInvalid);
  EXPECT_EQ(server.rented().size(), 1u);
}

TEST_F(VastTest, OnlyTheServiceItselfSaysThatSomethingIsGone) {
  VastProvider provider(options);
  const InstanceId id = started(provider);
  server.fault({.kind = "destroy", .status = 404, .body = "<html>404 Not Found</html>"});
  provider.stop(3, id, {});
  EXPECT_TRUE(next<StopFailed>(provider));
  EXPECT_EQ(server.rented().size(), 1u);
  // An answer without meaning is no end: the request is sent again.
  for (const char* body : {"welcome", R"({"success": false, "error": "internal"})"})
    server.fault({.kind = "destroy", .status = 200, .body = body});
  provider.stop(4, id, {});
  EXPECT_EQ(next<Stopped>(provider)->how, "destroyed");
  EXPECT_TRUE(server.rented().empty());
  const InstanceId second = started(provider);
  server.fault({.kind = "destroy", .status = 504, .body = "late", .acts = true});  // it was, and the answer is lost
  provider.stop(5, second, {});
  EXPECT_EQ(next<Stopped>(provider)->how, "no such instance");
}

TEST_F(VastTest, AServiceThatIsNotThereRentsNothing) {
  options.url = "http://127.0.0.1:1";
  VastProvider provider(options);
  const auto failed = refused(provider, spec());
  EXPECT_TRUE(failed.retryable);
  EXPECT_FALSE(failed.perhaps_rented);
}

TEST(VastKey, ComesFromTheEnvironmentOrAFileOfItsOwnersAlone) {
  const auto file = std::filesystem::temp_directory_path() / fmt::format("echoline-key-{}", getpid());
  unsetenv("VAST_API_KEY");
  EXPECT_THAT(read_vast_key("").error().message(), HasSubstr("VAST_API_KEY"));
  std::ofstream(file) << "from-the-file\n";
  chmod(file.c_str(), 0640);
  EXPECT_THAT(read_vast_key(file).error().message(), HasSubstr("chmod 600"));
  chmod(file.c_str(), 0600);
  EXPECT_EQ(*read_vast_key(file), "from-the-file");
  setenv("VAST_API_KEY", "from-the-environment", 1);
  EXPECT_EQ(*read_vast_key(file), "from-the-environment");
  setenv("VAST_API_KEY", "a\r\nX-Header: b", 1);
  EXPECT_THAT(read_vast_key(file).error().message(), Not(HasSubstr("X-Header")));
  unsetenv("VAST_API_KEY");
  std::filesystem::remove(file);
}

// ---- bids ----

class VastBidTest : public VastTest {
 protected:
  std::int64_t bid_for(VastProvider& provider, double usd_per_hour) {
    LaunchSpec s = spec();
    s.bid_usd_per_hour = usd_per_hour;
    provider.start(1, s);
    const auto event = next<Started>(provider);
    EXPECT_TRUE(event);
    return event ? std::stoll(event->instance.text.substr(5)) : 0;
  }
  double bid(std::int64_t id) { return server.rented().at(id).bid; }
};

TEST_F(VastBidTest, ABidThatIsToppedIsRaisedWithinItsBound) {
  options.bid_raise_max = 0.5;
  VastProvider provider(options);
  const std::int64_t id = bid_for(provider, 0.4);
  server.change(id, [](VastInstance& i) { i.min_bid = 0.5; });
  ASSERT_TRUE(until(provider, [&] { return bid(id) > 0.4; }));
  EXPECT_NEAR(bid(id), 0.525, 1e-9);
  const auto price = next<PriceChanged>(provider);  // for the budget
  ASSERT_TRUE(price);
  // Stopped for a higher bid: the provider raises to the bound, starts the instance again, and reports no end.
  ASSERT_TRUE(until(provider, [&, begin = clock.now()] { return clock.now() - begin > std::chrono::minutes(3); }));
  server.change(id, [](VastInstance& i) { i.min_bid = 0.59, i.state = "stopped"; });
  ASSERT_TRUE(until(provider, [&] { return server.rented().at(id).state == "running"; }));
  EXPECT_NEAR(bid(id), 0.6, 1e-9);
  // The price rises above the bound: outbid.
  ASSERT_TRUE(until(provider, [&, begin = clock.now()] { return clock.now() - begin > std::chrono::minutes(3); }));
  EXPECT_TRUE(std::none_of(seen.begin(), seen.end(), [](const auto& e) { return std::holds_alternative<Exited>(e); }));
  server.change(id, [](VastInstance& i) { i.min_bid = 0.61, i.state = "stopped"; });
  const auto exited = next<Exited>(provider);
  ASSERT_TRUE(exited);
  EXPECT_TRUE(exited->outbid);
  EXPECT_EQ(server.count("bid"), 2);
}

TEST_F(VastBidTest, ABidStaysUnlessARaiseIsAllowed) {
  VastProvider provider(options);
  const std::int64_t id = bid_for(provider, 0.4);
  server.change(id, [](VastInstance& i) { i.min_bid = 0.41, i.state = "stopped"; });
  ASSERT_TRUE(next<Exited>(provider));
  EXPECT_EQ(server.count("bid"), 0);
}

// A raise without effect, or an instance that never runs again, counts as outbid in the end.
TEST_F(VastBidTest, ARaiseThatIsRefusedOrDoesNotHelpEndsIt) {
  options.bid_raise_max = 1;
  VastProvider provider(options);
  const std::int64_t id = bid_for(provider, 0.4);
  server.fault({.kind = "bid",
                .status = 400,
                .body = R"({"success": false, "error": "invalid_price"})",
                .type = "application/json"});
  server.change(id, [](VastInstance& i) { i.min_bid = 0.5, i.state = "stopped"; });
  ASSERT_TRUE(next<Exited>(provider));
  LaunchSpec other = spec("run.1234/2");
  other.bid_usd_per_hour = 0.4;
  provider.start(2, other);
  const auto second = next<Started>(provider);
  const std::int64_t stuck = std::stoll(second->instance.text.substr(5));
  server.fault({.kind = "state", .status = 500, .times = 99});
  server.change(stuck, [](VastInstance& i) { i.min_bid = 0.5, i.state = "stopped"; });
  ASSERT_TRUE(next<Exited>(provider));
  EXPECT_NEAR(bid(stuck), 0.525, 1e-9);
}

// ---- on a host ----

TEST(VastHost, AContainerKnowsItsMappedPort) {
  std::map<std::string, std::string> environment{{"PUBLIC_IPADDR", "192.0.2.7"}, {"VAST_TCP_PORT_7070", "41234"}};
  const auto in = [&](const char* name) -> const char* {
    const auto it = environment.find(name);
    return it == environment.end() ? nullptr : it->second.c_str();
  };
  const auto mapped = mapped_port(7070, in);
  ASSERT_TRUE(mapped);
  EXPECT_EQ(mapped->host, "192.0.2.7");
  EXPECT_EQ(mapped->port, 41234);
  EXPECT_FALSE(mapped_port(7071, in));
  for (const char* bad : {"", "0", "65536", "41234 ", "-1", "x"}) {
    environment["VAST_TCP_PORT_7070"] = bad;
    EXPECT_FALSE(mapped_port(7070, in)) << bad;
  }
  environment = {{"PUBLIC_IPADDR", "nowhere"}, {"VAST_TCP_PORT_7070", "41234"}};
  EXPECT_FALSE(mapped_port(7070, in));
}

// ---- the bill ----

TEST_F(VastTest, ChargesAreReadToTheEndOrNotAtAll) {
  const double day = 1'791'504'000;
  server.charge({1001, day, 0.107, 0.012, 0.206, 0.008});
  server.charge({0, day, 0, 5, 0, 0});  // a volume
  server.charge({1002, day, 1, 0, 0, 0});
  server.charge({1001, day + 86400, 2, 0, 0, 0});
  server.charge({1001, day - 86400, 7, 0, 0, 0});  // before the run
  server.credit(8.91);
  VastBillQuestion q;
  q.url = server.url() + "//";
  q.key = VastServer::kKey;
  q.pause = milliseconds(1);
  q.from_unix_s = day + 5000;
  q.to_unix_s = day + 90000;
  server.fault({.kind = "charges", .status = 429, .body = "Too many requests", .times = 2});
  const auto bill = ask_vast_bill(q);
  ASSERT_TRUE(bill) << bill.error().message();
  ASSERT_EQ(bill->charges.size(), 3u);
  EXPECT_EQ(bill->charges[0].instance.text, "vast:1001");
  EXPECT_EQ(bill->charges[0].day_unix_s, day);
  EXPECT_NEAR(bill->charges[0].usd, 0.333, 1e-9);
  EXPECT_NEAR(bill->charges[0].usd_rent, 0.119, 1e-9);
  EXPECT_NEAR(bill->charges[0].usd_traffic, 0.214, 1e-9);
  EXPECT_EQ(bill->charges[2].day_unix_s, day + 86400);
  EXPECT_EQ(bill->credit_usd, 8.91);
  // Half of a bill is refused, because its sum would be too small.
  server.fault({.kind = "charges", .status = 500, .times = 5});
  EXPECT_EQ(ask_vast_bill(q).error().code, Code::kUnavailable);
  server.expire_key();
  const auto refused = ask_vast_bill(q);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("auth_error"));
  EXPECT_THAT(refused.error().message(), Not(HasSubstr(VastServer::kKey)));
  std::vector<Charge> none;
  for (const char* bad :
       {"<html>", "[]", "{}", R"({"results": 1})", R"({"results": [1]})", R"({"results": [{"amount": 1}]})",
        R"({"results": [{"source": "instance-x", "amount": 1, "start": 1}]})",
        R"({"results": [{"source": "instance-1", "amount": "0.5 USD", "start": 1}]})",
        R"({"results": [{"source": "instance-1", "amount": 1e300, "start": 1}]})",
        R"({"results": [{"source": "instance-1", "start": 1}]})"})
    EXPECT_EQ(read_vast_charges(bad, none).error().code, Code::kCorrupt) << bad;
}

}  // namespace
}  // namespace echoline::provisioner
