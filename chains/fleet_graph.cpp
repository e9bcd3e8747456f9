// Checks and draws topologies, for tests, the learner and `echoline plan`. A topology splits a payload into stripes and
// arranges all workers in chains for each stripe. Each chain is attached to the learner or to a worker of a chain
// before it.
#include "chains/fleet_graph.hpp"

#include <algorithm>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/graphviz.hpp>
#include <map>
#include <sstream>

namespace echoline::chains {
namespace {

constexpr std::string_view kOperation = "validate topology";

std::string name_of(WorkerId id) { return id == kLearnerId ? "the learner" : fmt::format("worker {}", id); }

}  // namespace

std::vector<Edge> edges_of(const Topology& topology, std::size_t stripe) {
  std::vector<Edge> edges;
  for (const auto& chain : topology.stripe(stripe)) {
    if (chain.empty()) continue;
    WorkerId from = topology.parent_of_chain(stripe, chain.front());
    for (const WorkerId to : chain) {
      edges.push_back({from, to});
      from = to;
    }
  }
  return edges;
}

Status validate(const Topology& topology, std::span<const WorkerId> workers) {
  std::vector<WorkerId> sorted_workers(workers.begin(), workers.end());
  std::sort(sorted_workers.begin(), sorted_workers.end());
  if (const auto twice = std::adjacent_find(sorted_workers.begin(), sorted_workers.end());
      twice != sorted_workers.end())
    return fail(Code::kInternal, kOperation, "{} is listed twice", name_of(*twice));
  const std::size_t not_a_worker = sorted_workers.size();  // stands for the index of the learner or of an unknown id
  const auto index_of = [&](WorkerId id) {
    const auto it = std::lower_bound(sorted_workers.begin(), sorted_workers.end(), id);
    return it == sorted_workers.end() || *it != id ? not_a_worker
                                                   : static_cast<std::size_t>(it - sorted_workers.begin());
  };
  for (std::size_t s = 0; s < topology.stripes(); ++s) {
    std::vector<bool> placed(sorted_workers.size()), has_child(sorted_workers.size());
    for (const auto& chain : topology.stripe(s)) {
      if (chain.empty()) return fail(Code::kInternal, kOperation, "a chain is empty");
      const WorkerId chain_parent = topology.parent_of_chain(s, chain.front());
      std::size_t parent = chain_parent == kLearnerId ? not_a_worker : index_of(chain_parent);  // of the next worker
      if (chain_parent != kLearnerId && (parent == not_a_worker || !placed[parent]))
        return fail(Code::kInternal, kOperation, "the chain of {} is attached to {}, which does not come before it",
                    name_of(chain.front()), name_of(chain_parent));
      for (const WorkerId id : chain) {
        const std::size_t worker = index_of(id);
        if (worker == not_a_worker)
          return fail(Code::kInternal, kOperation, "{} is not a worker of this fleet", name_of(id));
        if (placed[worker]) return fail(Code::kInternal, kOperation, "{} has 2 parents, expected one", name_of(id));
        placed[worker] = true;
        if (parent != not_a_worker) {
          if (topology.policy != TopologyPolicy::kTrees && has_child[parent])
            return fail(Code::kInternal, kOperation, "{} has two children in one stripe",
                        name_of(sorted_workers[parent]));
          if (std::binary_search(topology.leaves_only.begin(), topology.leaves_only.end(), sorted_workers[parent]))
            return fail(Code::kInternal, kOperation, "{} may not forward but feeds {}", name_of(sorted_workers[parent]),
                        name_of(id));
          has_child[parent] = true;
        }
        parent = worker;
      }
    }
    if (const auto missing = std::find(placed.begin(), placed.end(), false); missing != placed.end())
      return fail(Code::kInternal, kOperation, "{} has no parent",
                  name_of(sorted_workers[static_cast<std::size_t>(missing - placed.begin())]));
  }
  return ok();
}

std::string to_dot(const Topology& topology, const std::function<std::string(WorkerId)>& label) {
  using Drawing = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, WorkerId, std::size_t>;
  Drawing drawing;
  std::map<WorkerId, std::size_t> vertex_of{{kLearnerId, boost::add_vertex(kLearnerId, drawing)}};
  for (const WorkerId id : topology.workers()) vertex_of[id] = boost::add_vertex(id, drawing);
  std::map<std::pair<WorkerId, WorkerId>, std::size_t> stripes_per_edge;
  for (std::size_t s = 0; s < topology.stripes(); ++s)
    for (const Edge& edge : edges_of(topology, s)) ++stripes_per_edge[{edge.from, edge.to}];
  for (const auto& [edge, count] : stripes_per_edge)
    boost::add_edge(vertex_of.at(edge.first), vertex_of.at(edge.second), count, drawing);

  const auto& workers_without_children = topology.leaves_only;  // ascending
  const auto write_vertex = [&](std::ostream& out, std::size_t vertex) {
    const WorkerId id = drawing[vertex];
    const std::string label_text = label(id), name = id == kLearnerId ? "learner" : fmt::format("{}", id);
    // escape_dot_string() adds quotes, and leaves the \n as Graphviz's sign for a new line.
    out << "[label=" << boost::escape_dot_string(label_text.empty() ? name : name + "\\n" + label_text);
    if (id == kLearnerId) out << ", shape=doubleoctagon";
    if (std::binary_search(workers_without_children.begin(), workers_without_children.end(), id))
      out << ", style=dashed";
    out << "]";
  };
  const auto write_edge = [&](std::ostream& out, const Drawing::edge_descriptor& edge) {
    if (topology.stripes() > 1) out << "[label=\"" << drawing[edge] << "/" << topology.stripes() << "\"]";
  };
  const auto write_graph = [](std::ostream& out) { out << "rankdir=LR;\nnode [shape=box];\n"; };
  std::ostringstream out;
  boost::write_graphviz(out, drawing, write_vertex, write_edge, write_graph);
  return out.str();
}

}  // namespace echoline::chains
