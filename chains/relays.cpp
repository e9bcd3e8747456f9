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
constexpr double kWorthMoreStripes = 0.97;  // more stripes must reduce the time to this fraction
constexpr double kWeightOfMean = 0.05;      // of the mean time, added to the quorum's
constexpr int kBisections = 20;
constexpr double kLessTried = 0.02;  // fraction by which rates are lowered if no trees reach them

// A region with the link rates of its workers.
struct Vessel {
  std::uint32_t region = 0;
  std::vector<double> up;    // of workers in time, bit/s
  std::vector<double> late;  // downlinks of late workers
  double down = kInfinite;   // least downlink of workers in time
};

// The rates of the regions, by index here; index 0 is the learner's region.
struct Rates {
  std::vector<double> into;    // receiving rate of relays, bit/s
  std::vector<double> inside;  // receiving rate of workers in time, at most `into`
};

// The routes of all stripes, and the traffic that leaves every region over them.
struct Ways {
  std::vector<std::vector<std::size_t>> from;   // by stripe and index
  std::vector<std::vector<std::size_t>> order;  // by stripe: indices
  std::vector<double> onward;                   // by index, bit/s
  std::vector<std::vector<double>> taken;       // by link, of region and region
  Lending lent;                                 // in addition
};

class Filling {
 public:
  Filling(BitRate learner_up, const std::vector<Vessel>& vessels, std::size_t stripes, const Regions& regions)
      : up_(learner_up.bits_per_s), vessels_(vessels), stripes_(stripes), regions_(regions) {}

  Rates fill() const {
    const std::size_t n = vessels_.size();
    std::vector<double> into(n, kInfinite), inside(n, kInfinite);  // upper limits known so far
    for (std::size_t i = 0; i < n; ++i) into[i] = std::min(up_, vessels_[i].down);
    const auto at = [&](double x) {
      Rates rates{into, inside};
      for (std::size_t i = 0; i < n; ++i) {
        rates.into[i] = std::max(1.0, std::min(x, into[i]));
        rates.inside[i] = std::max(1.0, std::min(rates.into[i], inside[i]));
      }
      return rates;
    };
    double low = 1;
    for (;;) {
      if (served(at(up_))) return at(up_);
      double high = up_;
      for (int i = 0; i < kBisections; ++i) {
        const double middle = (low + high) / 2;
        (served(at(middle)) ? low : high) = middle;
      }
      const Rates now = at(low);
      // The limiting regions stay at their rate: first an unreachable region, then those with the largest deficit.
      const auto held = [&](std::size_t i) { return std::min(into[i], inside[i]) <= now.inside[i]; };
      const auto others_go_on = [&] { return served(at(low * 1.01)); };
      std::vector<std::size_t> order = most_lacking(at(low * 1.01));
      std::erase_if(order, held);
      if (order.empty()) return now;
      for (const std::size_t i : order) {
        inside[i] = now.inside[i];
        if (others_go_on()) break;
        into[i] = now.into[i];
        if (others_go_on()) break;
      }
    }
  }

  // The routes for these rates; nothing if they are not feasible. Rates from fill() are.
  std::optional<Ways> ways(const Rates& rates) const {
    Ways found;
    const Capacities c = capacities(rates);
    if (find_ways(rates, c, found) != kAll) return std::nullopt;
    found.lent = lend_over(c, found);
    return found;
  }

 private:
  struct Capacities {
    std::vector<double> own, spare;  // a region's total uplink, and the part that its own workers do not need
  };

  double carried(double up, double rate, std::size_t most) const {
    const double edge = rate / static_cast<double>(stripes_);
    return std::min(std::floor(up / edge * kRounding), static_cast<double>(most)) * edge;
  }

  Capacities capacities(const Rates& rates) const {
    Capacities c;
    for (std::size_t i = 0; i < vessels_.size(); ++i) {
      const Vessel& v = vessels_[i];
      const double rate = rates.inside[i];
      double own = i == 0 ? carried(up_, rate, std::numeric_limits<std::uint32_t>::max()) : 0;
      for (const double up : v.up) own += carried(up, rate, std::min(stripes_ * kTreeChildrenMax, kPlannedChildrenMax));
      double needed = (static_cast<double>(v.up.size()) - (i == 0 ? 0 : 1)) * rate;
      for (const double down : v.late) needed += std::min(down, rate);
      c.own.push_back(own);
      c.spare.push_back(own - needed);
    }
    return c;
  }

