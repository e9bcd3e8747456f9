// Rate bounds of regions (groups of workers, with limited links between them) as maximum flows, for lower_bound() and
// plan_relays().
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

// The limit makes infinite rates finite, and sums of flows fit in Flow.
constexpr double kFlowMax = 1e15;  // bit/s

// Rounds up, because a rate rounded down would not be an upper bound any more.
Flow to_flow(BitRate rate) { return static_cast<Flow>(std::ceil(std::clamp(rate.bits_per_s, 0.0, kFlowMax))); }

// Adds an edge, and the reverse edge that push-relabel needs.
void connect(Graph& graph, std::size_t from, std::size_t to, Flow capacity) {
  const auto edge = boost::add_edge(from, to, graph).first, reverse_edge = boost::add_edge(to, from, graph).first;
  put(boost::edge_capacity, graph, edge, capacity);
  put(boost::edge_capacity, graph, reverse_edge, 0);
  put(boost::edge_reverse, graph, edge, reverse_edge);
  put(boost::edge_reverse, graph, reverse_edge, edge);
}

}  // namespace

std::vector<BitRate> inflow_max(const Regions& regions, BitRate learner_up, std::span<const BitRate> region_up) {
  const std::size_t n = region_up.size();
  ECHO_CHECK(regions.learner_region < n && (!regions.several() || regions.links.size() == n));
  std::vector<BitRate> rates(n, learner_up);
  if (!regions.several()) return rates;
  // A region has two vertices: its input, and the output of its workers. The learner is one more vertex. It may send to
  // its region's workers, or directly to other regions. The capacity of each of these two edges is the learner's whole
  // uplink, so together they overestimate it; the result is limited to learner_up below.
  Graph graph(2 * n + 1);
  const std::size_t learner = 2 * n;
  const auto input_of = [](std::size_t region) { return 2 * region; };
  const auto output_of = [](std::size_t region) { return 2 * region + 1; };
  connect(graph, learner, input_of(regions.learner_region), to_flow(learner_up));
  connect(graph, learner, output_of(regions.learner_region), to_flow(learner_up));
  for (std::size_t a = 0; a < n; ++a) {
    connect(graph, input_of(a), output_of(a), to_flow(region_up[a]));
    for (std::size_t b = 0; b < n; ++b) {
      if (a == b) continue;
      const Flow capacity = to_flow(regions.links[a][b].rate);
      if (capacity == 0) continue;
      connect(graph, output_of(a), input_of(b), capacity);
    }
  }
  for (std::size_t region = 0; region < n; ++region) {
    if (region == regions.learner_region) continue;
    const double flow = static_cast<double>(boost::push_relabel_max_flow(graph, learner, input_of(region)));
    rates[region] = std::min(learner_up, BitRate{flow});
  }
  return rates;
}

BitRate delivered_rate_max(const Regions& regions, std::span<const BitRate> region_up,
                           std::span<const BitRate> region_down) {
  // A region has two vertices: its senders and its receivers.
  const std::size_t n = region_up.size(), source = 2 * n, sink = 2 * n + 1;
  Graph graph(2 * n + 2);
  for (std::size_t a = 0; a < n; ++a) {
    connect(graph, source, a, to_flow(region_up[a]));
    connect(graph, n + a, sink, to_flow(region_down[a]));
    // The minimum keeps capacities finite: within a region the rate is infinite.
    for (std::size_t b = 0; b < n; ++b) connect(graph, a, n + b, to_flow(std::min(region_up[a], regions.rate(a, b))));
  }
  return {static_cast<double>(boost::push_relabel_max_flow(graph, source, sink))};
}

Lending plan_lending(const Regions& regions, std::span<const double> spare, std::span<const double> forwardable,
                     const std::vector<std::vector<double>>& link_load) {
  // A region short of uplink borrows: another region sends for it. A region that borrows may itself send for a third
  // one, up to its `forwardable`. The flow goes from the surpluses (source) to the deficits (sink). A region has two
  // vertices: the uplink that it borrows, and the uplink that it lends.
  const std::size_t n = spare.size(), source = 2 * n, sink = 2 * n + 1;
  Graph graph(2 * n + 2);
  const auto borrowed_by = [](std::size_t region) { return 2 * region; };
  const auto lent_by = [](std::size_t region) { return 2 * region + 1; };
  for (std::size_t a = 0; a < n; ++a) {
    if (spare[a] > 0) connect(graph, source, lent_by(a), to_flow({spare[a]}));
    if (spare[a] < 0) connect(graph, borrowed_by(a), sink, to_flow({-spare[a]}));
    connect(graph, borrowed_by(a), lent_by(a), to_flow({forwardable[a]}));
    for (std::size_t b = 0; b < n; ++b) {
      const double free_capacity = regions.rate(a, b).bits_per_s - link_load[a][b];
      if (a != b) connect(graph, lent_by(a), borrowed_by(b), to_flow({free_capacity}));  // 0 if the link is overloaded
    }
  }
  Lending lending;
  lending.bits_per_s_total = static_cast<double>(boost::push_relabel_max_flow(graph, source, sink));
  lending.bits_per_s_by_link.assign(n, std::vector<double>(n, 0));
  // A flow leaves lent_by(a) only to a vertex borrowed_by(b), which is 2 b. Reverse edges have no positive flow.
  for (std::size_t a = 0; a < n; ++a)
    for (const auto& edge : boost::make_iterator_range(boost::out_edges(lent_by(a), graph)))
      if (const Flow flow = get(boost::edge_capacity, graph, edge) - get(boost::edge_residual_capacity, graph, edge);
          flow > 0)
        lending.bits_per_s_by_link[a][boost::target(edge, graph) / 2] = static_cast<double>(flow);
  return lending;
}

}  // namespace echoline::chains
