// The topology of a broadcast: chains of workers that start at the learner, or trees that consist of chains.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline::chains {

// echo2: m = floor(B / b) chains in score order, for the learner's uplink B and a rate b of one chain. best_chains: the
// m that maximises the full-payload rate for unequal uplinks. star: the learner serves all workers. stripes: several
// sets of chains, each for a share of the chunks, so that a fast worker forwards more shares than a slow one
// (stripes.hpp). trees: like stripes, but a worker may have several children in a stripe and so send more than one
// copy. auto: the fastest of these for a payload and a fleet (choice.hpp); no topology has this policy.
enum class TopologyPolicy { kEcho2, kBestChains, kStar, kStripes, kTrees, kAuto };

std::string_view to_string(TopologyPolicy policy);
Result<TopologyPolicy> parse_topology_policy(std::string_view text);  // the names of the enumerators above

// A worker with the properties that the planner uses.
struct ChainWorker {
  WorkerId id;
  BitRate up;                // uplink, for all children together
  BitRate down;              // downlink
  double score = 0;          // peer_score(); a higher score puts the worker nearer to the learner
  bool may_forward = true;   // false: receives only (Role::kRolloutOnly)
  bool may_seed = true;      // false: placed after all workers that may (Role::kTail)
  std::uint32_t region = 0;  // index in Regions::links

  BitRate forwarding_up() const { return may_forward ? up : BitRate{0}; }  // the uplink that the planner may use
};

using Chains = std::vector<std::vector<WorkerId>>;

// Each stripe contains each worker in exactly one chain. The first worker of a chain (the seed) receives from the
// learner, each other worker from its predecessor. So a worker has at most one child per stripe. There are
// two exceptions: under trees, and if the parent is a node of the trainer (sources.hpp), a chain's first worker
// receives from a worker of an earlier chain of the stripe. So that worker may have several children.
struct Topology {
  TopologyPolicy policy = TopologyPolicy::kEcho2;
  std::size_t chains_wanted = 1;        // m: a joiner starts a new chain while a stripe has fewer
  Chains chains;                        // of the first stripe only, see stripe(); no chain is empty
  std::vector<Chains> further_stripes;  // of the other stripes
  std::vector<WorkerId> leaves_only;    // workers that must not have children; ascending
  // Grafts: chains attached to a worker of another chain. By stripe: the chain's first worker -> its parent. Chains
  // without an entry start at the learner.
  std::vector<std::unordered_map<WorkerId, WorkerId>> grafts;

  std::size_t size() const;  // number of workers
  bool contains(WorkerId id) const;
  // Over all stripes, without repetition, ascending if there are several stripes; empty for unknown ids.
  std::vector<WorkerId> children_of(WorkerId id) const;
  // The amount of data that a worker (or the learner) sends in all stripes, as a number of payloads; may be a fraction.
  double copies_sent_by(WorkerId id) const;
  // The most hops from the learner in any stripe.
  std::size_t depth() const;
  // The number of stripes, a power of two; each has its own parents.
  std::uint32_t stripes() const { return static_cast<std::uint32_t>(1 + further_stripes.size()); }
  // The worker or learner that feeds the chain of this stripe whose first worker is `first`.
  WorkerId parent_of_chain(std::size_t stripe, WorkerId first) const;
  // The chains of stripe s, counted from 0.
  const Chains& stripe(std::size_t s) const { return s == 0 ? chains : further_stripes[s - 1]; }
  Chains& stripe(std::size_t s) { return s == 0 ? chains : further_stripes[s - 1]; }
  // By worker: its parent in each stripe.
  std::map<WorkerId, std::vector<WorkerId>> parents() const;
  // All workers, ascending.
  std::vector<WorkerId> workers() const;
  // Such as "learner -> 1 -> 4 | learner -> 2 -> 5 | 2 -> 6". " || " separates stripes.
  std::string to_text() const;
  // Like to_text(), but only the first of several stripes.
  std::string to_short_text() const;
  std::string stripe_text(std::size_t s) const;  // to_text() of one stripe

  friend bool operator==(const Topology&, const Topology&) = default;
};

}  // namespace echoline::chains
