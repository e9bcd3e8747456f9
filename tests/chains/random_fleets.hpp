// Random fleets for measuring topologies by formula: unequal links, and on request one worker with very slow ones.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/random.hpp"
#include "chains/choice.hpp"

namespace echoline::chains {

struct RandomFleet {
  BitRate learner_up = BitRate::from_mbit_per_s(100);
  std::vector<ChainWorker> workers;
  std::vector<WorkerLink> links;
  Regions regions;
};

// 2 to 100 workers with uplinks of 5 to 500 Mbit/s, log-uniform, and downlinks of one to ten times that. `straggler`:
// the last worker has 5 Mbit/s both ways. `scarce`: the learner has 20 to 1000 Mbit/s and downlinks never limit, so
// that in every other fleet the sum of all uplinks is the limit.
inline RandomFleet random_fleet(Random& random, bool straggler, bool scarce) {
  const auto spread = [&](double low, double high) { return low * std::pow(high / low, random.uniform()); };
  RandomFleet fleet;
  if (scarce) fleet.learner_up = BitRate::from_mbit_per_s(spread(20, 1000));
  for (std::uint64_t n = 2 + random.below(99), id = 1; id <= n; ++id) {
    double up = spread(5, 500), down = scarce ? 1000 : up * (1 + 9 * random.uniform());
    if (straggler && id == n) up = down = 5;
    const auto rate = BitRate::from_mbit_per_s;
    fleet.workers.push_back({.id = WorkerId{id}, .up = rate(up), .down = rate(down), .score = random.uniform()});
    fleet.links.push_back({.id = WorkerId{id}, .up = rate(up), .down = rate(down)});
  }
  return fleet;
}

// A random fleet in one to four regions. The links between regions have 50 to 2000 Mbit/s, log-uniform, and delays of
// 20 to 120 ms.
inline RandomFleet random_regions(Random& random, bool straggler, bool scarce) {
  RandomFleet fleet = random_fleet(random, straggler, scarce);
  const std::size_t n = 1 + random.below(4);
  if (n == 1) return fleet;
  fleet.regions.links.assign(n, std::vector<RegionLink>(n));
  for (std::size_t a = 0; a < n; ++a)
    for (std::size_t b = 0; b < n; ++b) {
      if (a != b) fleet.regions.links[a][b].rate = BitRate::from_mbit_per_s(50 * std::pow(40, random.uniform()));
      fleet.regions.links[a][b].delay = std::chrono::milliseconds(a == b ? 2 : 20 + random.below(100));
    }
  for (std::size_t i = 0; i < fleet.workers.size(); ++i)
    fleet.workers[i].region = fleet.links[i].region = static_cast<std::uint32_t>(random.below(n));
  return fleet;
}

// The broadcast time T_b until a fraction q of the workers holds the payload, divided by its lower bound; by formula.
// With `without_last`, the last worker does not count.
inline double time_over_bound(const RandomFleet& fleet, TopologyPolicy policy, double q, bool without_last) {
  const Bytes payload{1'000'000'000}, chunk{16 * 1024};
  const BitRate chain_rate = BitRate::from_mbit_per_s(50);
  const auto topology =
      policy == TopologyPolicy::kAuto
          ? choose_topology(fleet.learner_up, chain_rate, fleet.workers, fleet.links, {payload, chunk, q}, {},
                            fleet.regions)
                ->topology
          : plan_chains(fleet.learner_up, chain_rate, fleet.workers, policy, q, fleet.regions).value();
  auto times = broadcast_time(topology, payload, chunk, fleet.learner_up, fleet.links, fleet.regions);
  ECHO_CHECK(times.has_value());
  std::vector<WorkerLink> links = fleet.links;
  if (without_last) {
    times->workers.pop_back();
    links.pop_back();
  }
  return seconds(times->quorum_time(q)) / seconds(lower_bound(payload, fleet.learner_up, links, q, fleet.regions));
}

// The ratios over the given number of random fleets, ascending.
inline std::vector<double> times_over_bound(std::size_t fleets, TopologyPolicy policy, double q, bool straggler,
                                            bool scarce) {
  Random random(1);
  std::vector<double> ratios;
  for (std::size_t i = 0; i < fleets; ++i)
    ratios.push_back(time_over_bound(random_fleet(random, straggler, scarce), policy, q, straggler));
  std::sort(ratios.begin(), ratios.end());
  return ratios;
}

inline double quantile(const std::vector<double>& ascending, double q) {
  return ascending[static_cast<std::size_t>(q * static_cast<double>(ascending.size() - 1))];
}

}  // namespace echoline::chains
