// Plans trees over several regions, for plan_chains() and repair_trees().
#include "chains/relays.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>

#include "chains/broadcast_model.hpp"
#include "chains/trees.hpp"

namespace echoline::chains {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1 + 1e-9;
constexpr double kMoreStripesTimeMax = 0.97;  // more stripes must reduce the time to this fraction
constexpr double kMeanTimeWeight = 0.05;      // weight of the mean time beside the quorum's
constexpr int kBisections = 20;               // halvings of an interval of rates
constexpr double kRateStep = 0.02;  // rates that no trees reach are lowered by this fraction of the planned ones

// A region with the link rates of its workers.
struct RegionLimits {
  std::uint32_t region = 0;
  std::vector<double> up;    // of workers in time, bit/s
  std::vector<double> late;  // downlinks of late workers
  double down = kInfinite;   // least downlink of workers in time
};

// The rates of the regions with workers, by index in a vector of RegionLimits; index 0 is the learner's region.
struct Rates {
  std::vector<double> into;    // receiving rate of the relay, from other regions, bit/s
  std::vector<double> inside;  // receiving rate of workers in time, at most `into`
};

// The routes of all stripes, and their traffic. Regions are indices as in Rates.
struct StripeRoutes {
  std::vector<std::vector<std::size_t>> from;   // by stripe and region: the region that feeds its relay
  std::vector<std::vector<std::size_t>> order;  // by stripe: regions in the order in which the route reaches them
  std::vector<double> onward;                   // by region: bit/s that leave it
  std::vector<std::vector<double>> link_load;   // by link, of region and region
  Lending lent;                                 // uplink lent beyond the routes
};

// Finds max-min fair rates of the regions for a number of stripes, and the routes that reach them.
class MaxMinRates {
 public:
  MaxMinRates(BitRate learner_up, const std::vector<RegionLimits>& region_limits, std::size_t stripes,
              const Regions& regions)
      : up_(learner_up.bits_per_s), region_limits_(region_limits), stripes_(stripes), regions_(regions) {}

  // The rates as plan_relays() describes them.
  Rates solve() const {
    const std::size_t n = region_limits_.size();
    std::vector<double> into_max(n, kInfinite), inside_max(n, kInfinite);  // limits found so far
    for (std::size_t i = 0; i < n; ++i) into_max[i] = std::min(up_, region_limits_[i].down);
    // All rates, at most `rate` and at most their limits.
    const auto rates_at = [&](double rate) {
      Rates rates{into_max, inside_max};
      for (std::size_t i = 0; i < n; ++i) {
        rates.into[i] = std::max(1.0, std::min(rate, into_max[i]));
        rates.inside[i] = std::max(1.0, std::min(rates.into[i], inside_max[i]));
      }
      return rates;
    };
    double low = 1;
    for (;;) {
      if (is_feasible(rates_at(up_))) return rates_at(up_);
      double high = up_;
      for (int i = 0; i < kBisections; ++i) {
        const double middle = (low + high) / 2;
        if (is_feasible(rates_at(middle)))
          low = middle;
        else
          high = middle;
      }
      const Rates reached = rates_at(low);
      // The limiting regions stay at their rate: first an unreachable region, then those with the largest deficit.
      const auto at_limit = [&](std::size_t i) { return std::min(into_max[i], inside_max[i]) <= reached.inside[i]; };
      const auto others_can_rise = [&] { return is_feasible(rates_at(low * 1.01)); };
      std::vector<std::size_t> order = by_deficit(rates_at(low * 1.01));
      std::erase_if(order, at_limit);
      if (order.empty()) return reached;
      for (const std::size_t i : order) {
        inside_max[i] = reached.inside[i];
        if (others_can_rise()) break;
        into_max[i] = reached.into[i];
        if (others_can_rise()) break;
      }
    }
  }

