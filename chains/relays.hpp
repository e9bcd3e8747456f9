// Trees over several regions. Between two of them a payload crosses once where a region's workers can pass it on among
// themselves: in every stripe one of them is the relay, who has it from another region and whom the others have it from.
#pragma once
#include <span>
#include <vector>

#include "chains/regions.hpp"
#include "chains/topology.hpp"

namespace echoline::chains {

// Whether there is anything to relay: the workers and the learner do not all stand in one region.
bool spread_out(std::span<const ChainWorker> workers, const Regions& regions);

// How one stripe gets about: for every region where its relay is sent to from, and the regions in the order in which they are
// reached, the learner's first.
struct RelayPaths {
  std::vector<std::uint32_t> from;   // by region; the learner's and those without workers: the learner's
  std::vector<std::uint32_t> order;  // of those with somebody in them
};

struct RelayPlan {
  std::vector<RelayPaths> stripes;
  std::vector<bool> late;         // by worker (trees.hpp)
  std::vector<BitRate> rates;     // by worker: at which it receives
  std::vector<BitRate> by_region;  // at which those in time receive there
  std::vector<BitRate> onward;    // by region: what goes from here to others, all stripes together
};

// Max-min fair rates over the regions: all rise together until one's uplinks, with what the uplinks of others have to spare,
// serve no more, or the ways to it carry no more; then the others go on. Every stripe goes over the ways that have most left.
// Requires spread_out() and regions that plan_chains() takes.
RelayPlan plan_relays(BitRate learner_up, std::span<const ChainWorker> workers, double quorum, const Regions& regions);

// Sets the chains of every stripe.
void build_relays(const RelayPlan& plan, BitRate learner_up, std::span<const ChainWorker> workers, const Regions& regions,
                  Topology& topology);

}  // namespace echoline::chains
