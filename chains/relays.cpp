// Plans trees over several regions, for plan_chains() and repair_trees(). A stripe is a share of the payload with trees
// of its own. In each stripe, one worker of a region, the relay, receives from another region and feeds its own.
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
constexpr double kRounding = 1 + 1e-9;  // a ratio that misses an integer by this factor counts as that integer
constexpr double kRateMin = 1;          // bit/s; planned rates are at least this, because times are 1 / rate
constexpr double kRateTolerance = 1;    // bit/s; a smaller lack of uplink is a rounding error

constexpr double kMoreStripesTimeMax = 0.97;  // more stripes must reduce the time below this fraction to be used
constexpr double kMeanTimeWeight = 0.05;  // of the mean time of all workers, added to the time until the quorum is met

constexpr int kBisections = 20;       // halvings of an interval of rates, down to a millionth of it
constexpr double kRiseFactor = 1.01;  // regions count as limited if not all rates can rise by this factor

constexpr double kFasterTolerance = 0.999;   // a relay that is slower only by this factor can still feed another one
constexpr double kPlentyEdgesPerStripe = 4;  // among routes with more spare edges than this, the delay decides
// If no trees reach the planned rates, all rates are lowered in steps of kRateStep, down to kLoweredRatesFractionMin.
constexpr double kRateStep = 0.02;
constexpr double kLoweredRatesFractionMin = 0.9;

// A region with the link rates of its workers. Trees are planned for the workers "in time". The others are "late":
// their downlinks are too slow for these trees (trees.hpp).
struct RegionLimits {
  std::uint32_t region = 0;       // index in Regions::links
  std::vector<double> up;         // uplinks of workers in time, bit/s
  std::vector<double> late_down;  // downlinks of late workers, bit/s
  double down_min = kInfinite;    // least downlink of workers in time, bit/s
};

// The rates of the regions with workers, in bit/s, by index in a vector of RegionLimits; index 0 is the learner's
// region.
struct Rates {
  std::vector<double> to_relay;    // the rate at which the relay (the worker that another region feeds) receives
  std::vector<double> to_workers;  // the rate at which the workers in time receive, at most `to_relay`
};

// The routes of all stripes (shares of a payload, each with its own trees), and their traffic. Regions are indices as
// in Rates.
struct StripeRoutes {
  std::vector<std::vector<std::size_t>> feeder;  // by stripe and region: the region that feeds this region's relay
  std::vector<std::vector<std::size_t>> order;   // by stripe: regions in the order in which the route reaches them

  std::vector<double> onward_rate;             // by region: bit/s that it sends to other regions' relays
  std::vector<std::vector<double>> link_load;  // [from][to] by RegionLimits::region, bit/s
  Lending lent;  // uplink that regions with a surplus lend to regions with a deficit, in addition to the routes
};

// Finds max-min fair rates of the regions for a number of stripes, and the routes that reach them.
class MaxMinRates {
 public:
  MaxMinRates(BitRate learner_up, const std::vector<RegionLimits>& region_limits, std::size_t stripes,
              const Regions& regions)
      : learner_up_(learner_up.bits_per_s), region_limits_(region_limits), stripes_(stripes), regions_(regions) {}

