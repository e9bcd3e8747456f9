// A relay on real sockets: learners that open no port, workers that reach them, and peers that mean harm.
#include "overlay/relay/relay.hpp"

#include <gmock/gmock.h>

#include <thread>

#include "base/log.hpp"
#include "tests/overlay/board.hpp"
#include "tests/overlay/relay_peer.hpp"

namespace echoline::overlay::relay {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

trust::Secret key() { return trust::Secret(std::string(kKeyBytesMin, 'k')); }

RelayOptions quick(std::uint16_t port = 0) {
  RelayOptions options;
  options.bind = {"127.0.0.1", port};
  options.key = key();
  return options;
}

class RelayTest : public testing::Test {
 protected:
  void SetUp() override { log::configure(log::Level::kOff, "test"); }
  void start(RelayOptions options = quick()) {
    auto started = Relay::start(std::move(options));
    ASSERT_TRUE(started.has_value()) << started.error().message();
    relay = std::move(*started);
  }
  // Polls what no callback reports.
  bool eventually(const std::function<bool(const RelayStats&)>& holds) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (!holds(relay->stats())) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(milliseconds(2));
    }
    return true;
  }
  TestLink link(const trust::SigningKey& run) { return TestLink(relay->endpoint(), key(), run); }
  Wire worker(const trust::SigningKey& run) {
    Wire wire(relay->endpoint());
    ECHO_CHECK(wire.send(client_hello(run)));
    return wire;
  }

  std::unique_ptr<Relay> relay;
  const trust::SigningKey run = made_key("authority");
};

TEST_F(RelayTest, BytesPassBothWaysUntilEachSideEnds) {
  start();
  TestLink learner = link(run);
  ASSERT_TRUE(learner.is_accepted());
  Wire client = worker(run);
  const auto ticket = learner.next_ticket();
  ASSERT_TRUE(ticket.has_value());
  Wire server = learner.meet(*ticket);
  const std::string hello = client_hello(run);
  EXPECT_EQ(server.receive_all(hello.size()).size(), hello.size()) << "what the worker has sent before";
  // More than all buffers between the two ends hold.
  const std::string up(40'000'000, 'u'), down(30'000'000, 'd');
  std::thread sender([&] {
    EXPECT_TRUE(client.send(up));
    client.end_output();
  });
  EXPECT_EQ(server.receive_all(up.size()), up);
  EXPECT_TRUE(server.is_over()) << "the worker's end arrives";
  sender.join();
  std::thread answer([&] {
    EXPECT_TRUE(server.send(down));
    server.end_output();
  });
  EXPECT_EQ(client.receive_all(down.size()), down) << "the other direction goes on";
  EXPECT_TRUE(client.is_over());
  answer.join();
  EXPECT_TRUE(eventually([](const RelayStats& now) { return now.joined == 0; }));
  EXPECT_EQ(relay->stats().bytes, hello.size() + up.size() + down.size());
}

TEST_F(RelayTest, OnlyAHolderOfBothKeysIsRegistered) {
  start();
  TestLink stranger(relay->endpoint(), trust::Secret(std::string(kKeyBytesMin, 'x')), run);
  const auto refused = stranger.next();
  EXPECT_TRUE(refused && !*refused) << "a wrong relay key: the connection is closed";
  EXPECT_EQ(relay->stats().runs, 0u);
  Wire lost = worker(run);
  EXPECT_TRUE(lost.is_over()) << "no learner, no connection";
  TestLink first = link(run);
  ASSERT_TRUE(first.is_accepted());
  Wire elsewhere = worker(made_key("another run"));
  EXPECT_TRUE(elsewhere.is_over());
  TestLink second = link(run);
  ASSERT_TRUE(second.is_accepted()) << "the run's own learner has restarted";
  const auto after = first.next();
  EXPECT_TRUE(after && !*after) << "its earlier connection is closed";
  EXPECT_EQ(relay->stats().runs, 1u);
  EXPECT_TRUE(second.ping());
  const auto pong = second.next();
  ASSERT_TRUE(pong && *pong);
  EXPECT_EQ((*pong)->type, ControlFrame::Type::kPong);
}

TEST_F(RelayTest, ATicketIsForTheLearnerAndOnce) {
  start();
  TestLink learner = link(run);
  ASSERT_TRUE(learner.is_accepted());
  Wire client = worker(run);
  const auto ticket = learner.next_ticket();
  ASSERT_TRUE(ticket.has_value());
  Wire thief(relay->endpoint());
  ASSERT_TRUE(thief.send(ticket_greeting(*ticket, random_nonce())));
  EXPECT_TRUE(thief.is_over());
  Wire server = learner.meet(*ticket);
  EXPECT_FALSE(server.receive().empty());
  Wire again = learner.meet(*ticket);
  EXPECT_TRUE(again.is_over());
  EXPECT_TRUE(server.send("still here"));
  EXPECT_EQ(client.receive_all(10), "still here");
}

