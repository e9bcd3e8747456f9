#include "chains/broadcast_model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace echoline::chains {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double as_double(Bytes b) { return static_cast<double>(b.count); }

// Completion time at every hop of one chain, in seconds. Chunks cross hops like jobs cross machines of a flow shop
// whose service times are chunk / rate, so the last chunk arrives after the longest path through (hop, chunk): full
// chunks up to hop j, where the slowest hop so far is passed by all of them, and the shorter last chunk from j on.
std::vector<double> hop_completions_s(Bytes payload, Bytes chunk, std::span<const Hop> hops) {
  const std::uint64_t chunks = chunk_count(payload, chunk);
  std::vector<double> times;
  if (chunks == 0) return std::vector<double>(hops.size(), 0.0);
  const double full = as_double(chunk);
  const double last = as_double(payload) - full * static_cast<double>(chunks - 1);
  double full_sum = 0;  // sum of c/r over the hops so far
  double slowest = 0;   // max of c/r over the hops so far
  double longest = 0;   // longest path so far to the last chunk at this hop, delays aside
  double delay = 0;
  for (const Hop& hop : hops) {
    const double rate = hop.rate.bytes_per_s();
    ECHO_CHECK(rate > 0, "a hop has rate {}", rate);
    full_sum += full / rate;
    slowest = std::max(slowest, full / rate);
    delay += seconds(hop.delay);
    const double via_full = chunks > 1 ? full_sum + static_cast<double>(chunks - 2) * slowest : 0;
    longest = std::max(longest, via_full) + last / rate;
    times.push_back(longest + delay);
  }
  return times;
}

// Max-min fair shares of `total` for receivers that take at most `wants`; same order.
std::vector<double> fair_shares(double total, const std::vector<double>& wants) {
  std::vector<std::size_t> order(wants.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return wants[a] < wants[b]; });
  std::vector<double> shares(wants.size());
  std::size_t left = wants.size();
  for (const std::size_t i : order) {
    shares[i] = std::min(wants[i], total / static_cast<double>(left));
    total -= shares[i];
    --left;
  }
  return shares;
}

}  // namespace

Duration lower_bound(Bytes payload, BitRate learner_up, std::span<const WorkerLink> workers) {
  if (workers.empty()) return Duration{};
  const double f = as_double(payload);
  const double b = learner_up.bytes_per_s();
  double sum_up = 0;
  double down_min = kInfinity;
  for (const WorkerLink& w : workers) {
    sum_up += w.up.bytes_per_s();
    down_min = std::min(down_min, w.down.bytes_per_s());
  }
  return from_seconds(std::max({f / b, f / down_min, static_cast<double>(workers.size()) * f / (b + sum_up)}));
}

std::uint64_t chunk_count(Bytes payload, Bytes chunk) {
  ECHO_CHECK(chunk.count > 0, "chunk size 0");
  return payload.count / chunk.count + (payload.count % chunk.count != 0);
}

Duration chain_time(Bytes payload, Bytes chunk, std::span<const Hop> hops) {
  if (hops.empty()) return Duration{};
  return from_seconds(hop_completions_s(payload, chunk, hops).back());
}

BitRate star_rate(BitRate learner_up, std::size_t workers, BitRate down) {
  ECHO_CHECK(workers > 0);
  return {std::min(down.bits_per_s, learner_up.bits_per_s / static_cast<double>(workers))};
}

Bytes optimal_chunk(Bytes payload, Duration overhead, BitRate rate, std::size_t depth) {
  if (depth <= 1 || payload.count <= 1) return {std::max<std::uint64_t>(1, payload.count)};
  const double c =
      std::sqrt(as_double(payload) * seconds(overhead) * rate.bytes_per_s() / static_cast<double>(depth - 1));
  return {static_cast<std::uint64_t>(std::clamp(std::round(c), 1.0, as_double(payload)))};
}

