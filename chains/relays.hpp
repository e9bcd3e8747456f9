// Trees over several regions. Between two of them a payload crosses once where a region's workers can pass it on among
// themselves: in every stripe one of them is the relay, who has it from another region and whom the others have it
// from.
#pragma once
#include <span>
#include <vector>

#include "chains/regions.hpp"
#include "chains/topology.hpp"

namespace echoline::chains {

// Whether there is anything to relay: the workers and the learner do not all stand in one region.
bool spread_out(std::span<const ChainWorker> workers, const Regions& regions);

// How one stripe gets about: for every region where its relay is sent to from, and the regions in the order in which
// they are reached, the learner's first.
struct RelayPaths {
  std::vector<std::uint32_t> from;   // by region; the learner's and those without workers: the learner's
  std::vector<std::uint32_t> order;  // of those with somebody in them
};

struct RelayPlan {
  std::vector<RelayPaths> stripes;
  std::vector<bool> late;          // by worker (trees.hpp)
  std::vector<BitRate> rates;      // by worker: at which it receives
  std::vector<BitRate> by_region;  // at which those in time receive there
  std::vector<std::vector<double>>
      crossing;  // [from][to] by region: what goes over, to relays and others, all stripes together, bit/s
};

struct RelayTrees {
  RelayPlan plan;
  Topology topology;  // chains, grafts and policy
  BitRate rate;       // steady_rate() of it
};

// Max-min fair rates over the regions: all rise together until one's uplinks, with what the uplinks of others have to
// spare, serve no more (lend()), or the ways to it carry no more; then the others go on. Every stripe goes over the
// ways that have most left. Requires spread_out() and regions that plan_chains() takes.
RelayTrees plan_relays(BitRate learner_up, std::span<const ChainWorker> workers, double quorum, const Regions& regions);

}  // namespace echoline::chains