TEST_F(RelayTest, PeersThatSayNothingOrTooMuchAreClosed) {
  RelayOptions options = quick();
  options.limits.greeting_timeout = options.limits.waiting_timeout = milliseconds(200);
  start(std::move(options));
  TestLink learner = link(run);
  ASSERT_TRUE(learner.is_accepted());
  Wire silent(relay->endpoint()), slow(relay->endpoint()), noisy(relay->endpoint()), stuck(relay->endpoint());
  ASSERT_TRUE(slow.send(client_hello(run).substr(0, 100)));
  ASSERT_TRUE(stuck.send(control_greeting(random_nonce())));
  EXPECT_EQ(stuck.receive_all(sizeof(Nonce)).size(), sizeof(Nonce));
  ASSERT_TRUE(noisy.send("GET / HTTP/1.1\r\n\r\n"));
  for (Wire* wire : {&silent, &slow, &noisy, &stuck}) EXPECT_TRUE(wire->is_over());
  Wire waiting = worker(run);
  ASSERT_TRUE(learner.next_ticket().has_value());
  EXPECT_TRUE(waiting.is_over()) << "the learner does not answer";
  EXPECT_TRUE(eventually([](const RelayStats& now) { return now.connections == 1 && now.runs == 1; }))
      << "the learner's connection stays";
  EXPECT_EQ(relay->stats().refused, 5u);
}

TEST_F(RelayTest, AFloodOfClientsLeavesTheJoinedOnesAlone) {
  RelayOptions options = quick();
  options.limits.waiting_per_run = 4;
  options.limits.connections_per_run = 8;
  start(std::move(options));
  TestLink learner = link(run);
  ASSERT_TRUE(learner.is_accepted());
  Wire client = worker(run);
  Wire server = learner.meet(*learner.next_ticket());
  std::vector<Wire> flood;
  for (int i = 0; i < 100; ++i) {
    flood.push_back(worker(run));
    EXPECT_LE(relay->stats().waiting, 5u);
  }
  EXPECT_TRUE(eventually([](const RelayStats& now) { return now.waiting == 4 && now.refused == 96; }));
  EXPECT_FALSE(server.receive().empty());
  EXPECT_TRUE(server.send("down"));
  EXPECT_EQ(client.receive_all(4), "down");
}

TEST_F(RelayTest, JoinedConnectionsOutliveTheLearnersControlConnectionAndIdleOnesEnd) {
  RelayOptions options = quick();
  options.limits.idle_timeout = milliseconds(300);
  start(std::move(options));
  auto learner = std::make_unique<TestLink>(link(run));
  ASSERT_TRUE(learner->is_accepted());
  Wire client = worker(run);
  Wire server = learner->meet(*learner->next_ticket());
  EXPECT_FALSE(server.receive().empty());
  learner.reset();
  ASSERT_TRUE(eventually([](const RelayStats& now) { return now.runs == 0; }));
  EXPECT_TRUE(client.send("up"));
  EXPECT_FALSE(server.receive().empty());
  EXPECT_TRUE(client.is_over()) << "idle";
  EXPECT_TRUE(server.is_over());
}

TEST_F(RelayTest, ARunEndsWithItsBytes) {
  RelayOptions options = quick();
  options.limits.bytes_per_run = Bytes{1'000'000};
  start(std::move(options));
  TestLink learner = link(run);
  ASSERT_TRUE(learner.is_accepted());
  Wire client = worker(run);
  Wire server = learner.meet(*learner.next_ticket());
  client.send(std::string(2'000'000, 'x'));
  EXPECT_LE(server.receive_all(2'000'000).size(), 1'000'000u);
  const auto told = learner.next();
  ASSERT_TRUE(told && *told);
  EXPECT_EQ((*told)->type, ControlFrame::Type::kRefused);
  EXPECT_THAT((*told)->body, HasSubstr("--run-bytes"));
  TestLink again = link(run);
  const auto refused = again.next();
  ASSERT_TRUE(refused && *refused);
  EXPECT_EQ((*refused)->type, ControlFrame::Type::kRefused);
}