Duration BroadcastTimes::fraction(double q) const {
  ECHO_CHECK(q > 0 && q <= 1, "fraction {} of the workers", q);
  if (workers.empty()) return Duration{};
  std::vector<Duration> times;
  for (const Completion& c : workers) times.push_back(c.time);
  const double wanted = std::ceil(q * static_cast<double>(times.size()) - 1e-9);
  const auto nth = times.begin() + static_cast<std::ptrdiff_t>(std::max(1.0, wanted)) - 1;
  std::nth_element(times.begin(), nth, times.end());
  return *nth;
}

Duration BroadcastTimes::of(WorkerId id) const {
  const auto it = std::lower_bound(workers.begin(), workers.end(), id, [](const auto& c, auto v) { return c.id < v; });
  ECHO_CHECK(it != workers.end() && it->id == id, "no worker {}", id);
  return it->time;
}

Result<BroadcastTimes> broadcast_time(const Topology& topology, Bytes payload, Bytes chunk, BitRate learner_up,
                                      std::span<const WorkerLink> links) {
  constexpr std::string_view kOperation = "predict broadcast";
  if (chunk.count == 0) return fail(Code::kInvalid, kOperation, "the chunk size must be positive");
  if (!(learner_up.bits_per_s > 0)) return fail(Code::kInvalid, kOperation, "the learner's uplink must be positive");
  std::map<WorkerId, WorkerLink> link_of;
  for (const WorkerLink& link : links) link_of[link.id] = link;

  // Edges of all stripes share a sender's uplink evenly, and every stripe carries its share of the payload.
  const std::size_t stripes = topology.stripes();
  std::map<WorkerId, std::size_t> children;
  for (std::size_t s = 0; s < stripes; ++s)
    for (const auto& chain : topology.stripe(s))
      for (std::size_t i = 0; i + 1 < chain.size(); ++i) ++children[chain[i]];
  struct Route {
    const std::vector<WorkerId>* chain;
    std::vector<Hop> hops;
  };
  std::vector<Route> routes;
  std::vector<double> seed_down;
  for (std::size_t s = 0; s < stripes; ++s)
    for (const auto& chain : topology.stripe(s)) {
      Route route{&chain, {}};
      BitRate sender_up = learner_up;
      for (const WorkerId id : chain) {
        const auto it = link_of.find(id);
        if (it == link_of.end()) return fail(Code::kInvalid, kOperation, "worker {} has no link rates", id);
        const BitRate down{it->second.down.bits_per_s / static_cast<double>(stripes)};
        const Hop hop{std::min(sender_up, down), it->second.delay};
        if (!(hop.rate.bits_per_s > 0))
          return fail(Code::kInvalid, kOperation,
                      "worker {} receives at {} bit/s: its downlink and its parent's uplink "
                      "must be positive",
                      id, hop.rate.bits_per_s);
        route.hops.push_back(hop);
        sender_up = {it->second.up.bits_per_s / static_cast<double>(std::max<std::size_t>(1, children[id]))};
      }
      if (route.hops.empty()) return fail(Code::kInvalid, kOperation, "a chain is empty");
      seed_down.push_back(route.hops.front().rate.bits_per_s);
      routes.push_back(std::move(route));
    }
  const std::vector<double> shares = fair_shares(learner_up.bits_per_s, seed_down);
  const Bytes share{(payload.count + stripes - 1) / stripes};

  std::map<WorkerId, Duration> last;
  for (std::size_t c = 0; c < routes.size(); ++c) {
    routes[c].hops.front().rate = BitRate{shares[c]};
    const std::vector<double> done = hop_completions_s(share, chunk, routes[c].hops);
    for (std::size_t i = 0; i < done.size(); ++i) {
      Duration& at = last[(*routes[c].chain)[i]];
      at = std::max(at, from_seconds(done[i]));
    }
  }
  BroadcastTimes times;
  for (const auto& [id, time] : last) times.workers.push_back({id, time});
  return times;
}

}  // namespace echoline::chains