  // Raises all rates together, by bisection, until a region is limited. Fixes that region's rates and repeats.
  Rates solve() const {
    const std::size_t n = region_limits_.size();
    std::vector<double> to_relay_max(n, kInfinite), to_workers_max(n, kInfinite);  // limits found so far
    for (std::size_t i = 0; i < n; ++i) to_relay_max[i] = std::min(learner_up_, region_limits_[i].down_min);
    // Returns `rate` for every region, or the region's limit if that is less.
    const auto rates_at = [&](double rate) {
      Rates rates{to_relay_max, to_workers_max};
      for (std::size_t i = 0; i < n; ++i) {
        rates.to_relay[i] = std::max(kRateMin, std::min(rate, to_relay_max[i]));
        rates.to_workers[i] = std::max(kRateMin, std::min(rates.to_relay[i], to_workers_max[i]));
      }
      return rates;
    };
    double low = kRateMin;  // kept between rounds, because rates that were reached stay feasible
    for (;;) {
      if (is_feasible(rates_at(learner_up_))) return rates_at(learner_up_);
      double high = learner_up_;
      for (int i = 0; i < kBisections; ++i) {
        const double middle = (low + high) / 2;
        if (is_feasible(rates_at(middle)))
          low = middle;
        else
          high = middle;
      }
      const Rates reached = rates_at(low);
      // Fixes the rates of one region after another until the other regions can rise: first of an unreachable region,
      // then of the region with the largest deficit (lack of uplink), and so on. Fixes the rate to a region's workers
      // before the rate to its relay, because the relay can still pass a higher rate on to other regions.
      const auto has_fixed_rates = [&](std::size_t i) {
        return std::min(to_relay_max[i], to_workers_max[i]) <= reached.to_workers[i];
      };
      const auto others_can_rise = [&] { return is_feasible(rates_at(low * kRiseFactor)); };
      std::vector<std::size_t> order = by_deficit(rates_at(low * kRiseFactor));
      std::erase_if(order, has_fixed_rates);
      if (order.empty()) return reached;
      for (const std::size_t i : order) {
        to_workers_max[i] = reached.to_workers[i];
        if (others_can_rise()) break;
        to_relay_max[i] = reached.to_relay[i];
        if (others_can_rise()) break;
      }
    }
  }

  // Returns the routes for these rates; absent if the rates are not feasible. The rates of solve() always are.
  std::optional<StripeRoutes> routes_for(const Rates& rates) const {
    StripeRoutes routes;
    const RegionUplinks uplinks = region_uplinks(rates);
    if (find_routes(rates, uplinks, routes) != kAllReached) return std::nullopt;
    routes.lent = lend_uplink(uplinks, routes);
    return routes;
  }

 private:
  // By region, bit/s.
  struct RegionUplinks {
    std::vector<double> total;
    std::vector<double> spare;  // the part that the region's own workers do not need; negative: what they lack
  };

  // The part of an uplink that full edges can use, with at most `edges_max` edges. An edge carries one stripe, a share
  // of `rate`.
  double usable_uplink(double up, double rate, std::size_t edges_max) const {
    const double edge_rate = rate / static_cast<double>(stripes_);
    const double full_edges = std::floor(up / edge_rate * kRounding);
    return std::min(full_edges, static_cast<double>(edges_max)) * edge_rate;
  }

  RegionUplinks region_uplinks(const Rates& rates) const {
    RegionUplinks uplinks;
    for (std::size_t i = 0; i < region_limits_.size(); ++i) {
      const RegionLimits& limits = region_limits_[i];
      const double rate = rates.to_workers[i];
      // The children of a worker are limited per stripe and in all stripes, those of the learner are not.
      const std::size_t edges_max = std::min(stripes_ * kTreeChildrenMax, kChildrenOverStripesMax);
      constexpr std::size_t kUnlimitedEdges = std::numeric_limits<std::uint32_t>::max();
      double total = i == 0 ? usable_uplink(learner_up_, rate, kUnlimitedEdges) : 0;
      for (const double up : limits.up) total += usable_uplink(up, rate, edges_max);
      // Another region's uplink feeds the relay. The learner's region has no relay.
      const std::size_t relays = i == 0 ? 0 : 1;
      // Every other worker in time takes one copy from its region's uplink, a late worker what its downlink allows.
      double needed = (static_cast<double>(limits.up.size()) - static_cast<double>(relays)) * rate;
      for (const double down : limits.late_down) needed += std::min(down, rate);
      uplinks.total.push_back(total);
      uplinks.spare.push_back(total - needed);
    }
    return uplinks;
  }

