// Predicts how long a broadcast of a payload over a topology takes. Used by choose_topology(), the capacity planner and
// predictions in reports.
#include "chains/broadcast_model.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <optional>
#include <utility>

#include "chains/fleet_graph.hpp"

namespace echoline::chains {
namespace {

constexpr std::string_view kOperation = "predict broadcast";
// lower_bound() stops when a round raises the bound by less than this factor: 0.01 % is less than the model's error.
constexpr double kBoundGrowthMin = 1.0001;
// best_chunk() assumes this rate if the bound on the time is 0, as it is without workers.
constexpr double kUnlimitedBytesPerS = 1e12;

double as_double(Bytes b) { return static_cast<double>(b.count); }

// The rate and one-way delay from one node to the next.
struct Hop {
  BitRate rate;
  Duration delay{};
};

// A payload's path over successive hops. A hop sends one chunk after another, each in the time size / rate. The last
// chunk, which may be shorter, crosses a hop after it has crossed the previous hop and all full chunks have crossed
// this one. (A flow shop: the chunks are its jobs, the hops its machines.)
class PayloadPath {
 public:
  PayloadPath(Bytes payload, Bytes chunk_size)
      : chunks_(chunk_count(payload, chunk_size)), full_chunk_bytes_(as_double(chunk_size)) {
    if (chunks_ > 0) last_chunk_bytes_ = as_double(payload) - full_chunk_bytes_ * static_cast<double>(chunks_ - 1);
  }

  // Adds a hop. Returns the seconds until its receiver holds the whole payload.
  double add_hop(const Hop& hop) {
    const double rate = hop.rate.bytes_per_s();
    ECHO_CHECK(rate > 0, "a hop has rate {}", rate);
    if (chunks_ == 0) return 0;
    const double full_chunk_s = full_chunk_bytes_ / rate;
    full_chunk_sum_s_ += full_chunk_s;
    slowest_hop_s_ = std::max(slowest_hop_s_, full_chunk_s);
    delay_sum_s_ += seconds(hop.delay);
    // The time until all full chunks have arrived. The last chunk counts as not full, so `chunks_ - 1` are full: the
    // first one passes every hop, the other `chunks_ - 2` follow at the pace of the slowest hop.
    const double full_chunks_s =
        chunks_ > 1 ? full_chunk_sum_s_ + static_cast<double>(chunks_ - 2) * slowest_hop_s_ : 0;
    last_chunk_s_ = std::max(last_chunk_s_, full_chunks_s) + last_chunk_bytes_ / rate;
    return last_chunk_s_ + delay_sum_s_;
  }

 private:
  std::uint64_t chunks_;  // number of chunks
  double full_chunk_bytes_, last_chunk_bytes_ = 0;
  double full_chunk_sum_s_ = 0;  // sum over the hops so far of the time in which a full chunk crosses the hop
  double slowest_hop_s_ = 0;     // the longest of these times
  double last_chunk_s_ = 0;      // until the last chunk has passed the latest hop, without delays
  double delay_sum_s_ = 0;       // over the hops so far
};

// Divides `total` max-min fairly between receivers. Each takes at most its limit and leaves the rest of an even share
// to the other receivers. Returns the shares in the order of `limits`.
std::vector<double> fair_shares(double total, const std::vector<double>& limits) {
  std::vector<std::size_t> order(limits.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  // Receivers with low limits come first, so that the later ones divide what these leave.
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return limits[a] < limits[b]; });
  std::vector<double> shares(limits.size());
  std::size_t receivers_left = limits.size();
  for (const std::size_t i : order) {
    shares[i] = std::min(limits[i], total / static_cast<double>(receivers_left));
    total -= shares[i];
    --receivers_left;
  }
  return shares;
}

}  // namespace

std::size_t quorum_count(double q, std::size_t n) {
  constexpr double kRoundingError = 1e-9;  // by this much, rounding may raise q n above the exact integer
  ECHO_CHECK(q > 0 && q <= 1, "fraction {} of the workers", q);
  return static_cast<std::size_t>(std::max(1.0, std::ceil(q * static_cast<double>(n) - kRoundingError)));
}

