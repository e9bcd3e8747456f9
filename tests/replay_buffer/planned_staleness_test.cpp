// The plan's worst staleness against a fleet under the ledger's own pacing: never exceeded, and reached.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/random.hpp"
#include "provisioner/capacity.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::replay_buffer {
namespace {

struct Fleet {
  std::int64_t step_time, broadcast_time;  // T and T_b, in ticks
  std::vector<std::int64_t> group_time;    // of each worker
  std::uint32_t budget, lookahead, publish_every, groups_per_step;
};

// The age in steps of the oldest group trained on. Groups have one rollout, and the learner takes the oldest, like the
// buffer.
std::uint64_t simulated_age_max(const Fleet& fleet, std::uint64_t steps) {
  struct Group {
    std::uint64_t version, number;
    std::int64_t done_at;
    auto key() const { return std::pair(version, number); }
  };
  const Pacing pacing{.staleness = {.budget = fleet.budget, .publish_every = 1, .lookahead = fleet.lookahead},
                      .trajectories_per_step = fleet.groups_per_step};
  std::vector<Group> stock;  // under way, waiting, or in the batch that is trained on
  std::vector<std::int64_t> free_at(fleet.group_time.size(), 0);
  std::vector<std::pair<std::int64_t, std::uint64_t>> published{{-fleet.broadcast_time, 0}};
  std::uint64_t step = 0, next_number = 0, age_max = 0;
  std::uint64_t batch = 0;  // number of groups in training, which stand first in `stock`
  std::int64_t trained_at = 0;
  for (std::int64_t now = 0; step < steps; ++now) {
    if (batch > 0 && now >= trained_at) {
      stock.erase(stock.begin(), stock.begin() + static_cast<std::ptrdiff_t>(batch));
      batch = 0;
      if (++step % fleet.publish_every == 0) published.emplace_back(now, step);
    }
    if (batch == 0) {
      const auto waiting =
          std::stable_partition(stock.begin(), stock.end(), [&](const Group& g) { return g.done_at <= now; });
      if (waiting - stock.begin() >= fleet.groups_per_step) {
        std::sort(stock.begin(), waiting, [](const Group& a, const Group& b) { return a.key() < b.key(); });
        batch = fleet.groups_per_step;
        trained_at = now + fleet.step_time;
        age_max = std::max(age_max, step - stock.front().version);
      }
    }
    for (std::size_t worker = 0; worker < free_at.size(); ++worker) {
      if (free_at[worker] > now) continue;
      std::uint64_t version = 0;
      for (const auto& [published_at, published_version] : published)
        if (published_at + fleet.broadcast_time <= now) version = published_version;
      if (room(pacing, step, Version{version}, stock.size()) == 0) continue;
      free_at[worker] = now + fleet.group_time[worker];
      stock.push_back({version, next_number++, free_at[worker]});
    }
  }
  return age_max;
}

std::uint64_t planned_age_max(const Fleet& fleet, bool all_equal) {
  const auto [fastest, slowest] = std::minmax_element(fleet.group_time.begin(), fleet.group_time.end());
  const int lag =
      provisioner::staleness_lag(std::chrono::seconds(fleet.step_time), std::chrono::seconds(fleet.broadcast_time),
                                 std::chrono::seconds(all_equal ? 0 : *slowest - *fastest));
  return staleness_worst(fleet.budget, fleet.publish_every, fleet.lookahead, static_cast<std::uint32_t>(lag));
}

TEST(PlannedStaleness, IsNeverExceededAndAFleetOfEqualsReachesIt) {
  int equals = 0, reached = 0, overtaken = 0;
  Random random(7);
  for (int round = 0; round < 400; ++round) {
    Fleet fleet{};
    fleet.step_time = random.between(4, 20);
    fleet.broadcast_time = random.between(0, 3 * fleet.step_time);
    fleet.budget = 1000;
    fleet.lookahead = static_cast<std::uint32_t>(random.below(5));
    fleet.publish_every = static_cast<std::uint32_t>(1 + random.below(4));
    fleet.groups_per_step = static_cast<std::uint32_t>(1 + random.below(6));
    const bool equal = random.below(2) == 0;
    // Fast enough to keep the stock full.
    fleet.group_time.assign(2 * fleet.groups_per_step,
                            random.between(1, std::max<std::int64_t>(1, fleet.step_time / 2)));
    if (!equal) fleet.group_time.push_back(fleet.group_time.front() + random.between(1, 8 * fleet.step_time));
    const std::uint64_t age_max = simulated_age_max(fleet, 120), planned_max = planned_age_max(fleet, false);
    EXPECT_LE(age_max, planned_max) << "T " << fleet.step_time << " T_b " << fleet.broadcast_time << " L "
                                    << fleet.lookahead << " kappa " << fleet.publish_every << " R "
                                    << fleet.groups_per_step << " g " << fleet.group_time.front() << " to "
                                    << fleet.group_time.back();
    equals += equal;
    reached += equal && age_max == planned_max;
    overtaken += age_max > planned_age_max(fleet, true);
  }
  EXPECT_GT(reached, equals / 2);
  EXPECT_GT(overtaken, 0);  // what a slow worker adds is real
}

}  // namespace
}  // namespace echoline::replay_buffer