  // Returns the indices of all regions: an unreachable one first, then by surplus, smallest first.
  std::vector<std::size_t> by_deficit(const Rates& rates) const {
    const RegionUplinks uplinks = region_uplinks(rates);
    StripeRoutes routes;
    const std::size_t unreachable_region = find_routes(rates, uplinks, routes);
    std::vector<double> surplus;
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < region_limits_.size(); ++i) {
      order.push_back(i);
      surplus.push_back(i == unreachable_region ? -kInfinite : uplinks.spare[i] - routes.onward_rate[i]);
    }
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return surplus[a] < surplus[b]; });
    return order;
  }

  // Routes each stripe from the learner's region to one region after another. Each step extends the route to the region
  // that can be reached with most capacity left, of the link and of the uplinks at its start; if there is plenty, with
  // the least delay. `remaining`: the uplinks that the routes may use. Returns the index of a region without a feasible
  // route, or kAllReached.
  static constexpr std::size_t kAllReached = std::numeric_limits<std::size_t>::max();
  std::size_t find_routes(const Rates& rates, RegionUplinks remaining, StripeRoutes& routes) const {
    const std::size_t n = region_limits_.size();
    // Counts of edges are cut at this number, so that the delay decides among routes with plenty of edges.
    const double edges_counted_max = kPlentyEdgesPerStripe * static_cast<double>(stripes_);
    // The learner's first copy for its own region, if that has workers.
    const double first_copy_rate = region_limits_[0].up.empty() ? 0 : rates.to_relay[0];
    routes.onward_rate.assign(n, 0);
    routes.link_load.assign(regions_.links.size(), std::vector<double>(regions_.links.size(), 0));
    for (std::size_t s = 0; s < stripes_; ++s) {
      // Ranks the possible routes to a region: the greatest rank is taken.
      struct RouteRank {
        double spare_edges = -1;   // further edges that fit in the spare uplink of the sending region
        double uplink_edges = -1;  // further edges that fit in its whole uplink, also in the part that its workers need
        double negated_delay_s = 0;  // from the learner; negated, so that the least delay ranks highest
        auto operator<=>(const RouteRank&) const = default;
      };
      std::vector<RouteRank> best_route(n);             // to each region, over the regions reached so far
      std::vector<std::size_t> feeder(n, 0), order{0};  // as in StripeRoutes, for this stripe
      std::vector<double> negated_delay_s(n, 0);        // of the regions reached so far
      std::vector<bool> is_reached(n, false);
      is_reached[0] = true;
      for (std::size_t latest = 0;;) {  // the region reached last
        for (std::size_t i = 1; i < n; ++i) {
          // A relay sends no faster than it receives, so only the learner can feed a region that receives faster than
          // `latest`. The learner's uplink for this is what the first copy for its own region and the earlier routes
          // leave.
          const bool is_faster = rates.to_relay[latest] < rates.to_relay[i] * kFasterTolerance;
          if (is_reached[i] || (is_faster && latest != 0)) continue;
          const double uplink_max = is_faster ? learner_up_ - first_copy_rate - routes.onward_rate[0] : kInfinite;
          const auto from = region_limits_[latest].region, to = region_limits_[i].region;
          const double edge_rate = rates.to_relay[i] / static_cast<double>(stripes_);
          const double link_left = regions_.rate(from, to).bits_per_s - routes.link_load[from][to];
          const auto edges_that_fit = [&](double uplink) {
            const double rate = std::min({uplink, uplink_max, link_left});
            return std::clamp(std::floor(rate / edge_rate * kRounding), 0.0, edges_counted_max);
          };
          const RouteRank via_latest{
              .spare_edges = edges_that_fit(remaining.spare[latest]),
              .uplink_edges = edges_that_fit(remaining.total[latest]),
              .negated_delay_s = negated_delay_s[latest] - seconds(regions_.delay(from, to, {})),
          };
          if (via_latest <= best_route[i]) continue;
          best_route[i] = via_latest;
          feeder[i] = latest;
        }
        std::size_t next = n;
        for (std::size_t i = 1; i < n; ++i)
          if (!is_reached[i] && (next == n || best_route[i] > best_route[next])) next = i;
        if (next == n) break;
        if (best_route[next].uplink_edges < 1) return next;  // not even one edge fits
        const std::size_t sender = feeder[next];
        const double edge_rate = rates.to_relay[next] / static_cast<double>(stripes_);
        routes.link_load[region_limits_[sender].region][region_limits_[next].region] += edge_rate;
        routes.onward_rate[sender] += edge_rate;
        remaining.spare[sender] -= edge_rate;
        remaining.total[sender] -= edge_rate;
        negated_delay_s[next] = best_route[next].negated_delay_s;
        is_reached[next] = true;
        order.push_back(next);
        latest = next;
      }
      routes.feeder.push_back(std::move(feeder));
      routes.order.push_back(std::move(order));
    }
    return kAllReached;
  }

  // Whether uplinks and links suffice for these rates.
  bool is_feasible(const Rates& rates) const {
    const RegionUplinks uplinks = region_uplinks(rates);
    StripeRoutes routes;
    if (find_routes(rates, uplinks, routes) != kAllReached) return false;
    // The learner sends the first copy of every stripe: into its own region, or, if that has no workers, into the
    // fastest one.
    const double first_copy_rate = region_limits_[0].up.empty()
                                       ? *std::max_element(rates.to_relay.begin(), rates.to_relay.end())
                                       : rates.to_relay[0];
    if (learner_up_ < first_copy_rate) return false;
    // Regions with a lack of uplink (deficit) must be able to borrow it from regions with a surplus.
    double deficit_total = 0, net_surplus = 0;  // the deficits; all surpluses less the deficits
    for (std::size_t i = 0; i < region_limits_.size(); ++i) {
      const double spare = uplinks.spare[i] - routes.onward_rate[i];
      deficit_total -= std::min(spare, 0.0);
      net_surplus += spare;
    }
    if (deficit_total <= kRateTolerance) return true;
    if (net_surplus <= -kRateTolerance) return false;
    const double lent_min = deficit_total / kRounding - kRateTolerance;
    return lend_uplink(uplinks, routes).bits_per_s_total >= lent_min;
  }

  // Uplink that regions lend to other regions, in addition to the traffic of these routes.
  Lending lend_uplink(const RegionUplinks& uplinks, const StripeRoutes& routes) const {
    std::vector<double> spare(regions_.links.size(), 0), forwardable(spare);
    for (std::size_t i = 0; i < region_limits_.size(); ++i) {
      const double onward = routes.onward_rate[i], needed = uplinks.total[i] - uplinks.spare[i];
      spare[region_limits_[i].region] = uplinks.spare[i] - onward;
      // A region can borrow uplink for all its workers and lend its own, except the part that the routes use.
      const double lendable = uplinks.total[i] - onward;
      forwardable[region_limits_[i].region] = std::max(0.0, std::min(needed, lendable));
    }
    return plan_lending(regions_, spare, forwardable, routes.link_load);
  }

  double learner_up_;  // bit/s
  const std::vector<RegionLimits>& region_limits_;
  std::size_t stripes_;
  const Regions& regions_;
};

