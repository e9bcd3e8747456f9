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

// The route of one stripe over the regions.
struct RelayPaths {
  // By region: the region that feeds its relay. For the learner's region and for empty ones: the learner's.
  std::vector<std::uint32_t> feeding_region;
  // Regions with workers or the learner, in the order in which the route reaches them, the learner's first.
  std::vector<std::uint32_t> order;
};

// The result of plan_relays(). A worker is "late" if its downlink is too slow for the trees that are planned, otherwise
// "in time" (trees.hpp).
struct RelayPlan {
  std::vector<RelayPaths> stripes;
  std::vector<bool> is_late;          // by worker
  std::vector<BitRate> worker_rates;  // by worker: receiving rate
  std::vector<BitRate> region_rates;  // by region: receiving rate of its workers in time
  // The load of the link from one region to another, [from][to]: bit/s of all stripes, to relays and other workers.
  std::vector<std::vector<double>> link_load;
};

struct RelayTrees {
  RelayPlan plan;
  Topology topology;  // only chains, grafts and policy are set
  BitRate rate;       // steady_rate() of the topology
};

// Finds max-min fair rates of the regions: all rates rise together until a region is limited, and the other rates rise
// further. Workers of a region with spare uplink also send to workers of other regions: these regions borrow uplink
// (plan_lending()). A region is limited by the links to it, or by its own and the borrowed uplink. Each stripe uses the
// links with most capacity left. `quorum`: the time until this fraction of the workers holds a payload is minimised. It
// decides which workers are late, and which of several plans is best. Requires spans_regions() and regions that
// plan_chains() accepts.
RelayTrees plan_relays(BitRate learner_up, std::span<const ChainWorker> workers, double quorum, const Regions& regions);

}  // namespace echoline::chains
