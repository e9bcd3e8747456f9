#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "talker.hpp"

namespace echoline::sim {
namespace {

using namespace overlay;
using std::chrono::milliseconds;
using std::chrono::seconds;

Slice data_of(std::size_t bytes, unsigned char value) {
  return Slice(std::vector<std::byte>(bytes, static_cast<std::byte>(value)));
}

act::Send chunk(ConnId conn, std::uint32_t index, const Slice& data) {
  ChunkHead head;
  head.index = head.seal_first = index;
  head.length = static_cast<std::uint32_t>(data.size());
  return {conn, Slice(encode_chunk_head(head)), data};
}

// Two hosts that talk: `a` dials `b`.
class Pair {
 public:
  explicit Pair(WorldOptions options = {}, AccessLink link_a = {}, AccessLink link_b = {})
      : world(options), host_a(world.add_host(link_a)), host_b(world.add_host(link_b)) {
    a = &start_talker(world, host_a);
    b = &start_talker(world, host_b);
  }
  ConnId connect() {
    ConnId conn;
    tell(host_a, [&](Talker& t) { conn = t.call(world.endpoint_of(host_b)); });
    world.run(world.now() + seconds(10));
    return conn;
  }
  template <class Work>
  void tell(HostId host, Work&& work) {
    world.call(host, [&](TimePoint) { work(host == host_a ? *a : *b); });
  }
  void run(Duration time) { world.run(world.now() + time); }

