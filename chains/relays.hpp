// Trees over several regions. A payload enters a region only once if the region's workers can forward it among
// themselves. In every stripe (a share of the payload with its own trees) one worker of a region is the relay. It
// receives from another region, and the region's other workers receive from it, directly or through each other.
#pragma once
#include <span>
#include <vector>

#include "chains/regions.hpp"
#include "chains/topology.hpp"

namespace echoline::chains {

// Whether some worker is not in the learner's region, so that relays are needed.
bool spans_regions(std::span<const ChainWorker> workers, const Regions& regions);

// The route of one stripe from region to region.
struct RegionRoute {
  // By region: the region that feeds its relay. For the learner's region and for regions without workers: the learner's
  // region.
  std::vector<std::uint32_t> feeding_region;
  // Regions with workers or the learner, in the order in which the route reaches them, the learner's first.
  std::vector<std::uint32_t> order;
};

// The result of plan_relays(). A worker is "late" if its downlink is too slow for the trees that are planned, otherwise
// "in time" (trees.hpp).
struct RelayPlan {
  std::vector<RegionRoute> routes;    // by stripe
  std::vector<bool> is_late;          // by worker
  std::vector<BitRate> worker_rates;  // by worker: receiving rate
  std::vector<BitRate> region_rates;  // by region: receiving rate of those of its workers that are in time
  // Load of the links between regions, [from][to]: bit/s of all stripes, to relays and other workers.
  std::vector<std::vector<double>> link_load;
};

struct RelayTrees {
  RelayPlan plan;
  Topology topology;  // only policy, chains, further_stripes and grafts are set
  BitRate rate;       // steady_rate() of the topology
};

// Selects the late workers and the number of stripes, and plans trees for max-min fair rates of the regions: all rates
// rise together until a region is limited, and the other rates rise further. A region is limited by the links to it,
// and by its own and borrowed uplink: workers of a region with spare uplink also send to workers of other regions
// (plan_lending()). Each stripe uses the links with most capacity left. The late workers and the number of stripes are
// those with which the fraction `quorum` of the workers holds a payload soonest. If no trees reach the fair rates,
// lower rates are tried, and the trees with which the quorum receives fastest are returned. Requires spans_regions()
// and regions that plan_chains() accepts.
RelayTrees plan_relays(BitRate learner_up, std::span<const ChainWorker> workers, double quorum, const Regions& regions);

}  // namespace echoline::chains