  // The routes for these rates; absent if the rates are not feasible. Those of solve() are.
  std::optional<StripeRoutes> routes(const Rates& rates) const {
    StripeRoutes found;
    const Capacities c = capacities(rates);
    if (find_routes(rates, c, found) != kAllReached) return std::nullopt;
    found.lent = lend_uplink(c, found);
    return found;
  }

 private:
  struct Capacities {
    std::vector<double> own;    // by region: its total uplink, bit/s
    std::vector<double> spare;  // the part that its own workers do not need; negative: the part that they lack
  };

  // The part of an uplink that full edges can use, with at most `edges_max` edges. An edge carries one stripe of
  // `rate`.
  double usable_uplink(double up, double rate, std::size_t edges_max) const {
    const double edge_rate = rate / static_cast<double>(stripes_);
    return std::min(std::floor(up / edge_rate * kRounding), static_cast<double>(edges_max)) * edge_rate;
  }

  Capacities capacities(const Rates& rates) const {
    Capacities c;
    for (std::size_t i = 0; i < region_limits_.size(); ++i) {
      const RegionLimits& limits = region_limits_[i];
      const double rate = rates.inside[i];
      const std::size_t edges_max = std::min(stripes_ * kTreeChildrenMax, kPlannedChildrenMax);
      double own = i == 0 ? usable_uplink(up_, rate, std::numeric_limits<std::uint32_t>::max()) : 0;
      for (const double up : limits.up) own += usable_uplink(up, rate, edges_max);
      // Another region's uplink feeds the relay, except in the learner's region, which has none.
      const std::size_t relays = i == 0 ? 0 : 1;
      double needed = (static_cast<double>(limits.up.size()) - static_cast<double>(relays)) * rate;
      for (const double down : limits.late) needed += std::min(down, rate);
      c.own.push_back(own);
      c.spare.push_back(own - needed);
    }
    return c;
  }

