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

const TimePoint kDeadline = TimePoint(seconds(5));
PeerInfo worker(std::uint64_t id) { return {"10.0.0.1", {Kind::kWorker, WorkerId{id}}}; }
PeerInfo unenrolled(std::string host) { return {std::move(host), {}}; }

TEST(ConnectionLimits, LeaveFilesForTheProgram) {
  for (const std::size_t files : {256u, 1024u, 4096u, 20'000u, 65'536u}) {
    const ConnectionLimits limits = ConnectionLimits::of(files);
    EXPECT_GE(files - limits.total, 64u) << files;
    EXPECT_LE(limits.unproven + limits.pending_peers + limits.members, limits.total) << files;
    EXPECT_GT(limits.members, limits.per_identity) << files;
    EXPECT_GE(limits.pending_peers, 2 * limits.per_identity) << files;
  }
  EXPECT_GE(1024 - ConnectionLimits::of(1024).total, 256u);
  EXPECT_GE(ConnectionLimits::of(65'536).members, 16'384u);
  EXPECT_GT(ConnectionLimits::of(10).total, 0u);  // too few to work with, which is not reported here
}

TEST(PendingPeers, OneCertificateHasALimit) {
  ConnectionLimits limits = ConnectionLimits::of(1024);
  limits.per_identity = 2;
  PendingPeers pending(limits);
  EXPECT_THAT(pending.add(ConnId{2}, worker(1), kDeadline), IsEmpty());
  EXPECT_THAT(pending.add(ConnId{4}, worker(1), kDeadline), IsEmpty());
  EXPECT_THAT(pending.add(ConnId{6}, worker(2), kDeadline), IsEmpty());
  EXPECT_THAT(pending.add(ConnId{8}, worker(1), kDeadline), ElementsAre(ConnId{2}));
  EXPECT_EQ(pending.find(ConnId{2}), nullptr);
  ASSERT_NE(pending.find(ConnId{6}), nullptr);
  for (std::uint64_t i = 0; i < 50; ++i)  // machines behind one address that are about to enrol
    EXPECT_THAT(pending.add(ConnId{100 + i}, unenrolled("10.0.0.9"), kDeadline), IsEmpty());
}

TEST(PendingPeers, TheAddressWithMostConnectionsMakesRoom) {
  ConnectionLimits limits = ConnectionLimits::of(1024);
  limits.pending_peers = 4;
  PendingPeers pending(limits);
  pending.add(ConnId{2}, unenrolled("10.0.0.1"), kDeadline);
  pending.add(ConnId{4}, unenrolled("10.0.0.2"), kDeadline);
  pending.add(ConnId{6}, unenrolled("10.0.0.2"), kDeadline);
  pending.add(ConnId{8}, unenrolled("10.0.0.2"), kDeadline);
  EXPECT_THAT(pending.add(ConnId{10}, unenrolled("10.0.0.3"), kDeadline), ElementsAre(ConnId{4}));
  EXPECT_THAT(pending.add(ConnId{12}, unenrolled("10.0.0.2"), kDeadline), ElementsAre(ConnId{6}));
  pending.erase(ConnId{8});
  pending.erase(ConnId{12});
  pending.add(ConnId{14}, unenrolled("10.0.0.4"), kDeadline);
  pending.add(ConnId{16}, unenrolled("10.0.0.5"), kDeadline);
  EXPECT_THAT(pending.add(ConnId{18}, unenrolled("10.0.0.6"), kDeadline), ElementsAre(ConnId{2}))
      << "the oldest, because each address has one";
  EXPECT_EQ(pending.size(), 4u);
}

TEST(PendingPeers, AreClosedAfterTheirDeadline) {
  PendingPeers pending(ConnectionLimits::of(1024));
  pending.add(ConnId{2}, worker(1), TimePoint(seconds(5)));
  pending.add(ConnId{4}, worker(2), TimePoint(seconds(6)));
  EXPECT_EQ(pending.next_deadline(), TimePoint(seconds(5)));
  EXPECT_THAT(pending.take_expired(TimePoint(seconds(5))), ElementsAre(ConnId{2}));
  pending.await_have(ConnId{4}, PeerHello{"run", 0, {}, false, {}}, TimePoint(seconds(8)));
  EXPECT_TRUE(pending.find(ConnId{4})->hello.has_value());
  pending.postpone(seconds(10));
  EXPECT_EQ(pending.next_deadline(), TimePoint(seconds(18)));
  EXPECT_THAT(pending.take_expired(TimePoint(seconds(17))), IsEmpty());
  EXPECT_THAT(pending.take_all(), ElementsAre(ConnId{4}));
  EXPECT_EQ(pending.next_deadline(), kNever);
  EXPECT_THAT(pending.take_all(), IsEmpty());
}

}  // namespace
}  // namespace echoline::overlay
