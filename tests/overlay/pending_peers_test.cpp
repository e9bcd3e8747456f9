// The limit on pending peers, and the connections that are closed beyond it.
#include "overlay/pending_peers.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace echoline::overlay {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::IsEmpty;
using Kind = trust::PeerIdentity::Kind;

const TimePoint kLate = TimePoint(seconds(5));
PeerInfo worker(std::uint64_t id) { return {"10.0.0.1", {Kind::kWorker, WorkerId{id}}}; }
PeerInfo nobody(std::string host) { return {std::move(host), {}}; }

TEST(ConnectionLimits, LeaveFilesForTheProgram) {
  for (const std::size_t files : {256u, 1024u, 4096u, 20'000u, 65'536u}) {
    const ConnectionLimits l = ConnectionLimits::of(files);
    EXPECT_GE(files - l.total, 64u) << files;
    EXPECT_LE(l.unproven + l.pending_peers + l.members, l.total) << files;
    EXPECT_GT(l.members, l.per_identity) << files;
    EXPECT_GE(l.pending_peers, 2 * l.per_identity) << files;
  }
  EXPECT_GE(1024 - ConnectionLimits::of(1024).total, 256u);
  EXPECT_GE(ConnectionLimits::of(65'536).members, 16'384u);
  EXPECT_GT(ConnectionLimits::of(10).total, 0u);  // it will not work, and does not fail here
}

TEST(PendingPeers, OneCertificateHasItsShare) {
  ConnectionLimits limits = ConnectionLimits::of(1024);
  limits.per_identity = 2;
  PendingPeers s(limits);
  EXPECT_THAT(s.add(ConnId{2}, worker(1), kLate), IsEmpty());
  EXPECT_THAT(s.add(ConnId{4}, worker(1), kLate), IsEmpty());
  EXPECT_THAT(s.add(ConnId{6}, worker(2), kLate), IsEmpty());
  EXPECT_THAT(s.add(ConnId{8}, worker(1), kLate), ElementsAre(ConnId{2}));
  EXPECT_EQ(s.find(ConnId{2}), nullptr);
  ASSERT_NE(s.find(ConnId{6}), nullptr);
  for (std::uint64_t i = 0; i < 50; ++i)  // machines behind one address that are about to enrol
    EXPECT_THAT(s.add(ConnId{100 + i}, nobody("10.0.0.9"), kLate), IsEmpty());
}

TEST(PendingPeers, TheAddressWithMostConnectionsMakesRoom) {
  ConnectionLimits limits = ConnectionLimits::of(1024);
  limits.pending_peers = 4;
  PendingPeers s(limits);
  s.add(ConnId{2}, nobody("10.0.0.1"), kLate);
  s.add(ConnId{4}, nobody("10.0.0.2"), kLate);
  s.add(ConnId{6}, nobody("10.0.0.2"), kLate);
  s.add(ConnId{8}, nobody("10.0.0.2"), kLate);
  EXPECT_THAT(s.add(ConnId{10}, nobody("10.0.0.3"), kLate), ElementsAre(ConnId{4}));
  EXPECT_THAT(s.add(ConnId{12}, nobody("10.0.0.2"), kLate), ElementsAre(ConnId{6}));
  s.erase(ConnId{8});
  s.erase(ConnId{12});
  s.add(ConnId{14}, nobody("10.0.0.4"), kLate);
  s.add(ConnId{16}, nobody("10.0.0.5"), kLate);
  EXPECT_THAT(s.add(ConnId{18}, nobody("10.0.0.6"), kLate), ElementsAre(ConnId{2})) << "the oldest, where all have one";
  EXPECT_EQ(s.size(), 4u);
}

TEST(PendingPeers, HaveUntilThenToSaySomething) {
  PendingPeers s(ConnectionLimits::of(1024));
  s.add(ConnId{2}, worker(1), TimePoint(seconds(5)));
  s.add(ConnId{4}, worker(2), TimePoint(seconds(6)));
  EXPECT_EQ(s.next_deadline(), TimePoint(seconds(5)));
  EXPECT_THAT(s.take_late(TimePoint(seconds(5))), ElementsAre(ConnId{2}));
  s.await_have(ConnId{4}, PeerHello{"run", 0, {}, false, {}}, TimePoint(seconds(8)));
  EXPECT_TRUE(s.find(ConnId{4})->hello.has_value());
  s.postpone(seconds(10));
  EXPECT_EQ(s.next_deadline(), TimePoint(seconds(18)));
  EXPECT_THAT(s.take_late(TimePoint(seconds(17))), IsEmpty());
  EXPECT_THAT(s.take_all(), ElementsAre(ConnId{4}));
  EXPECT_EQ(s.next_deadline(), kNever);
  EXPECT_THAT(s.take_all(), IsEmpty());
}

}  // namespace
}  // namespace echoline::overlay