  // Indices of regions: first an unreachable one, then by surplus, smallest first.
  std::vector<std::size_t> by_deficit(const Rates& rates) const {
    const Capacities c = capacities(rates);
    StripeRoutes routes;
    const std::size_t cut_off = find_routes(rates, c, routes);
    std::vector<double> left;
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < region_limits_.size(); ++i) {
      order.push_back(i);
      left.push_back(i == cut_off ? -kInfinite : c.spare[i] - routes.onward[i]);
    }
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return left[a] < left[b]; });
    return order;
  }

  // Routes each stripe from the learner's region to one region after another (`latest`: the one just reached). Each
  // step takes the route with most capacity left, of the link and of the uplinks at its start; if there is plenty, the
  // one with the least delay. Returns the index of a region without a feasible route, or kAllReached.
  static constexpr std::size_t kAllReached = std::numeric_limits<std::size_t>::max();
  std::size_t find_routes(const Rates& rates, Capacities left, StripeRoutes& routes) const {
    const std::size_t n = region_limits_.size();
    routes.onward.assign(n, 0);
    routes.link_load.assign(regions_.links.size(), std::vector<double>(regions_.links.size(), 0));
    for (std::size_t s = 0; s < stripes_; ++s) {
      struct Reach {
        double spare_edges = -1, own_edges = -1;  // further edges that fit, from spare uplink and from all uplink
        double negated_delay_s = 0;               // from the learner
        auto operator<=>(const Reach&) const = default;
      };
      std::vector<Reach> reach(n);  // by region: its best route so far
      std::vector<std::size_t> from(n, 0), order{0};
      std::vector<double> negated_delay_s(n, 0);
      std::vector<bool> is_reached(n, false);
      is_reached[0] = true;
      for (std::size_t latest = 0;;) {
        for (std::size_t i = 1; i < n; ++i) {
          // Only the learner itself can feed a region that receives faster than the region before it.
          const bool is_faster = rates.into[latest] < rates.into[i] * 0.999;
          if (is_reached[i] || (is_faster && latest != 0)) continue;
          const double uplink_max =
              is_faster ? up_ - (region_limits_[0].up.empty() ? 0 : rates.into[0]) - routes.onward[0] : kInfinite;
          const auto a = region_limits_[latest].region, b = region_limits_[i].region;
          const double edge_rate = rates.into[i] / static_cast<double>(stripes_),
                       edges_max = 4 * static_cast<double>(stripes_);
          const double link_left = regions_.rate(a, b).bits_per_s - routes.link_load[a][b];
          const auto edges = [&](double rate) {
            return std::clamp(std::floor(std::min(rate, link_left) / edge_rate * kRounding), 0.0, edges_max);
          };
          const Reach via_latest{edges(std::min(uplink_max, left.spare[latest])),
                                 edges(std::min(uplink_max, left.own[latest])),
                                 negated_delay_s[latest] - seconds(regions_.delay(a, b, {}))};
          if (via_latest <= reach[i]) continue;
          reach[i] = via_latest;
          from[i] = latest;
        }
        std::size_t next = n;
        for (std::size_t i = 1; i < n; ++i)
          if (!is_reached[i] && (next == n || reach[i] > reach[next])) next = i;
        if (next == n) break;
        if (reach[next].own_edges < 1) return next;
        const double edge_rate = rates.into[next] / static_cast<double>(stripes_);
        routes.link_load[region_limits_[from[next]].region][region_limits_[next].region] += edge_rate;
        routes.onward[from[next]] += edge_rate;
        left.spare[from[next]] -= edge_rate;
        left.own[from[next]] -= edge_rate;
        negated_delay_s[next] = reach[next].negated_delay_s;
        is_reached[next] = true;
        order.push_back(next);
        latest = next;
      }
      routes.from.push_back(std::move(from));
      routes.order.push_back(std::move(order));
    }
    return kAllReached;
  }

  // Whether uplinks and links suffice for these rates.
  bool is_feasible(const Rates& rates) const {
    const Capacities c = capacities(rates);
    StripeRoutes routes;
    if (find_routes(rates, c, routes) != kAllReached) return false;
    // The learner sends the first copy of every stripe.
    if (up_ < (region_limits_[0].up.empty() ? *std::max_element(rates.into.begin(), rates.into.end()) : rates.into[0]))
      return false;
    double lacking = 0, spare_total = 0;
    for (std::size_t i = 0; i < region_limits_.size(); ++i) {
      const double spare = c.spare[i] - routes.onward[i];
      lacking -= std::min(spare, 0.0);
      spare_total += spare;
    }
    if (lacking <= 1) return true;
    return spare_total > -1 && lend_uplink(c, routes).total >= lacking / kRounding - 1;
  }

  // Uplink that regions lend to other regions, beyond the traffic of these routes.
  Lending lend_uplink(const Capacities& c, const StripeRoutes& routes) const {
    std::vector<double> spare(regions_.links.size(), 0), through(spare);
    for (std::size_t i = 0; i < region_limits_.size(); ++i) {
      const double onward = routes.onward[i], needed = c.own[i] - c.spare[i];
      spare[region_limits_[i].region] = c.spare[i] - onward;
      through[region_limits_[i].region] = std::max(0.0, std::min(needed, c.own[i] - onward));
    }
    return lend(regions_, spare, through, routes.link_load);
  }

  double up_;
  const std::vector<RegionLimits>& region_limits_;
  std::size_t stripes_;
  const Regions& regions_;
};

// Time per bit until a fraction `quorum` of the workers has it.
double time_per_bit(const Rates& rates, const std::vector<RegionLimits>& region_limits, double quorum) {
  std::vector<double> times;
  for (std::size_t i = 0; i < region_limits.size(); ++i) {
    times.insert(times.end(), region_limits[i].up.size(), 1 / rates.inside[i]);
    for (const double down : region_limits[i].late) times.push_back(1 / std::min(down, rates.inside[i]));
  }
  const double mean = std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size());
  const auto quorum_time = times.begin() + static_cast<std::ptrdiff_t>(quorum_count(quorum, times.size())) - 1;
  std::nth_element(times.begin(), quorum_time, times.end());
  return *quorum_time + kMeanTimeWeight * mean;
}