Duration lower_bound(Bytes payload, BitRate learner_up, std::span<const WorkerLink> workers, double q,
                     const Regions& regions) {
  if (workers.empty()) return Duration{};
  // F, B, N and k of the formula in the header.
  const double f = as_double(payload), b = learner_up.bytes_per_s();
  const std::size_t n = workers.size(), k = quorum_count(q, n);
  // By region: the sum of its workers' uplinks. Without links there is one region.
  std::vector<BitRate> region_up(std::max<std::size_t>(1, regions.links.size()));
  const auto region_of = [&](const WorkerLink& w) { return regions.several() ? w.region : 0; };
  double sum_up = 0;
  for (const WorkerLink& w : workers) {
    sum_up += w.up.bytes_per_s();
    region_up.at(region_of(w)).bits_per_s += w.up.bits_per_s;
  }
  const std::vector<BitRate> region_inflow = inflow_max(regions, learner_up, region_up);
  std::vector<double> worker_down;
  for (const WorkerLink& w : workers)
    worker_down.push_back(std::min(w.down, region_inflow[region_of(w)]).bytes_per_s());
  const auto kth_fastest = worker_down.end() - static_cast<std::ptrdiff_t>(k);
  std::nth_element(worker_down.begin(), kth_fastest, worker_down.end());
  // The learner sends everything once; the k-th fastest worker receives it; all uplinks together send k copies.
  double bound = std::max({f / b, f / *kth_fastest, static_cast<double>(k) * f / (b + sum_up)});
  if (!regions.several()) return from_seconds(bound);
  // In a time of `bound`, a worker receives at the rate f / bound. Raises the bound until the links between regions can
  // deliver k times that rate. No region takes more than its workers' downlinks.
  region_up[regions.learner_region].bits_per_s += learner_up.bits_per_s;  // the learner also sends from its region
  for (double previous_bound = 0; bound > previous_bound * kBoundGrowthMin;) {
    previous_bound = bound;
    const BitRate worker_rate = BitRate::from_bytes_per_s(f / bound);
    std::vector<BitRate> region_down(region_up.size());
    for (const WorkerLink& w : workers) region_down[w.region].bits_per_s += std::min(w.down, worker_rate).bits_per_s;
    const BitRate delivered_max = delivered_rate_max(regions, region_up, region_down);
    bound = std::max(bound, static_cast<double>(k) * f / delivered_max.bytes_per_s());
  }
  return from_seconds(bound);
}

std::uint64_t chunk_count(Bytes payload, Bytes chunk_size) {
  ECHO_CHECK(chunk_size.count > 0, "chunk size 0");
  return payload.count / chunk_size.count + (payload.count % chunk_size.count != 0);
}

Bytes best_chunk(Bytes payload, const Topology& topology, Duration bound) {
  const double f = as_double(payload);  // F of the header, as r is the rate
  const double rate = bound > Duration{} ? f / seconds(bound) : kUnlimitedBytesPerS;
  // h - 1: only the hops after the one from the learner add to the time of the first chunk. At least one hop counts,
  // because it is a divisor below.
  const double later_hops = static_cast<double>(std::max<std::size_t>(2, topology.depth()) - 1);
  // The sum in the header has its minimum where its derivative by c is 0.
  const double best =
      std::sqrt(f * (kChunkOverheadBytes + kChunkOverheadSeconds * rate) / (later_hops * topology.stripes()));
  // Rounds to the nearest power of two. The next power is nearer, as a ratio, from sqrt(2) times the present one on.
  std::uint64_t chunk_bytes = kBestChunkMin;
  while (chunk_bytes < kBestChunkMax && best > static_cast<double>(chunk_bytes) * std::numbers::sqrt2) chunk_bytes *= 2;
  return {chunk_bytes};
}

Duration BroadcastTimes::quorum_time(double q) const {
  if (workers.empty()) return Duration{};
  std::vector<Duration> times;
  for (const Completion& c : workers) times.push_back(c.time);
  const auto nth = times.begin() + static_cast<std::ptrdiff_t>(quorum_count(q, times.size())) - 1;
  std::nth_element(times.begin(), nth, times.end());
  return *nth;
}

Duration BroadcastTimes::time_of(WorkerId id) const {
  const auto it = std::lower_bound(workers.begin(), workers.end(), id, [](const auto& c, auto v) { return c.id < v; });
  ECHO_CHECK(it != workers.end() && it->id == id, "no worker {}", id);
  return it->time;
}

