// Measured link rates, and the estimates for offers from them.
#include "provisioner/links.hpp"

#include <gtest/gtest.h>

namespace echoline::provisioner {
namespace {

using std::chrono::milliseconds;

TEST(LinkMeter, TheBestSecondInWhichBytesKeptComing) {
  LinkMeter meter;
  TimePoint t{std::chrono::hours(1)};
  std::uint64_t total = 0;
  const auto beats = [&](int count, std::uint64_t bytes) {
    for (int i = 0; i < count; ++i) meter.add_reading({total += bytes}, t += milliseconds(500));
  };
  beats(4, 0);
  beats(2, 1'000'000);
  beats(1, 0);
  EXPECT_FALSE(meter.highest());  // half a second says nothing
  beats(4, 1'000'000);
  ASSERT_TRUE(meter.highest());
  EXPECT_NEAR(meter.highest()->bits_per_s, 16e6, 1);
  beats(1, 0);
  beats(10, 100'000);  // limited by the other end
  EXPECT_NEAR(meter.highest()->bits_per_s, 16e6, 1);
  beats(5, 3'000'000);
  EXPECT_GT(meter.highest()->bits_per_s, 16e6);
  EXPECT_LE(meter.highest()->bits_per_s, 48e6);
  const auto best = meter.highest();
  total = 0;  // its process restarted
  beats(1, 1'000);
  t += std::chrono::minutes(1);  // nothing was heard
  beats(1, 900'000'000);
  EXPECT_EQ(meter.highest(), best);
}

TEST(FillLinks, FillsOnlyUnstatedLinks) {
  std::vector<Offer> offers(4);
  for (Offer& o : offers) o.provider = "vast", o.host = "h1";
  offers[1].up = BitRate{1e6};
  offers[2].host = "h2";
  offers[3].provider = "local";
  const std::vector<KnownLinks> known{{"vast", "h1", BitRate{5e6}, std::nullopt},
                                      {"vast", "h1", BitRate{7e6}, BitRate{9e6}},
                                      {"vast", "", BitRate{1e9}, BitRate{1e9}},
                                      {"local", "h1", BitRate{1e9}, BitRate{1e9}}};
  fill_links(offers, known);
  EXPECT_EQ(offers[0].up, BitRate{7e6});
  EXPECT_EQ(offers[0].down, BitRate{9e6});
  EXPECT_EQ(offers[1].up, BitRate{1e6});
  EXPECT_EQ(offers[1].down, BitRate{9e6});
  EXPECT_FALSE(offers[2].up || offers[2].down || offers[3].up || offers[3].down);
}

}  // namespace
}  // namespace echoline::provisioner
