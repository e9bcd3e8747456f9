// The first 500 seeds of the soak test, half of them here; `echoline sim soak` runs any number.
#include "sim/soak.hpp"

#include <gtest/gtest.h>

#include "base/log.hpp"

namespace echoline::sim {
namespace {

constexpr std::uint64_t kSeeds = 250, kTwice = 10, kFirst = 1 + (SOAK_HALF - 1) * kSeeds;

TEST(Soak, NothingIsEverViolated) {
  log::configure(log::Level::kOff, "simulation");
  SoakOptions options;
  options.first = kFirst;
  options.seeds = kSeeds;
  options.twice = kTwice;
  const SoakSummary summary = run_soak(options, [](std::uint64_t, const SoakResult& result) {
    for (const Violation& v : result.violations)
      ADD_FAILURE() << "seed " << result.seed << " at " << seconds(v.at.time_since_epoch()) << " s (" << v.rule
                    << "): " << v.text << "\n  " << result.scenario
                    << "\n  replay: echoline sim soak --seeds 1 --first " << result.seed << " --trace";
    return result.violations.empty() || !GTEST_FLAG_GET(fail_fast);
  });
  if (HasFailure()) return;
  EXPECT_EQ(summary.seeds, kSeeds);
  EXPECT_TRUE(summary.failures.empty());
  // It was not idle.
  EXPECT_GT(summary.activations, 10 * kSeeds);
  EXPECT_GT(summary.intrusions, kSeeds / 5);
  EXPECT_GT(summary.floods, kSeeds / 50);
  EXPECT_GT(summary.timed, kSeeds / 2);
  std::printf("%llu seeds, %llu events, %llu chunks, %llu activations, %.0f s of virtual time, %.3f s of CPU a seed\n",
              static_cast<unsigned long long>(summary.seeds), static_cast<unsigned long long>(summary.events),
              static_cast<unsigned long long>(summary.chunks), static_cast<unsigned long long>(summary.activations),
              seconds(summary.virtual_time), summary.cpu_seconds / static_cast<double>(summary.seeds));
}

}  // namespace
}  // namespace echoline::sim
