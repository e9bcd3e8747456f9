// Capacity rule and worst-case staleness, with the formulas' vectors.
#include "provisioner/capacity.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/random.hpp"

namespace echoline::provisioner {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;

constexpr CapacityTerms kEcho2{.rule = CapacityRule::kEcho2};

TEST(CapacityTarget, KnownCasesOfEcho2) {
  const auto a = capacity_target({512, 5, seconds(1200)}, {.broadcast = seconds(600)}, kEcho2);
  ASSERT_TRUE(a);
  EXPECT_NEAR(a->required_rollouts_per_s, 2560.0 / 5400, 1e-12);
  EXPECT_NEAR(a->required_rollouts_per_s, 0.474074, 1e-6);
  EXPECT_NEAR(a->provisioned_rollouts_per_s, 1.1 * 2560 / 5400, 1e-12);
  const auto b = capacity_target({128, 1, seconds(10)}, {}, {.rule = CapacityRule::kEcho2, .headroom = 0});
  ASSERT_TRUE(b);
  EXPECT_DOUBLE_EQ(b->required_rollouts_per_s, 12.8);
  EXPECT_DOUBLE_EQ(b->provisioned_rollouts_per_s, 12.8);
}

TEST(CapacityTarget, OverlapCountsTheInstallationAndTheBudget) {
  const LearnerPace pace{100, 1, seconds(10)};
  const auto required = [&](PublicationTimes times, std::optional<int> budget) {
    const auto target = capacity_target(pace, times, {.staleness_budget = budget});
    EXPECT_TRUE(target) << target.error().detail;
    return target ? target->required_rollouts_per_s : 0;
  };
  EXPECT_DOUBLE_EQ(required({.broadcast = seconds(9)}, {}), 10);
  EXPECT_DOUBLE_EQ(required({.broadcast = seconds(95)}, {}), 10) << "without S, any age";
  EXPECT_DOUBLE_EQ(required({.broadcast = seconds(9), .install = seconds(2)}, {}), 12.5);
  EXPECT_DOUBLE_EQ(required({.broadcast = seconds(9)}, 2), 10) << "two steps for the broadcast and a batch";
  EXPECT_DOUBLE_EQ(required({.broadcast = seconds(8)}, 1), 50) << "one step: 2 s of it are left";
  EXPECT_DOUBLE_EQ(required({.broadcast = seconds(15)}, 2), 20);
  EXPECT_DOUBLE_EQ(required({.broadcast = seconds(8)}, 0), 10) << "strictly on-policy: it waits by choice";
  const auto late = capacity_target(pace, {.broadcast = seconds(25)}, {.staleness_budget = 2});
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, Code::kInfeasible);
  EXPECT_THAT(late.error().detail, HasSubstr("Allow S = 3 or more"));
  EXPECT_TRUE(capacity_target(pace, {.broadcast = seconds(25)}, {.staleness_budget = 3}));
  const auto install = capacity_target(pace, {.broadcast = seconds(25), .install = seconds(12)}, {});
  ASSERT_FALSE(install);
  EXPECT_THAT(install.error().detail, HasSubstr("publish every 2 steps"));
}

TEST(CapacityTarget, WithTheRequiredCapacityTheNeededStalenessIsWithinTheBudget) {
  Random random(8);
  int limited = 0;
  for (int round = 0; round < 500; ++round) {
    const LearnerPace pace{static_cast<double>(random.between(1, 4000)), static_cast<int>(random.between(1, 6)),
                           std::chrono::milliseconds(random.between(1, 100000))};
    const int budget = pace.publish_every + static_cast<int>(random.between(0, 3));
    const auto share = [&](double most) {
      return Duration(static_cast<std::int64_t>(random.uniform() * most * static_cast<double>(pace.step_time.count())));
    };
    const PublicationTimes times{.broadcast = share(budget - pace.publish_every + 1), .install = share(0.1)};
    const CapacityTerms terms{.staleness_budget = budget, .headroom = 0};
    const auto target = capacity_target(pace, times, terms);
    ASSERT_TRUE(target);
    EXPECT_LE(needed_staleness(pace, times.broadcast, target->required_rollouts_per_s), budget) << round;
    limited += target->required_rollouts_per_s >
               capacity_target(pace, times, {.headroom = 0})->required_rollouts_per_s * (1 + 1e-9);
    const auto most = capacity_target(pace, half_of_longest_publication_times(pace, terms), terms);
    ASSERT_TRUE(most);
    EXPECT_LE(most->required_rollouts_per_s,
              2 * pace.rollouts_per_step / echoline::seconds(pace.step_time) * (1 + 1e-9));
  }
  EXPECT_GT(limited, 50);
}

TEST(CapacityTarget, InfeasibleNamesBothWaysOut) {
  const auto r = capacity_target({512, 1, seconds(1200)}, {.broadcast = seconds(1200)}, kEcho2);
  ASSERT_FALSE(r);
  EXPECT_EQ(r.error().code, Code::kInfeasible);
  EXPECT_THAT(r.error().detail, HasSubstr("publish every 2 steps"));
  EXPECT_THAT(r.error().detail, HasSubstr("below 20 min"));
  const auto s = capacity_target({512, 2, seconds(10)}, {.broadcast = seconds(59)}, kEcho2);
  ASSERT_FALSE(s);
  EXPECT_THAT(s.error().detail, HasSubstr("publish every 6 steps"));
  EXPECT_THAT(s.error().detail, HasSubstr("below 20 s"));
}

