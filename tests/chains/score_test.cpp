// Peer score and role ladder.
#include "chains/score.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace echoline::chains {
namespace {

using std::chrono::seconds;

PeerStats perfect() { return {BitRate::from_mbit_per_s(8), BitRate::from_mbit_per_s(8), 20, 20, Duration{}}; }

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

TEST(RoleLadder, ThreeFailuresInARowCostOneRole) {
  RoleLadder ladder;
  EXPECT_FALSE(ladder.failed());
  EXPECT_FALSE(ladder.failed());
  ladder.succeeded();
  EXPECT_FALSE(ladder.failed());
  EXPECT_FALSE(ladder.failed());
  EXPECT_EQ(ladder.role(), Role::kSeed);
  EXPECT_TRUE(ladder.failed());
  EXPECT_EQ(ladder.role(), Role::kTail);
  EXPECT_FALSE(ladder.failed());
  EXPECT_FALSE(ladder.failed());
  EXPECT_TRUE(ladder.failed());
  EXPECT_EQ(ladder.role(), Role::kRolloutOnly);
  for (int i = 0; i < 7; ++i) EXPECT_FALSE(ladder.failed());
  EXPECT_EQ(ladder.role(), Role::kRolloutOnly);
}

TEST(RoleLadder, TenVersionsWithoutAFailureWinOneRoleBack) {
  RoleLadder ladder;
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(ladder.installed());  // nothing to win
  for (int i = 0; i < 2 * RoleLadder::kFailuresPerStep; ++i) ladder.failed();
  ASSERT_EQ(ladder.role(), Role::kRolloutOnly);
  for (int i = 0; i < RoleLadder::kInstalledPerStep - 1; ++i) EXPECT_FALSE(ladder.installed());
  EXPECT_TRUE(ladder.installed());
  EXPECT_EQ(ladder.role(), Role::kTail);
  // A step down begins the count anew.
  for (int i = 0; i < RoleLadder::kInstalledPerStep - 1; ++i) EXPECT_FALSE(ladder.installed());
  for (int i = 0; i < RoleLadder::kFailuresPerStep; ++i) ladder.failed();
  ASSERT_EQ(ladder.role(), Role::kRolloutOnly);
  for (int i = 0; i < RoleLadder::kInstalledPerStep - 1; ++i) EXPECT_FALSE(ladder.installed());
  EXPECT_TRUE(ladder.installed());
  for (int i = 0; i < RoleLadder::kInstalledPerStep - 1; ++i) EXPECT_FALSE(ladder.installed());
  EXPECT_TRUE(ladder.installed());
  EXPECT_EQ(ladder.role(), Role::kSeed);
}

}  // namespace
}  // namespace echoline::chains
