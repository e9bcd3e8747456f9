// The core of the fleet in hostile markets, and under a learner that is killed.
#include "sim/market.hpp"

#include <gtest/gtest.h>

namespace echoline::sim {
namespace {

TEST(Market, NothingIsForgottenOrOverspentInTwoThousandMarkets) {
  const MarketSummary s = simulate_markets(1, 2000);
  for (const MarketResult& r : s.failures) {
    ADD_FAILURE() << "seed " << r.seed << ": " << r.scenario << "\n  replay: echoline sim market --first " << r.seed
                  << " --trace";
    for (const MarketViolation& v : r.violations)
      ADD_FAILURE() << "  " << seconds(v.at) << " s (" << v.rule << "): " << v.text;
  }
  // The markets were hostile: machines were lost, and the learner was killed before and after every kind of action.
  EXPECT_GT(s.losses, s.seeds);
  for (std::size_t i = 0; i < s.restarts_at.size(); ++i)
    EXPECT_GT(s.restarts_at[i], 20u) << kMarketActions[i / 2] << (i % 2 == 0 ? ", before" : ", after");
  EXPECT_GT(s.drained, s.seeds / 2);
  // Most runs had their required capacity in the end. The others had used up their markets or their money.
  EXPECT_GT(s.restored, s.seeds * 3 / 4);
  EXPECT_GT(s.closed, 20u);
  std::printf("%lu actions, %lu rentals, %lu losses, %lu restarts; %lu restored, %lu exhausted, %lu out of money\n",
              s.actions, s.rentals, s.losses, s.restarts, s.restored, s.exhausted, s.closed);
}

// With little headroom, hosts that do almost what they promised leave the fleet slightly short of capacity.
TEST(Market, CapacityComesBackWhereHostsAreALittleSlow) {
  for (const std::uint64_t seed : {2046, 7309, 12364})
    for (const MarketViolation& v : simulate_market(seed).violations)
      ADD_FAILURE() << seed << " (" << v.rule << "): " << v.text;
}

// Hosts deceive one after the other. The fleet detects and replaces each, and capacity is back after the last.
TEST(Market, CapacityComesBackAfterTheLastDeceit) {
  for (const MarketViolation& v : simulate_market(757350).violations) ADD_FAILURE() << v.rule << ": " << v.text;
  EXPECT_TRUE(simulate_market(757350).restored);
}

// A start without an answer, of a machine whose price has risen above the limit meanwhile.
TEST(Market, AMachineAboveThePriceLimitIsReleasedWithoutAnAnswerToItsStart) {
  for (const std::uint64_t seed : {147288, 174813, 416061, 420358})
    for (const MarketViolation& v : simulate_market(seed).violations)
      ADD_FAILURE() << seed << " (" << v.rule << "): " << v.text;
}

TEST(Market, TheSameSeedDoesTheSame) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed)
    EXPECT_EQ(simulate_market(seed).trace_hash, simulate_market(seed).trace_hash) << seed;
}

}  // namespace
}  // namespace echoline::sim