// The parent of a chain that is not attached yet.
constexpr WorkerId kUnattached{std::numeric_limits<std::uint64_t>::max()};

// The rate that a fraction `quorum` of the workers reaches.
BitRate nth_rate(std::vector<BitRate> rates, double quorum) {
  const auto nth = rates.end() - static_cast<std::ptrdiff_t>(quorum_count(quorum, rates.size()));
  std::nth_element(rates.begin(), nth, rates.end());
  return *nth;
}

// Builds each region's trees of the workers in time. Then attach_orphans() attaches the first workers of the trees to
// another region's workers, along the routes or to lent uplink.
void build_relays(const RelayPlan& plan, BitRate learner_up, std::span<const ChainWorker> workers,
                  const Regions& regions, Topology& topology) {
  const std::size_t stripes = plan.stripes.size();
  topology.policy = TopologyPolicy::kTrees;
  topology.further_stripes.assign(stripes - 1, {});
  topology.grafts.assign(stripes, {});
  for (const std::uint32_t region : plan.stripes.front().order) {
    std::vector<ChainWorker> members;
    // Uplink of this region for other regions and for late workers.
    double outside_rate = std::accumulate(plan.crossing[region].begin(), plan.crossing[region].end(), 0.0);
    for (std::size_t i = 0; i < workers.size(); ++i) {
      if (workers[i].region == region && !plan.late[i]) members.push_back(workers[i]);
      if (workers[i].region == region && plan.late[i]) outside_rate += plan.rates[i].bits_per_s;
    }
    if (members.empty()) continue;
    const bool is_home = region == regions.learner;
    const BitRate rate = plan.by_region[region];
    double learner_share = 0;  // the learner's uplink for this region: all that is not needed for other regions
    if (is_home) {
      double uplink_left = learner_up.bits_per_s - outside_rate;
      learner_share = std::max(rate.bits_per_s, uplink_left);
      for (const ChainWorker& w : members) uplink_left += w.usable_up().bits_per_s;
      learner_share = std::clamp(learner_share, 0.0, std::max(0.0, uplink_left));
      outside_rate = std::max(0.0, outside_rate - (learner_up.bits_per_s - learner_share));
    }
    Topology region_trees;
    region_trees.policy = TopologyPolicy::kTrees;
    build_trees_at_rate(rate, stripes, {std::max(rate.bits_per_s, learner_share)}, members, {outside_rate},
                        region_trees);
    const auto seeds =
        static_cast<std::size_t>(learner_share / rate.bits_per_s * static_cast<double>(stripes) * kRounding);
    for (std::size_t s = 0; s < stripes; ++s) {
      std::size_t seeds_left = seeds / stripes + (s < seeds % stripes);
      for (std::vector<WorkerId>& chain : region_trees.stripe(s)) {
        WorkerId parent = region_trees.parent_of_chain(s, chain.front());
        if (parent == kLearnerId && seeds_left-- == 0) {
          parent = kUnattached;
          seeds_left = 0;
        }
        if (parent != kLearnerId) topology.grafts[s][chain.front()] = parent;
        topology.stripe(s).push_back(std::move(chain));
      }
    }
  }
  attach_orphans(plan, learner_up, workers, regions, topology);
}

}  // namespace

bool spans_regions(std::span<const ChainWorker> workers, const Regions& regions) {
  return regions.several() &&
         std::any_of(workers.begin(), workers.end(), [&](const ChainWorker& w) { return w.region != regions.learner; });
}