TEST_F(RelayTest, ARateHolds) {
  RelayOptions options = quick();
  options.limits.rate_per_run = BitRate{80e6};  // 10 MB/s
  start(std::move(options));
  TestLink learner = link(run);
  ASSERT_TRUE(learner.is_accepted());
  Wire client = worker(run);
  Wire server = learner.meet(*learner.next_ticket());
  const auto began = std::chrono::steady_clock::now();
  std::thread sender([&] { client.send(std::string(5'000'000, 'x')); });
  EXPECT_EQ(server.receive_all(5'000'000).size(), 5'000'000u);
  sender.join();
  EXPECT_GE(std::chrono::steady_clock::now() - began, milliseconds(430));
}

TEST_F(RelayTest, ItsOptionsAreChecked) {
  RelayOptions weak = quick();
  weak.key = trust::Secret("guess");
  EXPECT_THAT(Relay::start(std::move(weak)).error().message(), HasSubstr("at least 32 characters"));
  start();
  EXPECT_THAT(Relay::start(quick(relay->endpoint().port)).error().message(), HasSubstr("in use"));
}

// ---- whole nodes ----

class RelayedNodesTest : public RelayTest {
 protected:
  LearnerOptions behind_relay() {
    LearnerOptions options = TestLearner::quick();
    options.network.relay = to_text(relay->endpoint());
    options.relay_key = key();
    return options;
  }
  WorkerOptions through_relay(const std::string& name) {
    WorkerOptions options = TestWorker::of(learner, name);
    options.learner = relay->endpoint();
    return options;
  }

  TestLearner learner;
  TestWorker relayed, direct;
};

TEST_F(RelayedNodesTest, AWorkerJoinsThroughTheRelayAndGetsEveryVersion) {
  start();
  learner.start(behind_relay());
  EXPECT_EQ(learner.node->remote_endpoints(), std::vector{relay->endpoint()});
  ASSERT_TRUE(eventually([](const RelayStats& now) { return now.runs == 1; }));
  relayed.start(through_relay("far"));
  direct.start(TestWorker::of(learner, "near"));
  ASSERT_TRUE(learner.publish(0, {}, 3'000'000).has_value());
  ASSERT_TRUE(learner.publish(1, 0, 100'000).has_value());
  ASSERT_TRUE(learner.all_acked(2, 1));
  EXPECT_EQ(relayed.payload(0), random_bytes(0, 3'000'000));
  EXPECT_FALSE(learner.wrong_digest);
  EXPECT_GE(relay->stats().joined, 1u);
}

TEST_F(RelayedNodesTest, TheRunGoesOnWithoutItsRelayAndWithTheNextOne) {
  start();
  const std::uint16_t port = relay->endpoint().port;
  learner.start(behind_relay());
  ASSERT_TRUE(eventually([](const RelayStats& now) { return now.runs == 1; }));
  relayed.start(through_relay("far"));
  direct.start(TestWorker::of(learner, "near"));
  ASSERT_TRUE(learner.publish(0, {}, 100'000).has_value());
  ASSERT_TRUE(learner.all_acked(2, 0));
  relay.reset();
  ASSERT_TRUE(learner.board.wait([&] { return learner.away.size() == 1; })) << "the relayed worker";
  ASSERT_TRUE(learner.publish(1, 0, 100'000).has_value());
  ASSERT_TRUE(learner.board.wait([&] { return learner.acked[*direct.id] == Version{1}; }));
  start(quick(port));
  ASSERT_TRUE(learner.publish(2, 1, 100'000).has_value());
  ASSERT_TRUE(learner.all_acked(2, 2)) << "the worker has come back through the new relay";
  EXPECT_EQ(relayed.board.read([&] { return relayed.got.back().policy_digest; }), digest_of(2));
}

TEST_F(RelayedNodesTest, ALearnerStartsBeforeItsRelay) {
  start();
  const std::uint16_t port = relay->endpoint().port;
  const LearnerOptions options = behind_relay();
  relay.reset();
  learner.start(options);
  WorkerOptions early = TestWorker::of(learner, "far");
  early.learner = {"127.0.0.1", port};
  std::thread later([&] { start(quick(port)); });
  relayed.start(std::move(early));
  later.join();
  ASSERT_TRUE(learner.publish(0, {}, 1'000).has_value());
  ASSERT_TRUE(learner.all_acked(1, 0));
}

TEST_F(RelayedNodesTest, WrongOptionsAreNamed) {
  start();
  LearnerOptions no_port = behind_relay(), no_key = behind_relay();
  no_port.network.relay = "relay.example";
  EXPECT_THAT(LearnerNode::start(no_port, {}).error().message(), HasSubstr("network.relay"));
  no_key.relay_key = {};
  EXPECT_THAT(LearnerNode::start(no_key, {}).error().message(), HasSubstr("relay_key_file"));
}

}  // namespace
}  // namespace echoline::overlay::relay
