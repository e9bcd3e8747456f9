// Builds and repairs forwarding chains. Pure and deterministic: the same workers in any order give the same topology.
#pragma once
#include <span>

#include "chains/regions.hpp"
#include "chains/topology.hpp"

namespace echoline::chains {

inline constexpr std::size_t kChainWorkersMax = 16384;

// Plans chains over all `workers`. `learner_up` is B; `chain_rate` is b, the rate one chain should carry (echo2
// only). Workers that may not forward stand at tails; where there are more of them than chains, chains are added so
// that each still receives. `quorum`: trees are planned for the time until this part of the workers holds a payload,
// and who is too slow for it holds nobody back (trees.hpp); over several regions with relays (relays.hpp), while all
// other policies take no notice of where workers stand. Every result passes validate() (fleet_graph.hpp). No workers:
// no chains. Errors (kInvalid, naming the worker): id 0 or twice, a rate that is not positive, a score that is not
// finite, a region that is not there or that nothing gets to, more than kChainWorkersMax workers.
Result<Topology> plan_chains(BitRate learner_up, BitRate chain_rate, std::span<const ChainWorker> workers,
                             TopologyPolicy policy, double quorum = 1, const Regions& regions = {});

// m* = argmax over m of min(B/m, u_(m+1), d_min), uplinks ascending, u_(N+1) infinite; ties go to the larger m.
// Workers that may not forward count as uplink 0. Requires at least one worker.
std::size_t best_chain_count(BitRate learner_up, std::span<const ChainWorker> workers);

// Without `dead`: its children now receive from its parent; everybody else keeps their place. An unknown id changes
// nothing. Not for trees (checked), which mend_trees() repairs (trees.hpp).
Topology detach(const Topology& topology, WorkerId dead);

// With a late joiner: a new chain while there are fewer than chains_wanted (always under star), otherwise at the tail
// of the shortest chain whose tail may forward. Where none may, a forwarding joiner takes the place before the
// shortest chain's tail, and any other starts a chain. The joiner must not be in the topology yet, and the topology
// not trees (both checked).
Topology append(const Topology& topology, const ChainWorker& joiner);

}  // namespace echoline::chains
