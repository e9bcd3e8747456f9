// Who forwards policy chunks to whom: chains that start at the learner.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline::chains {

// echo2: m = floor(B / b) chains in score order. best_chains: the m that maximises the full-payload rate for
// unequal uplinks. star: the learner serves everybody.
enum class TopologyPolicy { kEcho2, kBestChains, kStar };

std::string_view to_string(TopologyPolicy policy);
Result<TopologyPolicy> parse_topology_policy(std::string_view text);  // "echo2" | "best_chains" | "star"

// A worker as the planner sees it.
struct ChainWorker {
  WorkerId id;
  BitRate up;               // what it can send to one child
  BitRate down;             // what it can receive
  double score = 0;         // peer_score(); higher stands nearer to the learner
  bool may_forward = true;  // false: receives only (Role::kRolloutOnly)
  bool may_seed = true;     // false: placed behind every worker that may (Role::kTail)
};

// Every worker stands in exactly one chain; the first of a chain (the seed) receives from the learner and each
// other one from the worker before it. A worker has at most one child.
struct Topology {
  TopologyPolicy policy = TopologyPolicy::kEcho2;
  std::size_t chains_wanted = 1;              // m: a joiner starts a new chain while there are fewer
  std::vector<std::vector<WorkerId>> chains;  // none is empty
  std::vector<WorkerId> leaves_only;          // workers that must not be given a child; ascending

  std::size_t size() const;
  bool contains(WorkerId id) const;
  // kLearnerId for a seed; absent for the learner and for unknown workers.
  std::optional<WorkerId> parent_of(WorkerId id) const;
  // Seeds for the learner, at most one worker for a worker; empty for unknown ids.
  std::vector<WorkerId> children_of(WorkerId id) const;
  // Hops from the learner: 1 for a seed; absent for unknown workers.
  std::optional<std::size_t> depth_of(WorkerId id) const;
  // Longest chain.
  std::size_t depth() const;
  // All workers, ascending.
  std::vector<WorkerId> workers() const;
  // "learner -> 1 -> 4 | learner -> 2 -> 5"
  std::string to_text() const;

  friend bool operator==(const Topology&, const Topology&) = default;
};

}  // namespace echoline::chains
