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
    EXPECT_FALSE(paths.small(kHost));
    paths.stalled(kHost, false, proof);
    EXPECT_TRUE(paths.small(kHost));
    EXPECT_FALSE(paths.small("10.0.0.2"));
    const auto said = paths.passed(kHost, true);
    ASSERT_TRUE(said.has_value());
    EXPECT_THAT(*said, HasSubstr("the path to 10.0.0.1 swallows packets of 1500 bytes"));
    EXPECT_FALSE(paths.passed(kHost, true)) << "once is enough";
    paths.stalled(kHost, true, kSilent);
    EXPECT_TRUE(paths.small(kHost)) << "known for good";
  }
}

TEST(NarrowPaths, AStoppedPeerIsNoProof) {
  NarrowPaths paths;
  for (int i = 0; i < 4; ++i) {  // for 40 s, dialled every 5 s, and then it answers whatever comes
    EXPECT_FALSE(paths.small(kHost));
    paths.stalled(kHost, false, kSilent);
    EXPECT_TRUE(paths.small(kHost)) << "an attempt is free";
    if (i < 3) paths.stalled(kHost, true, kSilent);
  }
  EXPECT_FALSE(paths.passed(kHost, true));
  EXPECT_FALSE(paths.small(kHost));
  EXPECT_FALSE(paths.passed(kHost, false));
  // Lost bytes without later ones that arrive mean that the network is gone.
  paths.stalled(kHost, false, {1500, 5, 0, 0});
  EXPECT_FALSE(paths.passed(kHost, true));
}

// The last flight of a handshake may be too large as well. Then no small packet follows, but the sizes prove it.
TEST(NarrowPaths, SmallOnesAlwaysAndLargeOnesNeverIsProof) {
  NarrowPaths paths;
  paths.stalled(kHost, false, {9000, 5, 0, 0});
  EXPECT_FALSE(paths.passed(kHost, true));
  paths.stalled(kHost, false, {9000, 5, 0, 0});
  const auto said = paths.passed(kHost, true);
  ASSERT_TRUE(said.has_value());
  EXPECT_THAT(*said, HasSubstr("swallows packets of 9000 bytes"));
  EXPECT_TRUE(paths.small(kHost));
}

TEST(NarrowPaths, KnowsBoundedlyMany) {
  NarrowPaths paths;
  for (std::size_t i = 0; i < 2 * NarrowPaths::kHostsMax; ++i) paths.stalled(std::to_string(i), false, kSilent);
  EXPECT_TRUE(paths.small("0"));
  EXPECT_FALSE(paths.small(std::to_string(NarrowPaths::kHostsMax)));
}

}  // namespace
}  // namespace echoline::overlay