namespace {

// Numbers the nodes: the learner is 0, then the workers by ascending id.
class Nodes {
 public:
  explicit Nodes(std::span<const WorkerLink> links) : links_(links.begin(), links.end()) {
    std::stable_sort(links_.begin(), links_.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  }
  // Absent for workers without links.
  std::optional<std::size_t> find(WorkerId id) const {
    if (id == kLearnerId) return 0;
    const auto after =
        std::upper_bound(links_.begin(), links_.end(), id, [](auto v, const auto& l) { return v < l.id; });
    if (after == links_.begin() || (after - 1)->id != id) return std::nullopt;
    return static_cast<std::size_t>(after - links_.begin());  // the link's index plus 1, because node 0 is the learner
  }
  std::size_t size() const { return links_.size() + 1; }
  WorkerId id(std::size_t node) const { return node == 0 ? kLearnerId : links_[node - 1].id; }
  const WorkerLink& link(std::size_t worker_node) const { return links_[worker_node - 1]; }
  std::uint32_t region(std::size_t node, const Regions& regions) const {
    return node == 0 ? regions.learner_region : link(node).region;
  }

 private:
  std::vector<WorkerLink> links_;
};

// An edge of a stripe and its rate.
struct StripeEdge {
  std::size_t from, to;  // node numbers
  // bit/s: the part of the receiver's downlink for this stripe; less if a link between regions limits it.
  double rate_max;
  double rate = 0;  // bit/s
};

// Sets the edges' rates: shares each uplink among its edges, and then each link between regions. A second round gives a
// sender's other children what an inter-region link did not let through; a third would change little.
Status share_links(std::vector<StripeEdge>& stripe_edges, BitRate learner_up, const Nodes& nodes,
                   const Regions& regions) {
  // Indices in `stripe_edges`: by sending node, and by regions (from, to) with a limited link between them.
  std::vector<std::vector<std::size_t>> by_sender(nodes.size());
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<std::size_t>> by_region_pair;
  for (std::size_t i = 0; i < stripe_edges.size(); ++i) {
    by_sender[stripe_edges[i].from].push_back(i);
    if (!regions.several()) continue;
    const std::uint32_t from = nodes.region(stripe_edges[i].from, regions),
                        to = nodes.region(stripe_edges[i].to, regions);
    if (from != to && std::isfinite(regions.rate(from, to).bits_per_s)) by_region_pair[{from, to}].push_back(i);
  }
  // Shares `total` among the stripe edges of these indices; `limit` returns the most that an edge takes.
  std::vector<double> limits;
  const auto share = [&](double total, const std::vector<std::size_t>& edge_indices, const auto& limit) {
    limits.clear();
    for (const std::size_t i : edge_indices) limits.push_back(limit(stripe_edges[i]));
    return fair_shares(total, limits);
  };
  const auto share_uplinks = [&]() -> Status {
    for (std::size_t from = 0; from < by_sender.size(); ++from) {
      const std::vector<std::size_t>& edge_indices = by_sender[from];
      if (edge_indices.empty()) continue;
      const BitRate up = from == 0 ? learner_up : nodes.link(from).up;
      if (!(up.bits_per_s > 0))
        return fail(Code::kInvalid, kOperation, "worker {} sends at {} bit/s: the uplink of a parent must be positive",
                    nodes.id(from), up.bits_per_s);
      const std::vector<double> shares =
          share(up.bits_per_s, edge_indices, [](const StripeEdge& edge) { return edge.rate_max; });
      for (std::size_t k = 0; k < edge_indices.size(); ++k) stripe_edges[edge_indices[k]].rate = shares[k];
    }
    return ok();
  };
  ECHO_TRY(share_uplinks());
  if (by_region_pair.empty()) return ok();
  const auto share_region_links = [&] {
    for (const auto& [region_pair, edge_indices] : by_region_pair) {
      const std::vector<double> shares = share(regions.rate(region_pair.first, region_pair.second).bits_per_s,
                                               edge_indices, [](const StripeEdge& edge) { return edge.rate; });
      for (std::size_t k = 0; k < edge_indices.size(); ++k)  // the lower limit holds in the second round, too
        if (shares[k] < stripe_edges[edge_indices[k]].rate)
          stripe_edges[edge_indices[k]].rate = stripe_edges[edge_indices[k]].rate_max = shares[k];
    }
  };
  share_region_links();
  ECHO_TRY(share_uplinks());
  share_region_links();  // again, because the new shares of the uplinks may exceed a link
  return ok();
}

}  // namespace

Result<BroadcastTimes> broadcast_time(const Topology& topology, Bytes payload, Bytes chunk_size, BitRate learner_up,
                                      std::span<const WorkerLink> links, const Regions& regions) {
  if (chunk_size.count == 0) return fail(Code::kInvalid, kOperation, "the chunk size must be positive");
  if (!(learner_up.bits_per_s > 0)) return fail(Code::kInvalid, kOperation, "the learner's uplink must be positive");
  for (const WorkerLink& link : links)
    if (regions.several() && link.region >= regions.links.size())
      return fail(Code::kInvalid, kOperation, "worker {}: its region is {}, expected 0 to {}", link.id, link.region,
                  regions.links.size() - 1);
  const Nodes nodes(links);

  // A stripe is a share of the chunks that has its own paths. The edges of all stripes share a sender's uplink. A
  // payload with fewer chunks than stripes leaves some stripes empty; these are left out.
  const std::uint64_t chunk_total = chunk_count(payload, chunk_size);
  const std::size_t stripes = static_cast<std::size_t>(std::clamp<std::uint64_t>(chunk_total, 1, topology.stripes()));
  std::vector<StripeEdge> stripe_edges;  // stripe after stripe, each in the order of edges_of()
  std::vector<std::size_t> stripe_ends;  // by stripe: the index after its last edge
  for (std::size_t s = 0; s < stripes; ++s) {
    for (const Edge& edge : edges_of(topology, s)) {
      const auto from = nodes.find(edge.from), to = nodes.find(edge.to);
      if (!from || !to)
        return fail(Code::kInvalid, kOperation, "worker {} has no link rates", from ? edge.to : edge.from);
      const double down = nodes.link(*to).down.bits_per_s;
      if (!(down > 0))
        return fail(Code::kInvalid, kOperation, "worker {} receives at {} bit/s: its downlink must be positive",
                    edge.to, down);
      stripe_edges.push_back({.from = *from, .to = *to, .rate_max = down / static_cast<double>(stripes)});
    }
    stripe_ends.push_back(stripe_edges.size());
  }
  ECHO_TRY(share_links(stripe_edges, learner_up, nodes, regions));

  // Stripe s has the chunks s, s + stripes, ..., so the first stripes may have one more. The payload's last chunk may
  // be shorter.
  const auto stripe_bytes = [&](std::size_t s) {
    const std::uint64_t stripe_chunks = chunk_total / stripes + (s < chunk_total % stripes);
    const bool has_last_chunk = chunk_total > 0 && s == (chunk_total - 1) % stripes;
    const std::uint64_t missing_in_last = has_last_chunk ? chunk_total * chunk_size.count - payload.count : 0;
    return Bytes{stripe_chunks * chunk_size.count - missing_in_last};
  };
  // By node: when it holds all stripes so far; absent for nodes without a parent.
  std::vector<std::optional<Duration>> completion(nodes.size());
  for (std::size_t s = 0, edge_index = 0; s < stripes; ++s) {
    // One path per node. A parent comes before its children, so its path is complete when a child extends it.
    std::vector<PayloadPath> paths(nodes.size(), PayloadPath(stripe_bytes(s), chunk_size));
    for (; edge_index < stripe_ends[s]; ++edge_index) {
      const std::size_t from = stripe_edges[edge_index].from, to = stripe_edges[edge_index].to;
      const BitRate rate{stripe_edges[edge_index].rate};
      if (!(rate.bits_per_s > 0))
        return fail(Code::kInvalid, kOperation, "no capacity is left from {} to {}", nodes.id(from), nodes.id(to));
      const WorkerLink& link = nodes.link(to);
      const Duration delay = regions.delay(nodes.region(from, regions), link.region, link.delay);
      paths[to] = paths[from];
      const Duration stripe_time = from_seconds(paths[to].add_hop({.rate = rate, .delay = delay}));
      completion[to] = std::max(completion[to].value_or(Duration{}), stripe_time);
    }
  }
  BroadcastTimes times;
  for (std::size_t node = 1; node < nodes.size(); ++node)
    if (completion[node]) times.workers.push_back({nodes.id(node), *completion[node]});
  return times;
}

}  // namespace echoline::chains
