#include "chains/apart.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

namespace echoline::chains {
namespace {

using Pairs = std::set<std::pair<WorkerId, WorkerId>>;

// The edges of one stripe, by worker.
struct Stripe {
  std::map<WorkerId, WorkerId> parent;
  std::map<WorkerId, std::vector<WorkerId>> children;
  std::map<WorkerId, std::size_t> depth;

  Stripe(const Topology& topology, std::size_t s) {
    for (const auto& chain : topology.stripe(s))
      for (std::size_t i = 0; i < chain.size(); ++i)
        parent[chain[i]] = i == 0 ? topology.root_of(s, chain[0]) : chain[i - 1];
    for (const auto& [id, of] : parent) children[of].push_back(id);
    std::vector<WorkerId> reached{kLearnerId};
    for (std::size_t k = 0; k < reached.size(); ++k)
      if (const auto of = children.find(reached[k]); of != children.end())
        for (const WorkerId id : of->second) {
          depth[id] = depth[reached[k]] + 1;
          reached.push_back(id);
        }
  }
  std::size_t children_of(WorkerId id) const {
    const auto it = children.find(id);
    return it == children.end() ? 0 : it->second.size();
  }
};

bool apart_of(const Pairs& apart, WorkerId a, WorkerId b) { return apart.contains(std::minmax(a, b)); }

void exchange(Topology& topology, std::size_t s, WorkerId a, WorkerId b) {
  const auto other = [&](WorkerId id) { return id == a ? b : id == b ? a : id; };
  for (auto& chain : topology.stripe(s))
    for (WorkerId& id : chain) id = other(id);
  if (s >= topology.grafts.size()) return;
  std::map<WorkerId, WorkerId> grafts;
  for (const auto& [first, root] : topology.grafts[s]) grafts[other(first)] = other(root);
  topology.grafts[s] = std::move(grafts);
}

// Whether `id`, in the place of `instead`, has no neighbour that it must be kept apart from.
bool suits(const Stripe& stripe, const Pairs& apart, WorkerId id, WorkerId instead) {
  const auto neighbour = [&](WorkerId at) { return at == id ? instead : at; };
  if (apart_of(apart, id, neighbour(stripe.parent.at(instead)))) return false;
  const auto children = stripe.children.find(instead);
  return children == stripe.children.end() ||
         std::none_of(children->second.begin(), children->second.end(),
                      [&](WorkerId child) { return apart_of(apart, id, neighbour(child)); });
}

// Takes the worker out of its place and attaches it to the learner, without children.
void fed_by_the_learner(Topology& topology, std::size_t s, WorkerId id, WorkerId parent) {
  Chains& chains = topology.stripe(s);
  std::map<WorkerId, WorkerId> none;
  auto& grafts = s < topology.grafts.size() ? topology.grafts[s] : none;
  const auto chain = std::find_if(chains.begin(), chains.end(),
                                  [&](const auto& c) { return std::find(c.begin(), c.end(), id) != c.end(); });
  if (chain->front() == id) {  // the first of its chain: the next worker takes its graft
    grafts.erase(id);
    if (chain->size() > 1) grafts[(*chain)[1]] = parent;
  }
  std::erase(*chain, id);
  if (chain->empty()) chains.erase(chain);
  for (auto& [first, root] : grafts)
    if (root == id) root = parent;
  chains.push_back({id});
}

// Separates the pairs of one stripe. Returns the number of moves.
std::size_t part_stripe(Topology& topology, std::size_t s, const Pairs& apart) {
  const auto may_forward = [&](WorkerId id) {
    return !std::binary_search(topology.leaves_only.begin(), topology.leaves_only.end(), id);
  };
  std::size_t moves = 0;
  Stripe stripe(topology, s);
  for (const auto& [a, b] : apart) {
    WorkerId child = a, parent = b;
    if (!stripe.parent.contains(a) || !stripe.parent.contains(b)) continue;
    if (stripe.parent.at(child) != parent) std::swap(child, parent);
    if (stripe.parent.at(child) != parent) continue;
    const std::size_t children = stripe.children_of(child);
    // The worker to exchange places with: its difference in the number of children, its depth, its id.
    std::optional<std::tuple<std::size_t, std::size_t, WorkerId>> best;
    for (const auto& [id, depth] : stripe.depth) {
      if (id == child || id == parent || depth < stripe.depth.at(child)) continue;
      const std::size_t n = stripe.children_of(id);
      if ((n > 0 && !may_forward(child)) || (children > 0 && !may_forward(id))) continue;
      if (!suits(stripe, apart, child, id) || !suits(stripe, apart, id, child)) continue;
      const std::tuple candidate{n > children ? n - children : children - n, depth, id};
      if (!best || candidate < *best) best = candidate;
    }
    if (best)
      exchange(topology, s, child, std::get<WorkerId>(*best));
    else
      fed_by_the_learner(topology, s, child, parent);
    stripe = Stripe(topology, s);
    ++moves;
  }
  return moves;
}

}  // namespace

Topology keep_apart(Topology topology, const Pairs& apart) {
  if (apart.empty()) return topology;
  // Children that move to another parent may have to be kept apart from that parent too, so repeat.
  const std::size_t rounds = 1 + apart.size();
  std::size_t changes = 1;
  for (std::size_t round = 0; round < rounds && std::exchange(changes, 0) > 0; ++round)
    for (std::size_t s = 0; s < topology.stripes(); ++s) changes += part_stripe(topology, s, apart);
  return topology;
}

}  // namespace echoline::chains
