// Moves workers of a finished topology so that the workers of given pairs are not parent and child. Called by the
// learner.
#include "chains/separation.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>

namespace echoline::chains {
namespace {

using Pairs = std::set<std::pair<WorkerId, WorkerId>>;

// The edges of one stripe (each stripe has its own chains over all workers), by worker.
struct Stripe {
  std::map<WorkerId, WorkerId> parent;
  std::map<WorkerId, std::vector<WorkerId>> children;
  std::map<WorkerId, std::size_t> depth;

  Stripe(const Topology& topology, std::size_t s) {
    for (const auto& chain : topology.stripe(s))
      for (std::size_t i = 0; i < chain.size(); ++i)
        parent[chain[i]] = i == 0 ? topology.parent_of_chain(s, chain[0]) : chain[i - 1];
    for (const auto& [id, parent_of_id] : parent) children[parent_of_id].push_back(id);
    // Breadth first from the learner, whose depth is 0.
    std::vector<WorkerId> reached{kLearnerId};
    for (std::size_t k = 0; k < reached.size(); ++k)
      if (const auto entry = children.find(reached[k]); entry != children.end())
        for (const WorkerId id : entry->second) {
          depth[id] = depth[reached[k]] + 1;
          reached.push_back(id);
        }
  }
  std::size_t child_count(WorkerId id) const {
    const auto it = children.find(id);
    return it == children.end() ? 0 : it->second.size();
  }
};

bool is_forbidden(const Pairs& forbidden_pairs, WorkerId a, WorkerId b) {
  return forbidden_pairs.contains(std::minmax(a, b));
}

// Exchanges the places of two workers in stripe `s`.
void swap_places(Topology& topology, std::size_t s, WorkerId a, WorkerId b) {
  const auto swapped = [&](WorkerId id) {
    if (id == a) return b;
    return id == b ? a : id;
  };
  for (auto& chain : topology.stripe(s))
    for (WorkerId& id : chain) id = swapped(id);
  // A graft names the worker that feeds a chain's first worker, if that is not the learner.
  if (s >= topology.grafts.size()) return;
  std::unordered_map<WorkerId, WorkerId> grafts;
  for (const auto& [first, feeder] : topology.grafts[s]) grafts[swapped(first)] = swapped(feeder);
  topology.grafts[s] = std::move(grafts);
}

// Whether `id`, after an exchange of places with `replaced`, is in no forbidden pair with its new parent or a new
// child.
bool may_replace(const Stripe& stripe, const Pairs& forbidden_pairs, WorkerId id, WorkerId replaced) {
  // If `id` is a neighbour of `replaced`, `replaced` will be where `id` is now.
  const auto after_exchange = [&](WorkerId neighbour) { return neighbour == id ? replaced : neighbour; };
  if (is_forbidden(forbidden_pairs, id, after_exchange(stripe.parent.at(replaced)))) return false;
  const auto children = stripe.children.find(replaced);
  return children == stripe.children.end() ||
         std::none_of(children->second.begin(), children->second.end(),
                      [&](WorkerId child) { return is_forbidden(forbidden_pairs, id, after_exchange(child)); });
}

// Attaches the worker to the learner, without children. Its children move to `parent`, which has been its own parent.
void attach_to_learner(Topology& topology, std::size_t s, WorkerId id, WorkerId parent) {
  Chains& chains = topology.stripe(s);
  std::unordered_map<WorkerId, WorkerId> no_grafts;  // stands in if the topology has none
  auto& grafts = s < topology.grafts.size() ? topology.grafts[s] : no_grafts;
  const auto chain = std::find_if(chains.begin(), chains.end(),
                                  [&](const auto& c) { return std::find(c.begin(), c.end(), id) != c.end(); });
  // If `id` begins its chain, `parent` now feeds the chain's next worker. Otherwise that worker follows its
  // predecessor.
  if (chain->front() == id) {
    grafts.erase(id);
    if (chain->size() > 1) grafts[(*chain)[1]] = parent;
  }
  std::erase(*chain, id);
  if (chain->empty()) chains.erase(chain);
  for (auto& [first, feeder] : grafts)
    if (feeder == id) feeder = parent;
  chains.push_back({id});
}

// Separates the pairs of one stripe. Returns the number of moves.
std::size_t separate_stripe(Topology& topology, std::size_t s, const Pairs& forbidden_pairs) {
  const auto may_forward = [&](WorkerId id) {
    return !std::binary_search(topology.leaves_only.begin(), topology.leaves_only.end(), id);
  };
  std::size_t moves = 0;
  Stripe stripe(topology, s);
  for (const auto& [a, b] : forbidden_pairs) {
    if (!stripe.parent.contains(a) || !stripe.parent.contains(b)) continue;  // not in the topology
    WorkerId child = a, parent = b;
    if (stripe.parent.at(child) != parent) std::swap(child, parent);
    if (stripe.parent.at(child) != parent) continue;  // neither is the other's parent
    const std::size_t child_count = stripe.child_count(child);
    // Selects the worker to exchange places with: the one whose number of children differs least from that of `child`;
    // of equals, the one nearest the learner; of these, the least id. Workers nearer than `child` are left out, because
    // an accusation must not bring the accuser nearer to the learner.
    std::optional<std::tuple<std::size_t, std::size_t, WorkerId>> best;  // difference, depth, id
    for (const auto& [id, depth] : stripe.depth) {
      if (id == child || id == parent || depth < stripe.depth.at(child)) continue;
      const std::size_t other_count = stripe.child_count(id);
      // A worker that may not forward cannot take a place with children.
      if ((other_count > 0 && !may_forward(child)) || (child_count > 0 && !may_forward(id))) continue;
      if (!may_replace(stripe, forbidden_pairs, child, id) || !may_replace(stripe, forbidden_pairs, id, child))
        continue;
      const std::size_t difference = std::max(other_count, child_count) - std::min(other_count, child_count);
      const std::tuple candidate{difference, depth, id};
      if (!best || candidate < *best) best = candidate;
    }
    if (best)
      swap_places(topology, s, child, std::get<WorkerId>(*best));
    else
      attach_to_learner(topology, s, child, parent);
    stripe = Stripe(topology, s);
    ++moves;
  }
  return moves;
}

}  // namespace

Topology separate_pairs(Topology topology, const Pairs& forbidden_pairs) {
  if (forbidden_pairs.empty()) return topology;
  // A child that has moved to another parent may be a forbidden pair with that parent too, so all stripes are checked
  // again. The bound is for moves that undo each other; some forbidden pairs may then remain.
  const std::size_t rounds_max = 1 + forbidden_pairs.size();
  for (std::size_t round = 0; round < rounds_max; ++round) {
    std::size_t moves = 0;
    for (std::size_t s = 0; s < topology.stripes(); ++s) moves += separate_stripe(topology, s, forbidden_pairs);
    if (moves == 0) break;
  }
  return topology;
}

}  // namespace echoline::chains