// The time per bit until a fraction `quorum` of the workers has it. Adds a little of the mean time, which decides
// between plans with equal quorum times.
double time_per_bit(const Rates& rates, const std::vector<RegionLimits>& region_limits, double quorum) {
  std::vector<double> times;
  for (std::size_t i = 0; i < region_limits.size(); ++i) {
    times.insert(times.end(), region_limits[i].up.size(), 1 / rates.to_workers[i]);
    for (const double down : region_limits[i].late_down) times.push_back(1 / std::min(down, rates.to_workers[i]));
  }
  const double mean = std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size());
  const auto quorum_time = times.begin() + static_cast<std::ptrdiff_t>(quorum_count(quorum, times.size())) - 1;
  std::nth_element(times.begin(), quorum_time, times.end());
  return *quorum_time + kMeanTimeWeight * mean;
}

// Returns the highest rate that at least a fraction `quorum` of the workers reaches.
BitRate rate_at_quorum(std::vector<BitRate> rates, double quorum) {
  const auto nth = rates.end() - static_cast<std::ptrdiff_t>(quorum_count(quorum, rates.size()));
  std::nth_element(rates.begin(), nth, rates.end());
  return *nth;
}

// Stands for the parent of a chain that is not attached yet: no worker has this id.
constexpr WorkerId kUnattached{std::numeric_limits<std::uint64_t>::max()};

