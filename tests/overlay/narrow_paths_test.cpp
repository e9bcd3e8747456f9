// Rules for trying small segments, and for reporting a path that swallows large packets.
#include "overlay/narrow_paths.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace echoline::overlay {
namespace {

using testing::HasSubstr;

const std::string kHost = "10.0.0.1";
// All sent data has been acknowledged, and nothing comes back: a stopped process.
constexpr NarrowPaths::Stall kSilent{1500, 0, 0, 0};

TEST(NarrowPaths, ASmallPacketThatOvertakesALargeOneProvesIt) {
  for (const NarrowPaths::Stall proof : {NarrowPaths::Stall{1500, 3, 1, 0}, NarrowPaths::Stall{1500, 0, 0, 1}}) {
    NarrowPaths paths;
    EXPECT_FALSE(paths.wants_small_segments(kHost));
    paths.on_handshake_timeout(kHost, false, proof);
    EXPECT_TRUE(paths.wants_small_segments(kHost));
    EXPECT_FALSE(paths.wants_small_segments("10.0.0.2"));
    const auto message = paths.on_handshake_done(kHost, true);
    ASSERT_TRUE(message.has_value());
    EXPECT_THAT(*message, HasSubstr("the path to 10.0.0.1 swallows packets of 1500 bytes"));
    EXPECT_FALSE(paths.on_handshake_done(kHost, true)) << "reported only once";
    paths.on_handshake_timeout(kHost, true, kSilent);
    EXPECT_TRUE(paths.wants_small_segments(kHost)) << "a proof is not forgotten";
  }
}

TEST(NarrowPaths, AStoppedPeerIsNoProof) {
  NarrowPaths paths;
  for (int i = 0; i < 4; ++i) {  // stopped for 40 s and dialled every 5 s; then it answers
    EXPECT_FALSE(paths.wants_small_segments(kHost));
    paths.on_handshake_timeout(kHost, false, kSilent);
    EXPECT_TRUE(paths.wants_small_segments(kHost)) << "small segments are tried without a proof";
    if (i < 3) paths.on_handshake_timeout(kHost, true, kSilent);
  }
  EXPECT_FALSE(paths.on_handshake_done(kHost, true));
  EXPECT_FALSE(paths.wants_small_segments(kHost));
  EXPECT_FALSE(paths.on_handshake_done(kHost, false));
  // If bytes are lost and no later ones arrive, the network is down.
  paths.on_handshake_timeout(kHost, false, {1500, 5, 0, 0});
  EXPECT_FALSE(paths.on_handshake_done(kHost, true));
}

// The last flight of a handshake may be too large as well. Then no small packet follows, but the sizes prove it.
TEST(NarrowPaths, ItIsProofIfOnlySmallPacketsEverArrive) {
  NarrowPaths paths;
  paths.on_handshake_timeout(kHost, false, {9000, 5, 0, 0});
  EXPECT_FALSE(paths.on_handshake_done(kHost, true));
  paths.on_handshake_timeout(kHost, false, {9000, 5, 0, 0});
  const auto message = paths.on_handshake_done(kHost, true);
  ASSERT_TRUE(message.has_value());
  EXPECT_THAT(*message, HasSubstr("swallows packets of 9000 bytes"));
  EXPECT_TRUE(paths.wants_small_segments(kHost));
}

TEST(NarrowPaths, RemembersALimitedNumberOfHosts) {
  NarrowPaths paths;
  for (std::size_t i = 0; i < 2 * NarrowPaths::kHostsMax; ++i)
    paths.on_handshake_timeout(std::to_string(i), false, kSilent);
  EXPECT_TRUE(paths.wants_small_segments("0"));
  EXPECT_FALSE(paths.wants_small_segments(std::to_string(NarrowPaths::kHostsMax)));
}

}  // namespace
}  // namespace echoline::overlay
