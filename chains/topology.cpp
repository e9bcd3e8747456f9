// Lookups in a topology, and its text forms. A topology has one or several sets of chains of workers (stripes); each
// stripe carries a share of the payload. A graft attaches a chain to a worker of another chain.
#include "chains/topology.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace echoline::chains {

std::string_view to_string(TopologyPolicy policy) {
  switch (policy) {
    case TopologyPolicy::kEcho2:
      return "echo2";
    case TopologyPolicy::kBestChains:
      return "best_chains";
    case TopologyPolicy::kStar:
      return "star";
    case TopologyPolicy::kStripes:
      return "stripes";
    case TopologyPolicy::kTrees:
      return "trees";
    case TopologyPolicy::kAuto:
      return "auto";
  }
  return "?";
}

Result<TopologyPolicy> parse_topology_policy(std::string_view text) {
  for (const TopologyPolicy policy : {TopologyPolicy::kEcho2, TopologyPolicy::kBestChains, TopologyPolicy::kStar,
                                      TopologyPolicy::kStripes, TopologyPolicy::kTrees, TopologyPolicy::kAuto})
    if (text == to_string(policy)) return policy;
  return fail(Code::kInvalid, "topology policy",
              "expected auto, echo2, best_chains, star, stripes or trees, found '{}'", text);
}

std::size_t Topology::size() const {
  std::size_t total = 0;
  for (const auto& chain : chains) total += chain.size();
  return total;
}

// Searches the first stripe only, because every stripe contains every worker.
bool Topology::contains(WorkerId id) const {
  return std::any_of(chains.begin(), chains.end(),
                     [&](const auto& chain) { return std::find(chain.begin(), chain.end(), id) != chain.end(); });
}

// Only chains that a worker feeds have an entry in `grafts`; the learner feeds the others.
WorkerId Topology::parent_of_chain(std::size_t s, WorkerId first) const {
  if (s >= grafts.size()) return kLearnerId;
  const auto it = grafts[s].find(first);
  return it == grafts[s].end() ? kLearnerId : it->second;
}

std::vector<WorkerId> Topology::children_of(WorkerId id) const {
  std::vector<WorkerId> children;
  for (std::size_t s = 0; s < stripes(); ++s)
    for (const auto& chain : stripe(s)) {
      if (parent_of_chain(s, chain.front()) == id) children.push_back(chain.front());
      const auto it = std::find(chain.begin(), chain.end(), id);
      if (it != chain.end() && it + 1 != chain.end()) children.push_back(*(it + 1));
    }
  if (stripes() > 1) {
    std::sort(children.begin(), children.end());
    children.erase(std::unique(children.begin(), children.end()), children.end());
  }
  return children;
}

double Topology::copies_sent_by(WorkerId id) const {
  std::size_t edges = 0;                          // each carries one stripe, an equal part of the payload
  for (const auto& [child, parents] : parents())  // the parent in each stripe
    edges += static_cast<std::size_t>(std::count(parents.begin(), parents.end(), id));
  return static_cast<double>(edges) / stripes();
}

std::size_t Topology::depth() const {
  std::size_t deepest = 0;
  for (std::size_t s = 0; s < stripes(); ++s) {
    // The depth of each worker that feeds a chain; 0 until the loop below visits the worker. It is visited before the
    // chain that it feeds, because its own chain comes earlier in the list.
    std::unordered_map<WorkerId, std::size_t> depths;
    if (s < grafts.size())
      for (const auto& [first, parent] : grafts[s]) depths[parent] = 0;
    for (const auto& chain : stripe(s)) {
      const WorkerId parent = parent_of_chain(s, chain.front());
      std::size_t hops = parent == kLearnerId ? 0 : depths[parent];
      for (const WorkerId id : chain) {
        ++hops;
        if (const auto it = depths.find(id); it != depths.end()) it->second = hops;
      }
      deepest = std::max(deepest, hops);
    }
  }
  return deepest;
}

std::map<WorkerId, std::vector<WorkerId>> Topology::parents() const {
  std::map<WorkerId, std::vector<WorkerId>> all;
  for (std::size_t s = 0; s < stripes(); ++s)
    for (const auto& chain : stripe(s)) {
      WorkerId parent = parent_of_chain(s, chain.front());
      for (const WorkerId id : chain) {
        all[id].push_back(parent);
        parent = id;
      }
    }
  return all;
}

std::vector<WorkerId> Topology::workers() const {
  std::vector<WorkerId> all;
  for (const auto& chain : chains) all.insert(all.end(), chain.begin(), chain.end());
  std::sort(all.begin(), all.end());
  return all;
}

std::string Topology::to_text() const {
  std::string text;
  for (std::size_t s = 0; s < stripes(); ++s) text += (s > 0 ? " || " : "") + stripe_text(s);
  return text;
}

std::string Topology::to_short_text() const {
  if (stripes() == 1) return to_text();
  return fmt::format("{} stripes, at most {} hops; the first: {}", stripes(), depth(), stripe_text(0));
}

std::string Topology::stripe_text(std::size_t s) const {
  std::string text;
  for (const auto& chain : stripe(s)) {
    const WorkerId parent = parent_of_chain(s, chain.front());
    if (!text.empty()) text += " | ";
    text += parent == kLearnerId ? "learner" : fmt::format("{}", parent);
    for (const WorkerId id : chain) text += fmt::format(" -> {}", id);
  }
  return text;
}

}  // namespace echoline::chains
