// The simulated network and its faults, between two scripted cores.
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

// Two hosts with talkers. `a` dials `b`.
class Pair {
 public:
  explicit Pair(WorldOptions options = {}, AccessLink link_a = {}, AccessLink link_b = {})
      : world(options), host_a(world.add_host(link_a)), host_b(world.add_host(link_b)) {
    a = &start_talker(world, host_a);
    b = &start_talker(world, host_b);
  }
  ConnId connect() {
    ConnId conn;
    with_talker(host_a, [&](Talker& t) { conn = t.dial_endpoint(world.endpoint_of(host_b)); });
    world.run(world.now() + seconds(10));
    return conn;
  }
  template <class Work>
  void with_talker(HostId host, Work&& work) {
    world.call(host, [&](TimePoint) { work(host == host_a ? *a : *b); });
  }
  void run(Duration time) {
    world.run(world.now() + time, [this] {
      world.check();
      return false;
    });
  }

  World world;
  HostId host_a, host_b;
  Talker *a, *b;
};

TEST(World, BytesTakeDelayAndRateOfBothLinks) {
  WorldOptions o;
  o.delay = milliseconds(50);
  Pair p(o, {.up = BitRate::from_mbit_per_s(8), .down = {}}, {.up = {}, .down = BitRate::from_mbit_per_s(4)});
  const ConnId conn = p.connect();
  EXPECT_EQ(p.a->last_event(), "connected");
  EXPECT_EQ(p.b->last_event(), "accepted nobody");
  const TimePoint begin = p.world.now();
  p.with_talker(p.host_a, [&](Talker& t) { t.send_frame(conn, 100'000); });
  p.run(seconds(2));
  ASSERT_EQ(p.b->received.size(), 1u);
  // 100 kB leave in 0.1 s; the slower downlink begins with the first byte and needs 0.2 s.
  EXPECT_NEAR(echoline::seconds(p.b->received[0].at - begin), 0.05 + 0.2, 0.001);
  EXPECT_EQ(p.a->reported_bytes[conn], 100'000 + kFrameHeaderBytes);
}

TEST(World, AMovedHostLosesItsConnectionsAndHasANewAddress) {
  Pair p;
  const ConnId conn = p.connect();
  const Endpoint before = p.world.endpoint_of(p.host_a);
  p.with_talker(p.host_a, [&](Talker& t) { t.send_frame(conn, 10); });
  p.world.change_address(p.host_a);
  p.run(seconds(60));
  EXPECT_NE(p.world.endpoint_of(p.host_a), before);
  EXPECT_EQ(p.a->last_event(), "the network has changed");
  EXPECT_EQ(p.b->last_event(), "accepted nobody") << "it receives nothing, not even a close";
  EXPECT_TRUE(p.b->received.empty());
  p.with_talker(p.host_b, [&](Talker& t) { t.dial_endpoint(before); });
  p.run(seconds(10));
  EXPECT_EQ(p.b->last_event(), "no route to host");
  const ConnId again = p.connect();
  p.with_talker(p.host_a, [&](Talker& t) { t.send_frame(again, 10); });
  p.run(seconds(1));
  EXPECT_EQ(p.b->received.size(), 1u);
}

TEST(World, AProcessHoldsSoManyConnectionsAndNoMore) {
  Pair p;
  p.connect();
  p.world.set_connections_max(p.host_a, 1);
  p.connect();
  EXPECT_EQ(p.a->last_event(), "too many open files");
  p.world.set_connections_max(p.host_a, 9);
  p.world.set_connections_max(p.host_b, 1);
  p.connect();
  EXPECT_EQ(p.a->last_event(), "connection reset by the peer");
  p.world.set_connections_max(p.host_b, 2);
  p.connect();
  EXPECT_EQ(p.a->last_event(), "connected");
}

TEST(World, ABulkyConnectionDoesNotHoldUpAnother) {
  Pair p({}, {.up = BitRate::from_mbit_per_s(8), .down = {}});
  const ConnId bulk = p.connect(), small = p.connect();
  p.with_talker(p.host_a, [&](Talker& t) {
    for (int i = 0; i < 50; ++i) t.send_frame(bulk, 100'000);  // five seconds' worth
    t.send_frame(small, 10);
  });
  p.run(milliseconds(250));
  EXPECT_TRUE(
      std::any_of(p.b->received.begin(), p.b->received.end(), [](const auto& h) { return h.frame.body.size() == 10; }));
}

TEST(World, AConnectionKeepsItsOrderUnderAllFaults) {
  WorldOptions o;
  o.seed = 5;
  o.delay = milliseconds(20);
  o.jitter = milliseconds(30);
  o.stalled_transfer_share = 0.2;
  o.split_transfer_share = 0.7;
  Pair p(o, {.up = BitRate::from_mbit_per_s(50), .down = {}}, {.up = {}, .down = BitRate::from_mbit_per_s(40)});
  const ConnId conn = p.connect();
  std::vector<Slice> sent;
  p.with_talker(p.host_a, [&](Talker& t) {
    for (std::uint32_t i = 0; i < 200; ++i) {
      sent.push_back(data_of(1 + i * 37, static_cast<unsigned char>(i)));
      t.perform(chunk(conn, i, sent.back()));
    }
  });
  p.run(seconds(60));
  ASSERT_EQ(p.b->received.size(), 200u);
  for (std::uint32_t i = 0; i < 200; ++i) {
    EXPECT_EQ(p.b->received[i].frame.chunk.index, i);
    EXPECT_TRUE(std::ranges::equal(p.b->received[i].frame.body.bytes(), sent[i].bytes()));
  }
}

TEST(World, AChunkIsNotCopied) {
  Pair p;
  const ConnId conn = p.connect();
  const Slice data = data_of(100'000, 1);
  p.with_talker(p.host_a, [&](Talker& t) { t.perform(chunk(conn, 3, data)); });
  p.run(seconds(1));
  ASSERT_EQ(p.b->received.size(), 1u);
  EXPECT_EQ(p.b->received[0].frame.body.data(), data.data());
}

TEST(World, AReceiverThatDoesNotReadStopsTheSender) {
  Pair p;
  const ConnId conn = p.connect();
  const ConnId accepted = p.b->events.front().conn;
  p.with_talker(p.host_b, [&](Talker& t) { t.perform(act::SetReading{accepted, false}); });
  p.with_talker(p.host_a, [&](Talker& t) {
    for (int i = 0; i < 20; ++i) t.send_frame(conn, 100'000);
  });
  p.run(seconds(5));
  EXPECT_TRUE(p.b->received.empty());
  EXPECT_LT(p.a->reported_bytes[conn], 600'000u);  // only as much as fits into the sockets
  p.with_talker(p.host_b, [&](Talker& t) { t.perform(act::SetReading{accepted, true}); });
  p.run(seconds(5));
  EXPECT_EQ(p.b->received.size(), 20u);
  EXPECT_EQ(p.a->reported_bytes[conn], 20 * (100'000 + kFrameHeaderBytes));
}

TEST(World, ClosingFlushesAndIsSeen) {
  Pair p({}, {.up = BitRate::from_mbit_per_s(8), .down = {}});
  const ConnId conn = p.connect();
  p.with_talker(p.host_a, [&](Talker& t) {
    t.send_frame(conn, 250'000);
    t.close_connection(conn);
  });
  p.run(seconds(2));
  EXPECT_EQ(p.b->received.size(), 1u);
  EXPECT_EQ(p.b->last_event(), "closed by the peer");
  EXPECT_EQ(p.a->last_event(), "connected");  // the closing end gets no further event
}

TEST(World, GarbageEndsTheConnection) {
  Pair p;
  const ConnId conn = p.connect();
  p.with_talker(p.host_a, [&](Talker& t) { t.perform(act::Send{conn, data_of(100, 9), {}}); });
  p.run(seconds(1));
  EXPECT_THAT(p.b->last_event(), testing::HasSubstr("expected magic"));
  EXPECT_EQ(p.a->last_event(), "connection reset by the peer");
}

TEST(World, ACrashClosesConnectionsAndLosesUnsentData) {
  Pair p({}, {.up = BitRate::from_mbit_per_s(8), .down = {}});
  const ConnId conn = p.connect();
  p.with_talker(p.host_a, [&](Talker& t) {
    for (int i = 0; i < 10; ++i) t.send_frame(conn, 100'000);
  });
  p.run(milliseconds(350));
  p.world.kill(p.host_a, Death::kCrash);
  p.run(seconds(5));
  EXPECT_EQ(p.b->received.size(), 3u);
  EXPECT_EQ(p.b->last_event(), "connection reset by the peer");
}

TEST(World, APowerLossIsSilentUntilTheMachineIsBack) {
  WorldOptions o;
  o.delay = milliseconds(10);
  Pair p(o);
  p.connect();
  const ConnId accepted = p.b->events.front().conn;
  p.world.kill(p.host_a, Death::kPowerLoss);
  p.with_talker(p.host_b, [&](Talker& t) { t.send_frame(accepted, 100); });
  p.run(seconds(60));
  EXPECT_EQ(p.b->last_event(), "accepted nobody");
  ConnId conn;
  p.with_talker(p.host_b, [&](Talker& t) { conn = t.dial_endpoint(p.world.endpoint_of(p.host_a)); });
  p.run(seconds(10));
  EXPECT_EQ(p.b->last_event(), "connection timed out");
  p.a = &start_talker(p.world, p.host_a);
  p.with_talker(p.host_b, [&](Talker& t) { t.send_frame(accepted, 100); });
  p.run(seconds(1));
  EXPECT_EQ(p.b->last_event(), "connection reset by the peer");
  EXPECT_TRUE(p.a->received.empty());
}

TEST(World, ADeadHostRefusesAndAHostBehindNatTimesOut) {
  WorldOptions o;
  o.delay = milliseconds(10);
  Pair p(o);
  p.world.kill(p.host_b, Death::kCrash);
  p.with_talker(p.host_a, [&](Talker& t) { t.dial_endpoint(p.world.endpoint_of(p.host_b)); });
  p.run(seconds(1));
  EXPECT_EQ(p.a->last_event(), "connection refused");
  p.b = &start_talker(p.world, p.host_b);
  p.world.set_nat(p.host_b, true);
  p.with_talker(p.host_a, [&](Talker& t) { t.dial_endpoint(p.world.endpoint_of(p.host_b)); });
  p.run(seconds(4));
  EXPECT_EQ(p.a->last_event(), "connection refused");  // the earlier dial; the new one has no answer yet
  p.run(seconds(2));
  EXPECT_EQ(p.a->last_event(), "connection timed out");
  p.with_talker(p.host_b, [&](Talker& t) { t.dial_endpoint(p.world.endpoint_of(p.host_a)); });
  p.run(seconds(1));
  EXPECT_EQ(p.b->last_event(), "connected");  // a host behind NAT can dial others
}

TEST(World, APartitionHoldsEverythingBackUntilItHeals) {
  WorldOptions o;
  o.delay = milliseconds(10);
  Pair p(o);
  const ConnId conn = p.connect();
  const std::uint64_t cut = p.world.start_partition({p.host_a}, {p.host_b}, /*one_way=*/false);
  p.with_talker(p.host_a, [&](Talker& t) {
    t.send_frame(conn, 1000);
    t.dial_endpoint(p.world.endpoint_of(p.host_b));
  });
  p.run(seconds(10));
  EXPECT_TRUE(p.b->received.empty());
  EXPECT_EQ(p.a->last_event(), "connection timed out");
  p.world.end_partition(cut);
  p.run(seconds(2));
  EXPECT_EQ(p.b->received.size(), 1u);
}

TEST(World, AOneWayPartitionLetsTheOtherWayThrough) {
  Pair p;
  const ConnId conn = p.connect();
  const ConnId accepted = p.b->events.front().conn;
  p.world.start_partition({p.host_a}, {p.host_b}, /*one_way=*/true);
  p.with_talker(p.host_a, [&](Talker& t) { t.send_frame(conn, 1000); });
  p.with_talker(p.host_b, [&](Talker& t) {
    for (int i = 0; i < 20; ++i) t.send_frame(accepted, 100'000);
  });
  p.run(seconds(5));
  EXPECT_TRUE(p.b->received.empty());
  EXPECT_EQ(p.a->received.size(), 20u);
  EXPECT_LT(p.b->reported_bytes[accepted], 600'000u);  // the acknowledgement is lost
}

TEST(World, AClogDelaysAndLosesNothing) {
  Pair p;
  const ConnId conn = p.connect();
  p.world.stop_links(p.host_b, p.world.now() + seconds(3));
  const TimePoint begin = p.world.now();
  p.with_talker(p.host_a, [&](Talker& t) {
    for (int i = 0; i < 10; ++i) t.send_frame(conn, 1000);
  });
  p.run(seconds(10));
  ASSERT_EQ(p.b->received.size(), 10u);
  EXPECT_GE(p.b->received[0].at - begin, seconds(3));
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
    p_.with_talker(host, [&](Talker& t) { t.perform(act::UseCertificate{*certificate, by.certificate()}); });
  }
  // The result at `a` of dialling `b`, and the last event at `b`.
  std::pair<std::string, std::string> dial(WorkerId expected, act::Service service = act::Service::kData) {
    p_.a->events.clear();
    p_.b->events.clear();
    p_.with_talker(p_.host_a, [&](Talker& t) { t.dial_endpoint(p_.world.endpoint_of(p_.host_b), expected, service); });
    p_.run(seconds(1));
    return {p_.a->last_event(), p_.b->last_event()};
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
    o.stalled_transfer_share = 0.1;
    Pair p(o);
    const ConnId conn = p.connect();
    p.with_talker(p.host_a, [&](Talker& t) {
      for (int i = 0; i < 50; ++i) t.send_frame(conn, 1000);
    });
    p.run(seconds(10));
    return p.world.trace_hash();
  };
  EXPECT_EQ(hash(1), hash(1));
  EXPECT_NE(hash(1), hash(2));
}

}  // namespace
}  // namespace echoline::sim
