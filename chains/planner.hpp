// Builds and repairs forwarding chains. Pure and deterministic: the same workers in any order give the same topology.
#pragma once
#include <span>

#include "chains/regions.hpp"
#include "chains/topology.hpp"

namespace echoline::chains {

inline constexpr std::size_t kChainWorkersMax = 16384;

// Plans chains over all `workers`. `learner_up` is the learner's uplink B; `chain_rate` is b, the rate of one chain,
// which only the policy echo2 uses. Workers that may not forward are placed at tails (ends of chains); chains are added
// if there are more such workers than chains. `quorum`: trees are planned for the time until this fraction of the
// workers holds a payload. Workers too slow for this become leaves, so that they delay no other worker (trees.hpp).
// Trees over several regions use relays (relays.hpp); other policies ignore regions. Results pass validate()
// (fleet_graph.hpp). Without workers there are no chains. Returns kInvalid for more than kChainWorkersMax workers and
// for invalid regions. Returns kInvalid and names the worker if its id is 0 or occurs twice, a rate is not positive,
// the score is not finite, or the region is unknown. `stripes`: for stripes and trees, exactly this number of stripes,
// a power of two; absent: the fewest that are about as fast as any.
Result<Topology> plan_chains(BitRate learner_up, BitRate chain_rate, std::span<const ChainWorker> workers,
                             TopologyPolicy policy, double quorum = 1, const Regions& regions = {},
                             std::optional<std::size_t> stripes = {});

// The number of chains with which the slowest worker receives fastest: argmax over m of min(B/m, u_(m+1), d_min). B is
// the learner's uplink, d_min the least downlink. The N workers' uplinks u_1, u_2, ... ascend, and u_(N+1) is infinite.
// Ties go to the larger m. Workers that may not forward count as uplink 0. Requires at least one worker.
std::size_t best_chain_count(BitRate learner_up, std::span<const ChainWorker> workers);

// Removes `dead`. Its children now receive from its parent; other workers keep their places. An unknown id changes
// nothing. The topology must not be trees (checked); repair_trees() repairs those (trees.hpp).
Topology remove_worker(const Topology& topology, WorkerId dead);

// Adds a joiner to every stripe: as a new chain while there are fewer than chains_wanted (always under star), otherwise
// at the end of the shortest chain whose tail may forward. If no tail may forward, a joiner that may forward is
// inserted before the shortest chain's tail, and any other joiner starts a chain. The joiner must not be in the
// topology yet, and the topology must not be trees (both checked).
Topology add_worker(const Topology& topology, const ChainWorker& joiner);

}  // namespace echoline::chains