  World world;
  HostId host_a, host_b;
  Talker *a, *b;
};

TEST(World, BytesTakeDelayAndRateOfBothLinks) {
  WorldOptions o;
  o.delay = milliseconds(50);
  Pair p(o, {BitRate::from_mbit_per_s(8), {}}, {{}, BitRate::from_mbit_per_s(4)});
  const ConnId conn = p.connect();
  EXPECT_EQ(p.a->last(), "connected");
  EXPECT_EQ(p.b->last(), "accepted nobody");
  const TimePoint begin = p.world.now();
  p.tell(p.host_a, [&](Talker& t) { t.say(conn, 100'000); });
  p.run(seconds(2));
  ASSERT_EQ(p.b->heard.size(), 1u);
  // 100 kB leave in 0.1 s; the slower downlink begins with the first byte and needs 0.2 s.
  EXPECT_NEAR(echoline::seconds(p.b->heard[0].at - begin), 0.05 + 0.2, 0.001);
  EXPECT_EQ(p.a->sent_bytes[conn], 100'000 + kFrameHeaderBytes);
}

TEST(World, AMovedHostLosesItsConnectionsAndHasANewAddress) {
  Pair p;
  const ConnId conn = p.connect();
  const Endpoint before = p.world.endpoint_of(p.host_a);
  p.tell(p.host_a, [&](Talker& t) { t.say(conn, 10); });
  p.world.move(p.host_a);
  p.run(seconds(60));
  EXPECT_NE(p.world.endpoint_of(p.host_a), before);
  EXPECT_EQ(p.a->last(), "the network has changed");
  EXPECT_EQ(p.b->last(), "accepted nobody") << "it receives nothing, not even a close";
  EXPECT_TRUE(p.b->heard.empty());
  p.tell(p.host_b, [&](Talker& t) { t.call(before); });
  p.run(seconds(10));
  EXPECT_EQ(p.b->last(), "no route to host");
  const ConnId again = p.connect();
  p.tell(p.host_a, [&](Talker& t) { t.say(again, 10); });
  p.run(seconds(1));
  EXPECT_EQ(p.b->heard.size(), 1u);
}

TEST(World, AProcessHoldsSoManyConnectionsAndNoMore) {
  Pair p;
  p.connect();
  p.world.set_connections_max(p.host_a, 1);
  p.connect();
  EXPECT_EQ(p.a->last(), "too many open files");
  p.world.set_connections_max(p.host_a, 9);
  p.world.set_connections_max(p.host_b, 1);
  p.connect();
  EXPECT_EQ(p.a->last(), "connection reset by the peer");
  p.world.set_connections_max(p.host_b, 2);
  p.connect();
  EXPECT_EQ(p.a->last(), "connected");
}

TEST(World, ABulkyConnectionDoesNotHoldUpAnother) {
  Pair p({}, {BitRate::from_mbit_per_s(8), {}});
  const ConnId bulk = p.connect(), small = p.connect();
  p.tell(p.host_a, [&](Talker& t) {
    for (int i = 0; i < 50; ++i) t.say(bulk, 100'000);  // five seconds' worth
    t.say(small, 10);
  });
  p.run(milliseconds(250));
  EXPECT_TRUE(
      std::any_of(p.b->heard.begin(), p.b->heard.end(), [](const auto& h) { return h.frame.body.size() == 10; }));
}

TEST(World, AConnectionKeepsItsOrderUnderAllFaults) {
  WorldOptions o;
  o.seed = 5;
  o.delay = milliseconds(20);
  o.jitter = milliseconds(30);
  o.stall_share = 0.2;
  o.split_transfer_share = 0.7;
  Pair p(o, {BitRate::from_mbit_per_s(50), {}}, {{}, BitRate::from_mbit_per_s(40)});
  const ConnId conn = p.connect();
  std::vector<Slice> sent;
  p.tell(p.host_a, [&](Talker& t) {
    for (std::uint32_t i = 0; i < 200; ++i) {
      sent.push_back(data_of(1 + i * 37, static_cast<unsigned char>(i)));
      t.act(chunk(conn, i, sent.back()));
    }
  });
  p.run(seconds(60));
  ASSERT_EQ(p.b->heard.size(), 200u);
  for (std::uint32_t i = 0; i < 200; ++i) {
    EXPECT_EQ(p.b->heard[i].frame.chunk.index, i);
    EXPECT_TRUE(std::ranges::equal(p.b->heard[i].frame.body.bytes(), sent[i].bytes()));
  }
}

TEST(World, AChunkIsNotCopied) {
  Pair p;
  const ConnId conn = p.connect();
  const Slice data = data_of(100'000, 1);
  p.tell(p.host_a, [&](Talker& t) { t.act(chunk(conn, 3, data)); });
  p.run(seconds(1));
  ASSERT_EQ(p.b->heard.size(), 1u);
  EXPECT_EQ(p.b->heard[0].frame.body.data(), data.data());
}

TEST(World, AReceiverThatDoesNotReadStopsTheSender) {
  Pair p;
  const ConnId conn = p.connect();
  const ConnId accepted = p.b->events.front().conn;
  p.tell(p.host_b, [&](Talker& t) { t.act(act::SetReading{accepted, false}); });
  p.tell(p.host_a, [&](Talker& t) {
    for (int i = 0; i < 20; ++i) t.say(conn, 100'000);
  });
  p.run(seconds(5));
  EXPECT_TRUE(p.b->heard.empty());
  EXPECT_LT(p.a->sent_bytes[conn], 600'000u);  // what fits into the sockets
  p.tell(p.host_b, [&](Talker& t) { t.act(act::SetReading{accepted, true}); });
  p.run(seconds(5));
  EXPECT_EQ(p.b->heard.size(), 20u);
  EXPECT_EQ(p.a->sent_bytes[conn], 20 * (100'000 + kFrameHeaderBytes));
}

TEST(World, ClosingFlushesAndIsSeen) {
  Pair p({}, {BitRate::from_mbit_per_s(8), {}});
  const ConnId conn = p.connect();
  p.tell(p.host_a, [&](Talker& t) {
    t.say(conn, 250'000);
    t.hang_up(conn);
  });
  p.run(seconds(2));
  EXPECT_EQ(p.b->heard.size(), 1u);
  EXPECT_EQ(p.b->last(), "closed by the peer");
  EXPECT_EQ(p.a->last(), "connected");  // nothing more is said about it
}

TEST(World, GarbageEndsTheConnection) {
  Pair p;
  const ConnId conn = p.connect();
  p.tell(p.host_a, [&](Talker& t) { t.act(act::Send{conn, data_of(100, 9), {}}); });
  p.run(seconds(1));
  EXPECT_THAT(p.b->last(), testing::HasSubstr("expected magic"));
  EXPECT_EQ(p.a->last(), "connection reset by the peer");
}

TEST(World, ACrashClosesConnectionsAndLosesUnsentData) {
  Pair p({}, {BitRate::from_mbit_per_s(8), {}});
  const ConnId conn = p.connect();
  p.tell(p.host_a, [&](Talker& t) {
    for (int i = 0; i < 10; ++i) t.say(conn, 100'000);
  });
  p.run(milliseconds(350));
  p.world.kill(p.host_a, Death::kCrash);
  p.run(seconds(5));
  EXPECT_EQ(p.b->heard.size(), 3u);
  EXPECT_EQ(p.b->last(), "connection reset by the peer");
}

TEST(World, APowerLossIsSilentUntilTheMachineIsBack) {
  WorldOptions o;
  o.delay = milliseconds(10);
  Pair p(o);
  p.connect();
  const ConnId accepted = p.b->events.front().conn;
  p.world.kill(p.host_a, Death::kPowerLoss);
  p.tell(p.host_b, [&](Talker& t) { t.say(accepted, 100); });
  p.run(seconds(60));
  EXPECT_EQ(p.b->last(), "accepted nobody");
  ConnId conn;
  p.tell(p.host_b, [&](Talker& t) { conn = t.call(p.world.endpoint_of(p.host_a)); });
  p.run(seconds(10));
  EXPECT_EQ(p.b->last(), "connection timed out");
  p.a = &start_talker(p.world, p.host_a);
  p.tell(p.host_b, [&](Talker& t) { t.say(accepted, 100); });
  p.run(seconds(1));
  EXPECT_EQ(p.b->last(), "connection reset by the peer");
  EXPECT_TRUE(p.a->heard.empty());
}

TEST(World, ADeadHostRefusesAndAHostBehindNatTimesOut) {
  WorldOptions o;
  o.delay = milliseconds(10);
  Pair p(o);
  p.world.kill(p.host_b, Death::kCrash);
  p.tell(p.host_a, [&](Talker& t) { t.call(p.world.endpoint_of(p.host_b)); });
  p.run(seconds(1));
  EXPECT_EQ(p.a->last(), "connection refused");
  p.b = &start_talker(p.world, p.host_b);
  p.world.set_nat(p.host_b, true);
  p.tell(p.host_a, [&](Talker& t) { t.call(p.world.endpoint_of(p.host_b)); });
  p.run(seconds(4));
  EXPECT_EQ(p.a->last(), "connection refused");  // that of before
  p.run(seconds(2));
  EXPECT_EQ(p.a->last(), "connection timed out");
  p.tell(p.host_b, [&](Talker& t) { t.call(p.world.endpoint_of(p.host_a)); });
  p.run(seconds(1));
  EXPECT_EQ(p.b->last(), "connected");  // out it goes
}

TEST(World, APartitionHoldsEverythingBackUntilItHeals) {
  WorldOptions o;
  o.delay = milliseconds(10);
  Pair p(o);
  const ConnId conn = p.connect();
  const std::uint64_t cut = p.world.cut({p.host_a}, {p.host_b}, false);
  p.tell(p.host_a, [&](Talker& t) {
    t.say(conn, 1000);
    t.call(p.world.endpoint_of(p.host_b));
  });
  p.run(seconds(10));
  EXPECT_TRUE(p.b->heard.empty());
  EXPECT_EQ(p.a->last(), "connection timed out");
  p.world.heal(cut);
  p.run(seconds(2));
  EXPECT_EQ(p.b->heard.size(), 1u);
}

TEST(World, AOneWayPartitionLetsTheOtherWayThrough) {
  Pair p;
  const ConnId conn = p.connect();
  const ConnId accepted = p.b->events.front().conn;
  p.world.cut({p.host_a}, {p.host_b}, true);
  p.tell(p.host_a, [&](Talker& t) { t.say(conn, 1000); });
  p.tell(p.host_b, [&](Talker& t) {
    for (int i = 0; i < 20; ++i) t.say(accepted, 100'000);
  });
  p.run(seconds(5));
  EXPECT_TRUE(p.b->heard.empty());
  EXPECT_EQ(p.a->heard.size(), 20u);
  EXPECT_LT(p.b->sent_bytes[accepted], 600'000u);  // the acknowledgement is lost
}

TEST(World, AClogDelaysAndLosesNothing) {
  Pair p;
  const ConnId conn = p.connect();
  p.world.stop_links(p.host_b, p.world.now() + seconds(3));
  const TimePoint begin = p.world.now();
  p.tell(p.host_a, [&](Talker& t) {
    for (int i = 0; i < 10; ++i) t.say(conn, 1000);
  });
  p.run(seconds(10));
  ASSERT_EQ(p.b->heard.size(), 10u);
  EXPECT_GE(p.b->heard[0].at - begin, seconds(3));
}

// ---- identities ----

class Identities : public testing::Test {
 protected:
  Identities()
      : authority_(*trust::Authority::create("run", trust::SigningKey(trust::SigningKey::Seed{std::byte{1}}))),
        p_(WorldOptions{}) {
    p_.world.set_authority({"run", authority_.public_key()});
  }
  void certify(HostId host, const trust::Authority& by, std::optional<WorkerId> worker,
               Duration lifetime = seconds(600)) {
    trust::CertificateRequest request;
    request.subject = by.public_key();
    request.kind = worker ? trust::PeerIdentity::Kind::kWorker : trust::PeerIdentity::Kind::kLearner;
    request.worker = worker.value_or(kLearnerId);
    request.serial = 1;
    request.now_unix_s = p_.world.unix_origin_s(host);
    request.lifetime = lifetime;
    auto certificate = by.issue(request);
    ASSERT_TRUE(certificate.has_value());
    p_.tell(host, [&](Talker& t) { t.act(act::UseCertificate{*certificate, by.certificate()}); });
  }
  // The result at `a` of dialling `b`, and the last event at `b`.
  std::pair<std::string, std::string> dial(WorkerId expected, act::Service service = act::Service::kData) {
    p_.a->events.clear();
    p_.b->events.clear();
    p_.tell(p_.host_a, [&](Talker& t) { t.call(p_.world.endpoint_of(p_.host_b), expected, service); });
    p_.run(seconds(1));
    return {p_.a->last(), p_.b->last()};
  }

  trust::Authority authority_;
  Pair p_;
};

TEST_F(Identities, BothEndsKnowEachOther) {
  certify(p_.host_a, authority_, WorkerId{3});
  certify(p_.host_b, authority_, std::nullopt);
  EXPECT_EQ(dial(kLearnerId), std::pair(std::string("connected"), std::string("accepted worker 3")));
}

TEST_F(Identities, AnUnexpectedIdentityIsRefused) {
  certify(p_.host_a, authority_, WorkerId{3});
  certify(p_.host_b, authority_, WorkerId{4});
  EXPECT_EQ(dial(WorkerId{5}), std::pair(std::string("expected worker 5, found worker 4"), std::string("nothing")));
  EXPECT_EQ(dial(kLearnerId).first, "expected the learner, found worker 4");
  EXPECT_EQ(dial(WorkerId{4}).second, "accepted worker 3");
}

TEST_F(Identities, AnEnrollingHostHasNoIdentity) {
  certify(p_.host_b, authority_, std::nullopt);
  EXPECT_EQ(dial(kLearnerId, act::Service::kEnrol).second, "accepted nobody");
  // Without a certificate, no other service accepts it. The dialler gets the refusal only after its handshake
  // succeeded.
  EXPECT_EQ(dial(kLearnerId), std::pair(std::string("connection reset by the peer"), std::string("nothing")));
}

TEST_F(Identities, ForeignAndExpiredCertificatesFail) {
  const auto other = trust::Authority::create("run", trust::SigningKey(trust::SigningKey::Seed{std::byte{2}}));
  certify(p_.host_a, *other, WorkerId{3});
  certify(p_.host_b, authority_, std::nullopt);
  EXPECT_EQ(dial(kLearnerId).second, "nothing");
  certify(p_.host_a, authority_, WorkerId{3}, seconds(30));
  EXPECT_EQ(dial(kLearnerId).second, "accepted worker 3");
  p_.run(seconds(60));
  EXPECT_EQ(dial(kLearnerId).second, "nothing");
}

TEST(World, TheSameSeedGoesTheSameWay) {
  const auto hash = [](std::uint64_t seed) {
    WorldOptions o;
    o.seed = seed;
    o.jitter = milliseconds(10);
    o.stall_share = 0.1;
    Pair p(o);
    const ConnId conn = p.connect();
    p.tell(p.host_a, [&](Talker& t) {
      for (int i = 0; i < 50; ++i) t.say(conn, 1000);
    });
    p.run(seconds(10));
    return p.world.trace_hash();
  };
  EXPECT_EQ(hash(1), hash(1));
  EXPECT_NE(hash(1), hash(2));
}

}  // namespace
}  // namespace echoline::sim