  // Indices of regions: first an unreachable one, then by surplus, smallest first.
  std::vector<std::size_t> most_lacking(const Rates& rates) const {
    const Capacities c = capacities(rates);
    Ways ways;
    const std::size_t cut_off = find_ways(rates, c, ways);
    std::vector<double> left;
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < vessels_.size(); ++i) {
      order.push_back(i);
      left.push_back(i == cut_off ? -kInfinite : c.spare[i] - ways.onward[i]);
    }
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return left[a] < left[b]; });
    return order;
  }

  // Routes each stripe from the learner's region to one region after another. Each step takes the route with most
  // capacity left, of the link and of the uplinks at its start; if there is plenty, the shortest. Returns the index of
  // a region without a feasible route, or kAll if all have one.
  static constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();
  std::size_t find_ways(const Rates& rates, Capacities left, Ways& ways) const {
    const std::size_t n = vessels_.size();
    ways.onward.assign(n, 0);
    ways.taken.assign(regions_.ways.size(), std::vector<double>(regions_.ways.size(), 0));
    for (std::size_t s = 0; s < stripes_; ++s) {
      struct Reach {
        double spare = -1, own = -1, far = 0;  // capacities as numbers of stripes; negated seconds
        auto operator<=>(const Reach&) const = default;
      };
      std::vector<Reach> reach(n);
      std::vector<std::size_t> from(n, 0), order{0};
      std::vector<double> far(n, 0);
      std::vector<bool> in(n, false);
      in[0] = true;
      for (std::size_t last = 0;;) {
        for (std::size_t i = 1; i < n; ++i) {
          // Only the learner itself can feed a region that receives faster than the region before it.
          const bool faster = rates.into[last] < rates.into[i] * 0.999;
          if (in[i] || (faster && last != 0)) continue;
          const double most = faster ? up_ - (vessels_[0].up.empty() ? 0 : rates.into[0]) - ways.onward[0] : kInfinite;
          const auto a = vessels_[last].region, b = vessels_[i].region;
          const double edge = rates.into[i] / static_cast<double>(stripes_), all = 4 * static_cast<double>(stripes_);
          const double way = regions_.rate(a, b).bits_per_s - ways.taken[a][b];
          const auto edges = [&](double rate) {
            return std::clamp(std::floor(std::min(rate, way) / edge * kRounding), 0.0, all);
          };
          const Reach over{edges(std::min(most, left.spare[last])), edges(std::min(most, left.own[last])),
                           far[last] - seconds(regions_.delay(a, b, {}))};
          if (over <= reach[i]) continue;
          reach[i] = over;
          from[i] = last;
        }
        std::size_t next = n;
        for (std::size_t i = 1; i < n; ++i)
          if (!in[i] && (next == n || reach[i] > reach[next])) next = i;
        if (next == n) break;
        if (reach[next].own < 1) return next;
        const double edge = rates.into[next] / static_cast<double>(stripes_);
        ways.taken[vessels_[from[next]].region][vessels_[next].region] += edge;
        ways.onward[from[next]] += edge;
        left.spare[from[next]] -= edge;
        left.own[from[next]] -= edge;
        far[next] = reach[next].far;
        in[next] = true;
        order.push_back(next);
        last = next;
      }
      ways.from.push_back(std::move(from));
      ways.order.push_back(std::move(order));
    }
    return kAll;
  }

  // Whether uplinks and links suffice for these rates.
  bool served(const Rates& rates) const {
    const Capacities c = capacities(rates);
    Ways ways;
    if (find_ways(rates, c, ways) != kAll) return false;
    // The learner sends the first copy of every stripe.
    if (up_ < (vessels_[0].up.empty() ? *std::max_element(rates.into.begin(), rates.into.end()) : rates.into[0]))
      return false;
    double lacking = 0, all = 0;
    for (std::size_t i = 0; i < vessels_.size(); ++i) {
      const double left = c.spare[i] - ways.onward[i];
      lacking -= std::min(left, 0.0);
      all += left;
    }
    if (lacking <= 1) return true;
    return all > -1 && lend_over(c, ways).all >= lacking / kRounding - 1;
  }

  // Uplink that regions lend to others, beyond the traffic of these routes.
  Lending lend_over(const Capacities& c, const Ways& ways) const {
    std::vector<double> spare(regions_.ways.size(), 0), through(spare);
    for (std::size_t i = 0; i < vessels_.size(); ++i) {
      const double onward = ways.onward[i], needed = c.own[i] - c.spare[i];
      spare[vessels_[i].region] = c.spare[i] - onward;
      through[vessels_[i].region] = std::max(0.0, std::min(needed, c.own[i] - onward));
    }
    return lend(regions_, spare, through, ways.taken);
  }

  double up_;
  const std::vector<Vessel>& vessels_;
  std::size_t stripes_;
  const Regions& regions_;
};