RelayTrees plan_relays(BitRate learner_up, std::span<const ChainWorker> workers, double quorum,
                       const Regions& regions) {
  ECHO_CHECK(spans_regions(workers, regions));
  std::map<std::uint32_t, std::vector<std::size_t>> members;
  for (std::size_t i = 0; i < workers.size(); ++i) members[workers[i].region].push_back(i);
  std::vector<bool> is_late(workers.size(), false);
  std::vector<RegionLimits> region_limits{{regions.learner, {}, {}}};
  for (const auto& [region, indices] : members) {
    RegionLimits& limits =
        region == regions.learner ? region_limits.front() : region_limits.emplace_back(RegionLimits{region, {}, {}});
    std::vector<ChainWorker> region_workers;
    for (const std::size_t i : indices) region_workers.push_back(workers[i]);
    const std::vector<bool> late = late_workers(learner_up, region_workers, quorum);
    for (std::size_t k = 0; k < indices.size(); ++k) {
      is_late[indices[k]] = late[k];
      if (late[k]) {
        limits.late.push_back(region_workers[k].down.bits_per_s);
        continue;
      }
      limits.up.push_back(region_workers[k].usable_up().bits_per_s);
      limits.down = std::min(limits.down, region_workers[k].down.bits_per_s);
    }
  }
  std::size_t stripes = 0;
  Rates best_rates;
  double time = kInfinite;
  for (std::size_t s = kTreeStripesMin; s <= kPlannedStripesMax; s *= 2) {
    Rates rates = MaxMinRates(learner_up, region_limits, s, regions).solve();
    const double candidate_time = time_per_bit(rates, region_limits, quorum);
    if (stripes > 0 && candidate_time >= kMoreStripesTimeMax * time) continue;
    best_rates = std::move(rates);
    time = candidate_time;
    stripes = s;
  }
  const auto plan_for = [&](const Rates& rates, const StripeRoutes& routes) {
    RelayPlan plan;
    plan.late = is_late;
    plan.by_region.assign(regions.links.size(), learner_up);
    for (std::size_t i = 0; i < region_limits.size(); ++i) plan.by_region[region_limits[i].region] = {rates.inside[i]};
    plan.crossing = routes.link_load;
    for (std::size_t a = 0; a < plan.crossing.size(); ++a)
      for (std::size_t b = 0; b < plan.crossing.size(); ++b) plan.crossing[a][b] += routes.lent.by_link[a][b];
    for (std::size_t s = 0; s < stripes; ++s) {
      RelayPaths& paths = plan.stripes.emplace_back();
      paths.feeding_region.assign(regions.links.size(), regions.learner);
      for (const std::size_t i : routes.order[s]) {
        paths.feeding_region[region_limits[i].region] = region_limits[routes.from[s][i]].region;
        paths.order.push_back(region_limits[i].region);
      }
    }
    for (std::size_t i = 0; i < workers.size(); ++i) {
      const BitRate rate = plan.by_region[workers[i].region];
      plan.rates.push_back(plan.late[i] ? std::min(rate, workers[i].down) : rate);
    }
    return plan;
  };
  // At full use of every uplink a worker may remain without a place, and the parent that takes it halves its other
  // children's rates. So lower rates are tried while they may improve the result.
  RelayTrees best_trees;
  for (double fraction = 1; fraction > 0.9; fraction -= kRateStep) {
    Rates rates = best_rates;
    for (double& rate : rates.into) rate *= fraction;
    for (double& rate : rates.inside) rate *= fraction;
    const auto routes = MaxMinRates(learner_up, region_limits, stripes, regions).routes(rates);
    ECHO_CHECK(routes || fraction < 1);
    if (!routes) continue;
    RelayTrees trees{plan_for(rates, *routes), {}, {}};
    if (fraction < 1 && nth_rate(trees.plan.rates, quorum) <= best_trees.rate) break;
    build_relays(trees.plan, learner_up, workers, regions, trees.topology);
    trees.rate = steady_rate(trees.topology, learner_up, workers, quorum, regions);
    if (fraction == 1 || trees.rate > best_trees.rate) best_trees = std::move(trees);
  }
  return best_trees;
}

}  // namespace echoline::chains
