#include "chains/fleet_graph.hpp"

#include <algorithm>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/breadth_first_search.hpp>
#include <boost/graph/graphviz.hpp>
#include <map>
#include <set>
#include <sstream>

namespace echoline::chains {
namespace {

constexpr std::string_view kOperation = "validate topology";
using Graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::bidirectionalS>;

std::string name_of(WorkerId id) { return id == kLearnerId ? "the learner" : fmt::format("worker {}", id); }

}  // namespace

std::vector<Edge> edges_of(const Topology& topology, std::size_t stripe) {
  std::vector<Edge> edges;
  for (const auto& chain : topology.stripe(stripe)) {
    if (chain.empty()) continue;
    WorkerId from = topology.root_of(stripe, chain.front());
    for (const WorkerId to : chain) {
      edges.push_back({from, to});
      from = to;
    }
  }
  return edges;
}

Status validate_tree(std::span<const Edge> edges, std::span<const WorkerId> workers) {
  std::map<WorkerId, std::size_t> vertex_of{{kLearnerId, 0}};
  for (const WorkerId id : workers)
    if (!vertex_of.emplace(id, vertex_of.size()).second)
      return fail(Code::kInternal, kOperation, "{} is listed twice", name_of(id));

  Graph graph(vertex_of.size());
  for (const Edge& edge : edges) {
    const auto from = vertex_of.find(edge.from);
    const auto to = vertex_of.find(edge.to);
    if (from == vertex_of.end() || to == vertex_of.end())
      return fail(Code::kInternal, kOperation, "{} is not a worker of this fleet",
                  name_of(from == vertex_of.end() ? edge.from : edge.to));
    boost::add_edge(from->second, to->second, graph);
  }
  // With one parent each and none for the learner, being reachable excludes cycles.
  for (const auto& [id, vertex] : vertex_of) {
    const std::size_t parents = boost::in_degree(vertex, graph);
    if (id == kLearnerId && parents != 0)
      return fail(Code::kInternal, kOperation, "the learner must not receive from a worker");
    if (id != kLearnerId && parents == 0) return fail(Code::kInternal, kOperation, "{} has no parent", name_of(id));
    if (parents > 1) return fail(Code::kInternal, kOperation, "{} has {} parents, expected one", name_of(id), parents);
  }
  std::vector<boost::default_color_type> color(vertex_of.size(), boost::white_color);
  boost::breadth_first_search(
      graph, 0, boost::color_map(boost::make_iterator_property_map(color.begin(), get(boost::vertex_index, graph))));
  for (const auto& [id, vertex] : vertex_of)
    if (color[vertex] == boost::white_color)
      return fail(Code::kInternal, kOperation, "{} is on or behind a cycle, cut off from the learner", name_of(id));
  return ok();
}

Status validate(const Topology& topology, std::span<const WorkerId> workers) {
  for (std::size_t s = 0; s < topology.stripes(); ++s) {
    std::set<WorkerId> placed{kLearnerId};
    for (const auto& chain : topology.stripe(s)) {
      if (chain.empty()) return fail(Code::kInternal, kOperation, "a chain is empty");
      if (const WorkerId root = topology.root_of(s, chain.front()); !placed.contains(root))
        return fail(Code::kInternal, kOperation, "the chain of {} hangs on {}, who does not stand before it",
                    name_of(chain.front()), name_of(root));
      placed.insert(chain.begin(), chain.end());
    }
    const std::vector<Edge> edges = edges_of(topology, s);
    ECHO_TRY(validate_tree(edges, workers));
    if (topology.policy != TopologyPolicy::kTrees) {
      std::set<WorkerId> feeding;
      for (const Edge& edge : edges)
        if (edge.from != kLearnerId && !feeding.insert(edge.from).second)
          return fail(Code::kInternal, kOperation, "{} has two children in one stripe", name_of(edge.from));
    }
    for (const Edge& edge : edges)
      if (std::binary_search(topology.leaves_only.begin(), topology.leaves_only.end(), edge.from))
        return fail(Code::kInternal, kOperation, "{} may not forward but feeds {}", name_of(edge.from),
                    name_of(edge.to));
  }
  return ok();
}

std::string to_dot(const Topology& topology, const std::function<std::string(WorkerId)>& label) {
  using Drawing = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, WorkerId, std::size_t>;
  Drawing drawing;
  std::map<WorkerId, std::size_t> vertex_of{{kLearnerId, boost::add_vertex(kLearnerId, drawing)}};
  for (const WorkerId id : topology.workers()) vertex_of[id] = boost::add_vertex(id, drawing);
  std::map<std::pair<WorkerId, WorkerId>, std::size_t> stripes;
  for (std::size_t s = 0; s < topology.stripes(); ++s)
    for (const Edge& edge : edges_of(topology, s)) ++stripes[{edge.from, edge.to}];
  for (const auto& [edge, count] : stripes)
    boost::add_edge(vertex_of.at(edge.first), vertex_of.at(edge.second), count, drawing);

  const auto& leaves = topology.leaves_only;
  const auto worker = [&](std::ostream& out, std::size_t vertex) {
    const WorkerId id = drawing[vertex];
    const std::string more = label(id), name = id == kLearnerId ? "learner" : fmt::format("{}", id);
    out << "[label=" << boost::escape_dot_string(more.empty() ? name : name + "\\n" + more);
    if (id == kLearnerId) out << ", shape=doubleoctagon";
    if (std::binary_search(leaves.begin(), leaves.end(), id)) out << ", style=dashed";
    out << "]";
  };
  const auto sends = [&](std::ostream& out, const Drawing::edge_descriptor& edge) {
    if (topology.stripes() > 1) out << "[label=\"" << drawing[edge] << "/" << topology.stripes() << "\"]";
  };
  const auto page = [](std::ostream& out) { out << "rankdir=LR;\nnode [shape=box];\n"; };
  std::ostringstream out;
  boost::write_graphviz(out, drawing, worker, sends, page);
  return out.str();
}

}  // namespace echoline::chains
