// Peer score and role ladder.
#include "chains/score.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace echoline::chains {
namespace {

using std::chrono::seconds;

PeerStats perfect() {
  return {.forwarding_rate = BitRate::from_mbit_per_s(8),
          .cap = BitRate::from_mbit_per_s(8),
          .attempts = 20,
          .successes = 20};
}

TEST(PeerScore, PerfectPeerScoresOne) { EXPECT_DOUBLE_EQ(peer_score(perfect()), 1.0); }

TEST(PeerScore, BandwidthSaturatesAtTheCap) {
  PeerStats p = perfect();
  p.forwarding_rate = BitRate::from_mbit_per_s(80);
  EXPECT_DOUBLE_EQ(peer_score(p), 1.0);
  p.forwarding_rate = BitRate::from_mbit_per_s(2);
  EXPECT_DOUBLE_EQ(peer_score(p), 0.6 * 0.25 + 0.25 + 0.15);
  p.cap.reset();
  EXPECT_DOUBLE_EQ(peer_score(p), 1.0);
  p.cap = BitRate{0};
  EXPECT_DOUBLE_EQ(peer_score(p), 0.4);
}

TEST(PeerScore, SuccessCountsInFullOnlyAfterTwentyAttempts) {
  PeerStats p = perfect();
  p.attempts = p.successes = 5;
  EXPECT_DOUBLE_EQ(peer_score(p), 0.6 + 0.25 * 5 / 20 + 0.15);
  p.attempts = 40;
  p.successes = 30;
  EXPECT_DOUBLE_EQ(peer_score(p), 0.6 + 0.25 * 0.75 + 0.15);
  p.attempts = p.successes = 0;
  EXPECT_DOUBLE_EQ(peer_score(p), 0.75);
}

TEST(PeerScore, FreshnessFallsByEAfterFiveMinutes) {
  PeerStats p = perfect();
  p.age = seconds(300);
  EXPECT_DOUBLE_EQ(peer_score(p), 0.85 + 0.15 * std::exp(-1.0));
  p.age = seconds(-5);
  EXPECT_DOUBLE_EQ(peer_score(p), 1.0);
}

TEST(RoleLadder, ClimbsByDeliveriesToOthersAlone) {
  const TimePoint now{};
  RoleLadder ladder;
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(ladder.record_delivery());  // nothing to win
  EXPECT_TRUE(ladder.demote(now));
  EXPECT_EQ(ladder.role(), Role::kTail);
  for (int i = 0; i < RoleLadder::kDeliveriesToPromote - 1; ++i) EXPECT_FALSE(ladder.record_delivery());
  EXPECT_TRUE(ladder.record_delivery());
  EXPECT_EQ(ladder.role(), Role::kSeed);
  // A demotion resets the count.
  ladder.demote(now);
  for (int i = 0; i < RoleLadder::kDeliveriesToPromote - 1; ++i) EXPECT_FALSE(ladder.record_delivery());
  EXPECT_TRUE(ladder.demote(now));
  EXPECT_FALSE(ladder.demote(now));
  ASSERT_EQ(ladder.role(), Role::kRolloutOnly);
  for (int i = 0; i < RoleLadder::kDeliveriesToPromote - 1; ++i) EXPECT_FALSE(ladder.record_delivery());  // as a helper
  EXPECT_TRUE(ladder.record_delivery());
  EXPECT_EQ(ladder.role(), Role::kTail);
}

TEST(RoleLadder, ARolloutOnlyWorkerRetriesAfterARestThatGrows) {
  TimePoint now{};
  RoleLadder ladder;
  EXPECT_FALSE(ladder.retry_if_rested(now + std::chrono::hours(9)));  // it may forward
  ladder.demote(now);
  ladder.demote(now);
  EXPECT_FALSE(ladder.retry_if_rested(now + RoleLadder::kPause - std::chrono::milliseconds(1)));
  now += RoleLadder::kPause;
  EXPECT_TRUE(ladder.retry_if_rested(now));
  EXPECT_EQ(ladder.role(), Role::kTail);
  ladder.demote(now);
  EXPECT_FALSE(ladder.retry_if_rested(now + RoleLadder::kPause));
  EXPECT_TRUE(ladder.retry_if_rested(now + 2 * RoleLadder::kPause));
}

}  // namespace
}  // namespace echoline::chains