// Builds each region's trees of the workers in time. Then attach_orphans() attaches the trees' first workers (orphans:
// they have no parent yet) to workers of another region, along the routes or to lent uplink.
void build_relays(const RelayPlan& plan, BitRate learner_up, std::span<const ChainWorker> workers,
                  const Regions& regions, Topology& topology) {
  const std::size_t stripes = plan.routes.size();
  topology.policy = TopologyPolicy::kTrees;
  topology.further_stripes.assign(stripes - 1, {});
  topology.grafts.assign(stripes, {});
  for (const std::uint32_t region : plan.routes.front().order) {  // every route has the same regions
    std::vector<ChainWorker> members;
    // Uplink (bit/s) of this region for other regions and for late workers.
    double outside_rate = std::accumulate(plan.link_load[region].begin(), plan.link_load[region].end(), 0.0);
    for (std::size_t i = 0; i < workers.size(); ++i) {
      if (workers[i].region == region && !plan.is_late[i]) members.push_back(workers[i]);
      if (workers[i].region == region && plan.is_late[i]) outside_rate += plan.worker_rates[i].bits_per_s;
    }
    if (members.empty()) continue;
    const BitRate rate = plan.region_rates[region];
    double learner_share = 0;  // bit/s of the learner's uplink for this region
    if (region == regions.learner_region) {
      // The learner feeds its own region with all uplink that other regions do not need, and with one copy at least.
      // The region's workers then send to other regions what the learner cannot.
      const double learner_left = learner_up.bits_per_s - outside_rate;
      double region_left = learner_left;  // together with the uplinks of the region's workers
      for (const ChainWorker& w : members) region_left += w.forwarding_up().bits_per_s;
      const double share_wanted = std::max(rate.bits_per_s, learner_left);
      learner_share = std::clamp(share_wanted, 0.0, std::max(0.0, region_left));
      const double learner_outside_rate = learner_up.bits_per_s - learner_share;
      outside_rate = std::max(0.0, outside_rate - learner_outside_rate);
    }
    // Planned as if the learner sent one copy at least, because each stripe needs a first worker.
    Topology region_trees;
    region_trees.policy = TopologyPolicy::kTrees;
    build_trees_at_rate(rate, stripes, {std::max(rate.bits_per_s, learner_share)}, members, {outside_rate},
                        region_trees);
    // Number of first workers that the learner's share feeds, over all stripes. attach_orphans() finds parents for the
    // other first workers.
    const auto seed_count =
        static_cast<std::size_t>(learner_share / rate.bits_per_s * static_cast<double>(stripes) * kRounding);
    for (std::size_t s = 0; s < stripes; ++s) {
      std::size_t seeds_left = seed_count / stripes + (s < seed_count % stripes);
      for (std::vector<WorkerId>& chain : region_trees.stripe(s)) {
        WorkerId parent = region_trees.parent_of_chain(s, chain.front());
        if (parent == kLearnerId && seeds_left == 0)
          parent = kUnattached;
        else if (parent == kLearnerId)
          --seeds_left;
        if (parent != kLearnerId) topology.grafts[s][chain.front()] = parent;
        topology.stripe(s).push_back(std::move(chain));
      }
    }
  }
  attach_orphans(plan, learner_up, workers, regions, topology);
}

}  // namespace

bool spans_regions(std::span<const ChainWorker> workers, const Regions& regions) {
  return regions.several() && std::any_of(workers.begin(), workers.end(),
                                          [&](const ChainWorker& w) { return w.region != regions.learner_region; });
}