// Time per bit until a fraction `quorum` of the workers has it.
double time_of(const Rates& rates, const std::vector<Vessel>& vessels, double quorum) {
  std::vector<double> times;
  for (std::size_t i = 0; i < vessels.size(); ++i) {
    times.insert(times.end(), vessels[i].up.size(), 1 / rates.inside[i]);
    for (const double down : vessels[i].late) times.push_back(1 / std::min(down, rates.inside[i]));
  }
  const double mean = std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size());
  const auto last = times.begin() + static_cast<std::ptrdiff_t>(counted(quorum, times.size())) - 1;
  std::nth_element(times.begin(), last, times.end());
  return *last + kWeightOfMean * mean;
}

// Marks a chain that is not attached yet.
constexpr WorkerId kNoRoot{std::numeric_limits<std::uint64_t>::max()};

// The rate that a fraction `quorum` of the workers reaches.
BitRate nth_rate(std::vector<BitRate> rates, double quorum) {
  const auto nth = rates.end() - static_cast<std::ptrdiff_t>(counted(quorum, rates.size()));
  std::nth_element(rates.begin(), nth, rates.end());
  return *nth;
}

// Builds each region's trees of the workers in time. Then hang_up() attaches the first workers of the trees to another
// region's workers, along the routes or to lent uplink.
void build_relays(const RelayPlan& plan, BitRate learner_up, std::span<const ChainWorker> workers,
                  const Regions& regions, Topology& topology) {
  const std::size_t stripes = plan.stripes.size();
  topology.policy = TopologyPolicy::kTrees;
  topology.further.assign(stripes - 1, {});
  topology.grafts.assign(stripes, {});
  for (const std::uint32_t region : plan.stripes.front().order) {
    std::vector<ChainWorker> there;
    // Uplink of this region for other regions and for late workers.
    double others = std::accumulate(plan.crossing[region].begin(), plan.crossing[region].end(), 0.0);
    for (std::size_t i = 0; i < workers.size(); ++i) {
      if (workers[i].region == region && !plan.late[i]) there.push_back(workers[i]);
      if (workers[i].region == region && plan.late[i]) others += plan.rates[i].bits_per_s;
    }
    if (there.empty()) continue;
    const bool home = region == regions.learner;
    const BitRate rate = plan.by_region[region];
    double first = 0;  // the learner's uplink for this region: all that is not needed for other regions
    if (home) {
      double carried = learner_up.bits_per_s - others;
      first = std::max(rate.bits_per_s, carried);
      for (const ChainWorker& w : there) carried += w.usable_up().bits_per_s;
      first = std::clamp(first, 0.0, std::max(0.0, carried));
      others = std::max(0.0, others - (learner_up.bits_per_s - first));
    }
    Topology inner;
    inner.policy = TopologyPolicy::kTrees;
    grow_trees(rate, stripes, {std::max(rate.bits_per_s, first)}, there, {others}, inner);
    const auto seeds = static_cast<std::size_t>(first / rate.bits_per_s * static_cast<double>(stripes) * kRounding);
    for (std::size_t s = 0; s < stripes; ++s) {
      std::size_t left = seeds / stripes + (s < seeds % stripes);
      for (std::vector<WorkerId>& chain : inner.stripe(s)) {
        WorkerId root = inner.root_of(s, chain.front());
        if (root == kLearnerId && left-- == 0) {
          root = kNoRoot;
          left = 0;
        }
        if (root != kLearnerId) topology.grafts[s][chain.front()] = root;
        topology.stripe(s).push_back(std::move(chain));
      }
    }
  }
  hang_up(plan, learner_up, workers, regions, topology);
}

}  // namespace