TEST(CapacityTarget, TheNamedWaysOutWork) {
  Random random(3);
  for (int round = 0; round < 200; ++round) {
    LearnerPace pace{64, static_cast<int>(random.between(1, 4)), std::chrono::milliseconds(random.between(1, 5000))};
    const Duration t_b = pace.publish_every * pace.step_time + std::chrono::milliseconds(random.between(0, 20000));
    const auto target = [&](Duration broadcast) { return capacity_target(pace, {.broadcast = broadcast}, kEcho2); };
    ASSERT_EQ(target(t_b).error().code, Code::kInfeasible);
    EXPECT_TRUE(target(pace.publish_every * pace.step_time - Duration(1)));
    pace.publish_every = static_cast<int>(t_b / pace.step_time + 1);
    EXPECT_TRUE(target(t_b));
    --pace.publish_every;
    EXPECT_FALSE(target(t_b));
  }
}

TEST(CapacityTarget, RefusesNonsense) {
  const auto code = [](LearnerPace pace, PublicationTimes times, double headroom) {
    const auto r = capacity_target(pace, times, {.headroom = headroom});
    return r ? Code::kInternal : r.error().code;
  };
  EXPECT_EQ(code({0, 1, seconds(1)}, {}, 0.1), Code::kInvalid);
  EXPECT_EQ(code({-5, 1, seconds(1)}, {}, 0.1), Code::kInvalid);
  EXPECT_EQ(code({1, 0, seconds(1)}, {}, 0.1), Code::kInvalid);
  EXPECT_EQ(code({1, 1, seconds(0)}, {}, 0.1), Code::kInvalid);
  EXPECT_EQ(code({1, 1, seconds(1)}, {.broadcast = seconds(-1)}, 0.1), Code::kInvalid);
  EXPECT_EQ(code({1, 1, seconds(1)}, {.install = seconds(-1)}, 0.1), Code::kInvalid);
  EXPECT_EQ(code({1, 1, seconds(1)}, {}, -0.1), Code::kInvalid);
}

TEST(Staleness, TheNeededStalenessFollowsFromTheBroadcastTime) {
  // k = ceil((100/20 + 3)/4) = 2.
  EXPECT_EQ(needed_staleness({100, 3, seconds(4)}, seconds(3), 20), 4);
  // Exactly one step is one step.
  EXPECT_EQ(needed_staleness({128, 1, seconds(10)}, seconds(0), 12.8), 1);
}

// Formulas, section 2: under overlap kappa + ceil((1 - 1/kappa) T_b/T) is always enough.
TEST(Staleness, AFleetThatMeetsTheRequirementNeedsNoMoreThanTheBound) {
  const auto bound = [](const LearnerPace& pace, Duration t_b) {
    const double share = 1.0 - 1.0 / pace.publish_every;
    return pace.publish_every +
           static_cast<int>(std::ceil(share * echoline::seconds(t_b) / echoline::seconds(pace.step_time) - 1e-9));
  };
  EXPECT_EQ(bound({1, 2, seconds(10)}, seconds(9)), 3);
  Random random(4);
  for (int round = 0; round < 500; ++round) {
    const LearnerPace pace{static_cast<double>(random.between(1, 4000)), static_cast<int>(random.between(1, 12)),
                           std::chrono::milliseconds(random.between(1, 100000))};
    const Duration t_b(static_cast<std::int64_t>(random.uniform() * 0.99 *
                                                 static_cast<double>((pace.publish_every * pace.step_time).count())));
    const auto target = capacity_target(pace, {.broadcast = t_b}, {.rule = CapacityRule::kEcho2, .headroom = 0});
    ASSERT_TRUE(target);
    const double fleet = target->required_rollouts_per_s * (1 + random.uniform());
    EXPECT_LE(needed_staleness(pace, t_b, fleet), bound(pace, t_b)) << "round " << round;
  }
}

TEST(Staleness, TheLagCountsVersionsInFlightAndOvertakenOnes) {
  EXPECT_EQ(staleness_lag(seconds(10), {}, {}), 0);
  EXPECT_EQ(staleness_lag(seconds(10), seconds(1), {}), 1);   // the version is on its way while its step trains
  EXPECT_EQ(staleness_lag(seconds(10), seconds(10), {}), 1);  // exactly one step is one step
  EXPECT_EQ(staleness_lag(seconds(10), seconds(11), {}), 2);
  EXPECT_EQ(staleness_lag(seconds(10), seconds(11), seconds(25)), 5);
  EXPECT_EQ(staleness_lag(Duration(1), Duration::max(), {}), 1'000'000);
}

TEST(Staleness, TheBudgetMustReachThePublicationPeriod) {
  EXPECT_TRUE(check_staleness_budget(4, 4));
  EXPECT_TRUE(check_staleness_budget(6, 5));
  EXPECT_TRUE(check_staleness_budget(0, 1));  // strictly on-policy
  const Status bad = check_staleness_budget(1, 3);
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().code, Code::kInvalid);
  EXPECT_THAT(bad.error().detail, HasSubstr("set S to 3"));
  EXPECT_THAT(bad.error().detail, HasSubstr("every 2 steps"));
}

}  // namespace
}  // namespace echoline::provisioner
