// Trees over several regions. A payload crosses once between two regions if the region's workers can forward it among
// themselves. In every stripe one worker of a region is the relay: it receives from another region, and the others
// receive from it.
#pragma once
#include <span>
#include <vector>

#include "chains/regions.hpp"
#include "chains/topology.hpp"

namespace echoline::chains {

// Whether relays are needed: some worker is not in the learner's region.
bool spread_out(std::span<const ChainWorker> workers, const Regions& regions);

// The route of one stripe: for each region the region that feeds its relay, and the regions in the order in which they
// are reached, the learner's first.
struct RelayPaths {
  std::vector<std::uint32_t> from;   // by region; for the learner's and empty regions: the learner's
  std::vector<std::uint32_t> order;  // regions with workers or the learner
};

struct RelayPlan {
  std::vector<RelayPaths> stripes;
  std::vector<bool> late;          // by worker (trees.hpp)
  std::vector<BitRate> rates;      // by worker: receiving rate
  std::vector<BitRate> by_region;  // receiving rate of the workers in time
  // [from][to] by region: bit/s over this link, to relays and other workers, all stripes together.
  std::vector<std::vector<double>> crossing;
};

struct RelayTrees {
  RelayPlan plan;
  Topology topology;  // chains, grafts and policy
  BitRate rate;       // steady_rate() of the topology
};

// Finds max-min fair rates of the regions. All rates rise together until a region is limited: by its uplinks plus the
// surplus of other regions (lend()), or by the links to it. The other rates rise further. Each stripe uses the links
// with most capacity left. Requires spread_out() and regions that plan_chains() accepts.
RelayTrees plan_relays(BitRate learner_up, std::span<const ChainWorker> workers, double quorum, const Regions& regions);

}  // namespace echoline::chains
