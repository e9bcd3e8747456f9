#include "chains/regions.hpp"

#include <algorithm>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/push_relabel_max_flow.hpp>
#include <cmath>

#include "base/result.hpp"

namespace echoline::chains {
namespace {

using Traits = boost::adjacency_list_traits<boost::vecS, boost::vecS, boost::directedS>;
using Flow = long long;  // bit/s
using Graph = boost::adjacency_list<
    boost::vecS, boost::vecS, boost::directedS, boost::no_property,
    boost::property<boost::edge_capacity_t, Flow,
                    boost::property<boost::edge_residual_capacity_t, Flow,
                                    boost::property<boost::edge_reverse_t, Traits::edge_descriptor>>>>;

// Rounded up, so that an upper bound stays one.
Flow whole(BitRate rate) { return static_cast<Flow>(std::ceil(std::clamp(rate.bits_per_s, 0.0, 1e15))); }

void connect(Graph& graph, std::size_t from, std::size_t to, Flow capacity) {
  const auto there = boost::add_edge(from, to, graph).first, back = boost::add_edge(to, from, graph).first;
  put(boost::edge_capacity, graph, there, capacity);
  put(boost::edge_capacity, graph, back, 0);
  put(boost::edge_reverse, graph, there, back);
  put(boost::edge_reverse, graph, back, there);
}

}  // namespace

std::vector<BitRate> inflow(const Regions& regions, BitRate learner_up, std::span<const BitRate> up) {
  const std::size_t n = up.size();
  ECHO_CHECK(regions.learner < n && (!regions.several() || regions.ways.size() == n));
  std::vector<BitRate> into(n, learner_up);
  if (!regions.several()) return into;
  // A region has two vertices: its input, and the output of its workers. The learner is a further vertex that feeds its
  // own region's.
  Graph graph(2 * n + 1);
  const std::size_t learner = 2 * n;
  const auto in = [](std::size_t region) { return 2 * region; };
  const auto out = [](std::size_t region) { return 2 * region + 1; };
  connect(graph, learner, in(regions.learner), whole(learner_up));
  connect(graph, learner, out(regions.learner), whole(learner_up));
  for (std::size_t a = 0; a < n; ++a) {
    connect(graph, in(a), out(a), whole(up[a]));
    for (std::size_t b = 0; b < n; ++b) {
      if (a == b) continue;
      const Flow carried = whole(regions.ways[a][b].rate);
      if (carried == 0) continue;
      connect(graph, out(a), in(b), carried);
    }
  }
  for (std::size_t region = 0; region < n; ++region) {
    if (region == regions.learner) continue;
    const double flow = static_cast<double>(boost::push_relabel_max_flow(graph, learner, in(region)));
    into[region] = std::min(learner_up, BitRate{flow});
  }
  return into;
}

BitRate delivered(const Regions& regions, std::span<const BitRate> up, std::span<const BitRate> taken) {
  const std::size_t n = up.size(), sent = 2 * n, received = 2 * n + 1;
  Graph graph(2 * n + 2);
  for (std::size_t a = 0; a < n; ++a) {
    connect(graph, sent, a, whole(up[a]));
    connect(graph, n + a, received, whole(taken[a]));
    for (std::size_t b = 0; b < n; ++b) connect(graph, a, n + b, whole(std::min(up[a], regions.rate(a, b))));
  }
  return {static_cast<double>(boost::push_relabel_max_flow(graph, sent, received))};
}

Lending lend(const Regions& regions, std::span<const double> spare, std::span<const double> through,
             const std::vector<std::vector<double>>& taken) {
  const std::size_t n = spare.size(), lenders = 2 * n, needs = 2 * n + 1;
  Graph graph(2 * n + 2);
  const auto in = [](std::size_t region) { return 2 * region; };
  const auto out = [](std::size_t region) { return 2 * region + 1; };
  for (std::size_t a = 0; a < n; ++a) {
    if (spare[a] > 0) connect(graph, lenders, out(a), whole({spare[a]}));
    if (spare[a] < 0) connect(graph, in(a), needs, whole({-spare[a]}));
    connect(graph, in(a), out(a), whole({through[a]}));
    for (std::size_t b = 0; b < n; ++b)
      if (a != b) connect(graph, out(a), in(b), whole({regions.rate(a, b).bits_per_s - taken[a][b]}));
  }
  Lending found{static_cast<double>(boost::push_relabel_max_flow(graph, lenders, needs)),
                {n, std::vector<double>(n, 0)}};
  for (std::size_t a = 0; a < n; ++a)
    for (const auto& edge : boost::make_iterator_range(boost::out_edges(out(a), graph)))
      if (const Flow flow = get(boost::edge_capacity, graph, edge) - get(boost::edge_residual_capacity, graph, edge);
          flow > 0)
        found.over[a][boost::target(edge, graph) / 2] = static_cast<double>(flow);
  return found;
}

}  // namespace echoline::chains