RelayTrees plan_relays(BitRate learner_up, std::span<const ChainWorker> workers, double quorum,
                       const Regions& regions) {
  ECHO_CHECK(spans_regions(workers, regions));
  std::map<std::uint32_t, std::vector<std::size_t>> members;  // by region: indices of its workers
  for (std::size_t i = 0; i < workers.size(); ++i) members[workers[i].region].push_back(i);
  std::vector<bool> is_late(workers.size(), false);
  // The learner's region comes first, also if it has no workers.
  std::vector<RegionLimits> region_limits{{.region = regions.learner_region, .up = {}, .late_down = {}}};
  for (const auto& [region, indices] : members) {
    if (region != regions.learner_region) region_limits.push_back({.region = region, .up = {}, .late_down = {}});
    RegionLimits& limits = region == regions.learner_region ? region_limits.front() : region_limits.back();
    std::vector<ChainWorker> region_workers;
    for (const std::size_t i : indices) region_workers.push_back(workers[i]);
    const std::vector<bool> is_late_here = late_workers(learner_up, region_workers, quorum);
    for (std::size_t k = 0; k < indices.size(); ++k) {
      is_late[indices[k]] = is_late_here[k];
      if (is_late_here[k]) {
        limits.late_down.push_back(region_workers[k].down.bits_per_s);
        continue;
      }
      limits.up.push_back(region_workers[k].forwarding_up().bits_per_s);
      limits.down_min = std::min(limits.down_min, region_workers[k].down.bits_per_s);
    }
  }
  std::size_t stripes = 0;  // 0: not chosen yet
  Rates best_rates;
  double best_time = kInfinite;
  // Numbers of stripes are powers of two. Takes more stripes only if they are clearly faster.
  for (std::size_t s = kTreeStripesMin; s <= kPlannedStripesMax; s *= 2) {
    Rates rates = MaxMinRates(learner_up, region_limits, s, regions).solve();
    const double candidate_time = time_per_bit(rates, region_limits, quorum);
    if (stripes > 0 && candidate_time >= kMoreStripesTimeMax * best_time) continue;
    best_rates = std::move(rates);
    best_time = candidate_time;
    stripes = s;
  }
  const auto plan_for = [&](const Rates& rates, const StripeRoutes& routes) {
    RelayPlan plan;
    plan.is_late = is_late;
    plan.region_rates.assign(regions.links.size(), learner_up);  // stays so for regions without workers
    for (std::size_t i = 0; i < region_limits.size(); ++i)
      plan.region_rates[region_limits[i].region] = {rates.to_workers[i]};
    plan.link_load = routes.link_load;
    for (std::size_t a = 0; a < plan.link_load.size(); ++a)
      for (std::size_t b = 0; b < plan.link_load.size(); ++b)
        plan.link_load[a][b] += routes.lent.bits_per_s_by_link[a][b];
    for (std::size_t s = 0; s < stripes; ++s) {
      RegionRoute& route = plan.routes.emplace_back();
      route.feeding_region.assign(regions.links.size(), regions.learner_region);
      for (const std::size_t i : routes.order[s]) {
        route.feeding_region[region_limits[i].region] = region_limits[routes.feeder[s][i]].region;
        route.order.push_back(region_limits[i].region);
      }
    }
    for (std::size_t i = 0; i < workers.size(); ++i) {
      const BitRate rate = plan.region_rates[workers[i].region];
      plan.worker_rates.push_back(plan.is_late[i] ? std::min(rate, workers[i].down) : rate);
    }
    return plan;
  };
  // At full use of every uplink, a worker may remain without a place. The parent that then takes it halves the rates of
  // its other children. So lower rates are tried while they may improve the result.
  RelayTrees best_trees;
  for (double fraction = 1; fraction > kLoweredRatesFractionMin; fraction -= kRateStep) {
    Rates rates = best_rates;
    for (double& rate : rates.to_relay) rate *= fraction;
    for (double& rate : rates.to_workers) rate *= fraction;
    const auto routes = MaxMinRates(learner_up, region_limits, stripes, regions).routes_for(rates);
    ECHO_CHECK(routes || fraction < 1);  // solve() has found routes for the full rates
    if (!routes) continue;
    RelayTrees trees{.plan = plan_for(rates, *routes), .topology = {}, .rate = {}};
    // Lower rates are not tried once even the planned rate is no better than that of the best trees.
    if (fraction < 1 && rate_at_quorum(trees.plan.worker_rates, quorum) <= best_trees.rate) break;
    build_relays(trees.plan, learner_up, workers, regions, trees.topology);
    trees.rate = steady_rate(trees.topology, learner_up, workers, quorum, regions);
    if (fraction == 1 || trees.rate > best_trees.rate) best_trees = std::move(trees);
  }
  return best_trees;
}

}  // namespace echoline::chains