bool spread_out(std::span<const ChainWorker> workers, const Regions& regions) {
  return regions.several() &&
         std::any_of(workers.begin(), workers.end(), [&](const ChainWorker& w) { return w.region != regions.learner; });
}

RelayTrees plan_relays(BitRate learner_up, std::span<const ChainWorker> workers, double quorum,
                       const Regions& regions) {
  ECHO_CHECK(spread_out(workers, regions));
  std::map<std::uint32_t, std::vector<std::size_t>> members;
  for (std::size_t i = 0; i < workers.size(); ++i) members[workers[i].region].push_back(i);
  std::vector<bool> is_late(workers.size(), false);
  std::vector<Vessel> vessels{{regions.learner, {}, {}}};
  for (const auto& [region, of] : members) {
    Vessel& v = region == regions.learner ? vessels.front() : vessels.emplace_back(Vessel{region, {}, {}});
    std::vector<ChainWorker> there;
    for (const std::size_t i : of) there.push_back(workers[i]);
    const std::vector<bool> late = late_workers(learner_up, there, quorum);
    for (std::size_t k = 0; k < of.size(); ++k) {
      is_late[of[k]] = late[k];
      if (late[k]) {
        v.late.push_back(there[k].down.bits_per_s);
        continue;
      }
      v.up.push_back(there[k].usable_up().bits_per_s);
      v.down = std::min(v.down, there[k].down.bits_per_s);
    }
  }
  std::size_t stripes = 0;
  Rates best;
  double time = kInfinite;
  for (std::size_t s = kTreeStripesMin; s <= kPlannedStripesMax; s *= 2) {
    Rates rates = Filling(learner_up, vessels, s, regions).fill();
    const double t = time_of(rates, vessels, quorum);
    if (stripes > 0 && t >= kWorthMoreStripes * time) continue;
    best = std::move(rates);
    time = t;
    stripes = s;
  }
  const auto plan_for = [&](const Rates& rates, const Ways& ways) {
    RelayPlan plan;
    plan.late = is_late;
    plan.by_region.assign(regions.ways.size(), learner_up);
    for (std::size_t i = 0; i < vessels.size(); ++i) plan.by_region[vessels[i].region] = {rates.inside[i]};
    plan.crossing = ways.taken;
    for (std::size_t a = 0; a < plan.crossing.size(); ++a)
      for (std::size_t b = 0; b < plan.crossing.size(); ++b) plan.crossing[a][b] += ways.lent.over[a][b];
    for (std::size_t s = 0; s < stripes; ++s) {
      RelayPaths& paths = plan.stripes.emplace_back();
      paths.from.assign(regions.ways.size(), regions.learner);
      for (const std::size_t i : ways.order[s]) {
        paths.from[vessels[i].region] = vessels[ways.from[s][i]].region;
        paths.order.push_back(vessels[i].region);
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
  RelayTrees found;
  for (double part = 1; part > 0.9; part -= kLessTried) {
    Rates rates = best;
    for (double& rate : rates.into) rate *= part;
    for (double& rate : rates.inside) rate *= part;
    const auto ways = Filling(learner_up, vessels, stripes, regions).ways(rates);
    ECHO_CHECK(ways || part < 1);
    if (!ways) continue;
    RelayTrees trees{plan_for(rates, *ways), {}, {}};
    if (part < 1 && nth_rate(trees.plan.rates, quorum) <= found.rate) break;
    build_relays(trees.plan, learner_up, workers, regions, trees.topology);
    trees.rate = steady_rate(trees.topology, learner_up, workers, quorum, regions);
    if (part == 1 || trees.rate > found.rate) found = std::move(trees);
  }
  return found;
}

}  // namespace echoline::chains
