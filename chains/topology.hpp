// Who forwards policy chunks to whom: chains that start at the learner, or trees of chains.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline::chains {

// echo2: m = floor(B / b) chains in score order. best_chains: the m that maximises the full-payload rate for
// unequal uplinks. star: the learner serves everybody. stripes: several sets of chains, each for a share of the
// chunks, so that a fast worker forwards more shares than a slow one (formula 4.6 with one child per stripe). trees: as
// stripes, but a worker may have several children in one, so that it can send more than one copy (formula 4.6).
// auto: whichever of these brings a payload to a fleet soonest (choice.hpp); no topology has it.
enum class TopologyPolicy { kEcho2, kBestChains, kStar, kStripes, kTrees, kAuto };

std::string_view to_string(TopologyPolicy policy);
Result<TopologyPolicy> parse_topology_policy(std::string_view text);  // the names of the enumerators above

// A worker as the planner sees it.
struct ChainWorker {
  WorkerId id;
  BitRate up;                // what it can send to one child
  BitRate down;              // what it can receive
  double score = 0;          // peer_score(); higher stands nearer to the learner
  bool may_forward = true;   // false: receives only (Role::kRolloutOnly)
  bool may_seed = true;      // false: placed behind every worker that may (Role::kTail)
  std::uint32_t region = 0;  // of Regions::ways

  BitRate usable_up() const { return may_forward ? up : BitRate{0}; }
};

using Chains = std::vector<std::vector<WorkerId>>;

// Every worker stands in exactly one chain of every stripe; the first of a chain (the seed) receives from the learner
// and each other one from the worker before it. Only under trees may a chain hang on a worker of another chain instead,
// one that stands before it in the stripe; elsewhere a worker has at most one child in a stripe.
struct Topology {
  TopologyPolicy policy = TopologyPolicy::kEcho2;
  std::size_t chains_wanted = 1;      // m: a joiner starts a new chain while there are fewer
  Chains chains;                      // none is empty; of the first stripe
  std::vector<Chains> further;        // of the other stripes, if there are any
  std::vector<WorkerId> leaves_only;  // workers that must not be given a child; ascending
  // By stripe, the first of a chain -> the worker it hangs on. Who is not in it hangs on the learner.
  std::vector<std::map<WorkerId, WorkerId>> grafts;

  std::size_t size() const;
  bool contains(WorkerId id) const;
  // kLearnerId for a seed; absent for the learner and for unknown workers.
  std::optional<WorkerId> parent_of(WorkerId id) const;
  // Of all stripes, each once, ascending where there are several; empty for unknown ids.
  std::vector<WorkerId> children_of(WorkerId id) const;
  // How many whole payloads it sends, all stripes together.
  double copies_sent_by(WorkerId id) const;
  // Most hops from the learner, of all stripes.
  std::size_t depth() const;
  // A publication travels in so many stripes, each with parents of its own; a power of two.
  std::uint32_t stripes() const { return static_cast<std::uint32_t>(1 + further.size()); }
  // Whom a chain of this stripe hangs on, by its first worker.
  WorkerId root_of(std::size_t stripe, WorkerId first) const;
  const Chains& stripe(std::size_t s) const { return s == 0 ? chains : further[s - 1]; }
  Chains& stripe(std::size_t s) { return s == 0 ? chains : further[s - 1]; }
  // For every worker, whom it receives each stripe from.
  std::map<WorkerId, std::vector<WorkerId>> parents() const;
  // All workers, ascending.
  std::vector<WorkerId> workers() const;
  // "learner -> 1 -> 4 | learner -> 2 -> 5 | 2 -> 6"; stripes are told apart by " || "
  std::string to_text() const;
  // As much of it as one wants to look at: where there are several stripes, only the first.
  std::string to_short_text() const;
  std::string stripe_text(std::size_t s) const;

  friend bool operator==(const Topology&, const Topology&) = default;
};

}  // namespace echoline::chains
