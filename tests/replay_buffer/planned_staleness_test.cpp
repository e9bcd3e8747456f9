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
  std::int64_t step_time, arrival;       // T and T_b, in ticks
  std::vector<std::int64_t> group_time;  // of each worker
  std::uint32_t budget, lookahead, publish_every, groups_per_step;
};

// The age in steps of the oldest group trained on. Groups have one rollout, and the learner takes the oldest, like the
// buffer.
std::uint64_t simulated_age_max(const Fleet& f, std::uint64_t steps) {
  struct Group {
    std::uint64_t version, number;
    std::int64_t done_at;
    auto key() const { return std::pair(version, number); }
  };
  const Pacing pacing{{f.budget, 1, f.lookahead}, f.groups_per_step};
  std::vector<Group> stock;  // under way, waiting, or in the batch that is trained on
  std::vector<std::int64_t> free_at(f.group_time.size(), 0);
  std::vector<std::pair<std::int64_t, std::uint64_t>> published{{-f.arrival, 0}};
  std::uint64_t step = 0, next_number = 0, age_max = 0;
  std::uint64_t batch = 0;  // number of groups in training, which stand first in `stock`
  std::int64_t trained_at = 0;
  for (std::int64_t now = 0; step < steps; ++now) {
    if (batch > 0 && now >= trained_at) {
      stock.erase(stock.begin(), stock.begin() + static_cast<std::ptrdiff_t>(batch));
      batch = 0;
      if (++step % f.publish_every == 0) published.emplace_back(now, step);
    }
    if (batch == 0) {
      const auto waiting =
          std::stable_partition(stock.begin(), stock.end(), [&](const Group& g) { return g.done_at <= now; });
      if (waiting - stock.begin() >= f.groups_per_step) {
        std::sort(stock.begin(), waiting, [](const Group& a, const Group& b) { return a.key() < b.key(); });
        batch = f.groups_per_step;
        trained_at = now + f.step_time;
        age_max = std::max(age_max, step - stock.front().version);
      }
    }
    for (std::size_t w = 0; w < free_at.size(); ++w) {
      if (free_at[w] > now) continue;
      std::uint64_t version = 0;
      for (const auto& [at, v] : published)
        if (at + f.arrival <= now) version = v;
      if (room(pacing, step, Version{version}, stock.size()) == 0) continue;
      free_at[w] = now + f.group_time[w];
      stock.push_back({version, next_number++, free_at[w]});
    }
  }
  return age_max;
}

std::uint64_t planned_age_max(const Fleet& f, bool all_equal) {
  const auto [fastest, slowest] = std::minmax_element(f.group_time.begin(), f.group_time.end());
  const int lag = provisioner::staleness_lag(std::chrono::seconds(f.step_time), std::chrono::seconds(f.arrival),
                                             std::chrono::seconds(all_equal ? 0 : *slowest - *fastest));
  return staleness_worst(f.budget, f.publish_every, f.lookahead, static_cast<std::uint32_t>(lag));
}

TEST(PlannedStaleness, IsNeverExceededAndAFleetOfEqualsReachesIt) {
  int equals = 0, reached = 0, overtaken = 0;
  Random random(7);
  for (int round = 0; round < 400; ++round) {
    Fleet f{};
    f.step_time = random.between(4, 20);
    f.arrival = random.between(0, 3 * f.step_time);
    f.budget = 1000;
    f.lookahead = static_cast<std::uint32_t>(random.below(5));
    f.publish_every = static_cast<std::uint32_t>(1 + random.below(4));
    f.groups_per_step = static_cast<std::uint32_t>(1 + random.below(6));
    const bool equal = random.below(2) == 0;
    // Fast enough to keep the stock full.
    f.group_time.assign(2 * f.groups_per_step, random.between(1, std::max<std::int64_t>(1, f.step_time / 2)));
    if (!equal) f.group_time.push_back(f.group_time.front() + random.between(1, 8 * f.step_time));
    const std::uint64_t age_max = simulated_age_max(f, 120), planned_max = planned_age_max(f, false);
    EXPECT_LE(age_max, planned_max) << "T " << f.step_time << " T_b " << f.arrival << " L " << f.lookahead << " kappa "
                                    << f.publish_every << " R " << f.groups_per_step << " g " << f.group_time.front()
                                    << " to " << f.group_time.back();
    equals += equal;
    reached += equal && age_max == planned_max;
    overtaken += age_max > planned_age_max(f, true);
  }
  EXPECT_GT(reached, equals / 2);
  EXPECT_GT(overtaken, 0);  // what a slow worker adds is real
}

}  // namespace
}  // namespace echoline::replay_buffer
