#include "chains/trees.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "chains/broadcast_model.hpp"
#include "chains/relays.hpp"

namespace echoline::chains {
namespace {

constexpr std::size_t kNobody = std::numeric_limits<std::size_t>::max();
// Children are kept, and extra ones accepted where no other parent exists, while all receive at this fraction of the
// best rate.
constexpr double kKept = 0.9;
constexpr double kRounding = 1 + 1e-9;
constexpr double kWorthBeingLate = 1.03;

std::vector<ChainWorker> those_in_time(std::span<const ChainWorker> workers, const std::vector<bool>& late) {
  std::vector<ChainWorker> in_time;
  for (std::size_t i = 0; i < workers.size(); ++i)
    if (!late[i]) in_time.push_back(workers[i]);
  return in_time;
}

BitRate taken_by_late(std::span<const ChainWorker> workers, const std::vector<bool>& late) {
  BitRate sum{0};
  for (std::size_t i = 0; i < workers.size(); ++i)
    if (late[i]) sum.bits_per_s += workers[i].down.bits_per_s;
  return sum;
}

// The limits for trees; `others`: uplink used for other workers.
StripeLimits tree_limits(BitRate others = {}) {
  StripeLimits limits;
  limits.children_max = kTreeChildrenMax;
  limits.others = others;
  return limits;
}

// The receiving rate of each worker, the late workers, and the routes.
struct Aims {
  std::vector<bool> late;
  std::vector<BitRate> rates;
  std::vector<RelayPaths> paths;              // of the stripes, with several regions (relays.hpp)
  std::vector<std::vector<double>> crossing;  // bit/s from region to region, with several regions
};

// One rate for all; late workers receive as fast as they can.
Aims aims_of(BitRate rate, std::span<const ChainWorker> workers, std::vector<bool> late) {
  Aims aims{std::move(late), {}, {}, {}};
  for (std::size_t i = 0; i < workers.size(); ++i)
    aims.rates.push_back(aims.late[i] ? std::min(rate, workers[i].down) : rate);
  return aims;
}

// Repairs trees. Workers are numbered by input order, the learner comes last.
class Mending {
 public:
  Mending(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers, Aims aims,
          std::optional<WorkerId> moved, const Regions& regions = {})
      : workers_(workers),
        regions_(regions),
        learner_(workers.size()),
        late_(std::move(aims.late)),
        paths_(std::move(aims.paths)),
        planned_(std::move(aims.crossing)),
        parents_(topology.stripes(), std::vector<std::size_t>(workers.size(), kNobody)),
        load_(workers.size() + 1, 0),
        sent_(workers.size() + 1, 0) {
    for (std::size_t i = 0; i < workers.size(); ++i) {
      up_.push_back(late_[i] ? 0 : workers[i].usable_up().bits_per_s);
      edge_.push_back(aims.rates[i].bits_per_s / static_cast<double>(parents_.size()));
      places_ = std::max<std::size_t>(places_, place(i) + 1);
    }
    up_.push_back(learner_up.bits_per_s);
    places_ = std::max<std::size_t>(places_, place(learner_) + 1);
    crossing_.assign(places_, std::vector<double>(places_, 0));
    keep(topology, moved);
    // In all stripes, attaches the relays before other workers, which could use up the links' capacity.
    for (std::size_t s = 0; s < parents_.size() && places_ > 1; ++s) mend(s, true);
    relayed_ = crossing_;
    for (std::size_t s = 0; s < parents_.size(); ++s) mend(s, false);
    for (std::vector<std::size_t>& parents : parents_) hang_late(parents);
  }

  // The rate of the workers in time: late children leave it to them, and they get at least an even share of all
  // children.
  BitRate rate() const {
    double rate = up_[learner_];
    std::vector<double> late(up_.size(), 0), children(up_.size(), 0), in_time(up_.size(), 0);
    for (const std::vector<std::size_t>& parents : parents_)
      for (std::size_t i = 0; i < parents.size(); ++i) {
        ++children[parents[i]];
        if (late_[i])
          late[parents[i]] += edge_[i];
        else
          ++in_time[parents[i]];
      }
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (!late_[i]) rate = std::min(rate, workers_[i].down.bits_per_s);
    for (std::size_t i = 0; i < up_.size(); ++i)
      if (in_time[i] > 0)
        rate = std::min(rate, static_cast<double>(parents_.size()) *
                                  std::max(up_[i] / children[i], (up_[i] - late[i]) / in_time[i]));
    return {rate};
  }

  // A worker's first child continues its chain.
  void write(Topology& topology) const {
    topology.further.resize(parents_.size() - 1);
    topology.grafts.assign(parents_.size(), {});
    for (std::size_t j = 0; j < parents_.size(); ++j) {
      const auto children = children_of(parents_[j]);
      Chains& chains = topology.stripe(j);
      chains.clear();
      std::deque<std::size_t> first(children[learner_].begin(), children[learner_].end());
      for (; !first.empty(); first.pop_front()) {
        if (const std::size_t root = parents_[j][first.front()]; root != learner_)
          topology.grafts[j][workers_[first.front()].id] = workers_[root].id;
        std::vector<WorkerId>& chain = chains.emplace_back();
        for (std::size_t at = first.front();; at = children[at].front()) {
          chain.push_back(workers_[at].id);
          if (children[at].empty()) break;
          first.insert(first.end(), children[at].begin() + 1, children[at].end());
        }
      }
    }
  }

 private:
  std::vector<std::vector<std::size_t>> children_of(const std::vector<std::size_t>& parents) const {
    std::vector<std::vector<std::size_t>> children(workers_.size() + 1);
    for (std::size_t i = 0; i < parents.size(); ++i)
      if (parents[i] != kNobody) children[parents[i]].push_back(i);
    return children;
  }

  // The region of a node.
  std::uint32_t place(std::size_t i) const {
    return !regions_.several() ? 0 : i == learner_ ? regions_.learner : workers_[i].region;
  }

  // Whether a parent's uplink carries one more child while all receive at this fraction of the best rate.
  bool carries(std::size_t parent, std::size_t child, double part) const {
    return (load_[parent] + edge_[child]) * part <= up_[parent] * kRounding &&
           (parent == learner_ || sent_[parent] < std::min(parents_.size() * kTreeChildrenMax, kPlannedChildrenMax));
  }
  // Whether the link between their regions carries it too.
  bool crosses(std::size_t parent, std::size_t child, double part) const {
    const auto from = place(parent), to = place(child);
    return (crossing_[from][to] + edge_[child]) * part <= regions_.rate(from, to).bits_per_s * kRounding;
  }

  void feed(std::vector<std::size_t>& parents, std::size_t child, std::size_t parent) {
    parents[child] = parent;
    load_[parent] += edge_[child];
    crossing_[place(parent)][place(child)] += edge_[child];
    ++sent_[parent];
  }

  void keep(const Topology& topology, std::optional<WorkerId> moved) {
    std::map<WorkerId, std::size_t> number{{kLearnerId, learner_}};
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (workers_[i].id != moved) number[workers_[i].id] = i;
    const auto before = topology.parents();
    for (const bool late : {false, true})
      for (std::size_t j = 0; j < parents_.size(); ++j)
        for (const auto& [id, parents] : before) {
          const auto child = number.find(id), parent = number.find(parents[j]);
          if (child == number.end() || parent == number.end() || late_[child->second] != late) continue;
          if (carries(parent->second, child->second, kKept) && crosses(parent->second, child->second, kKept))
            feed(parents_[j], child->second, parent->second);
        }
  }

  // Repairs one stripe: attaches each worker cut off from the learner, with all its descendants.
  void mend(std::size_t stripe, bool relays) {
    std::vector<std::size_t>& parents = parents_[stripe];
    const RelayPaths* paths = paths_.empty() ? nullptr : &paths_[stripe % paths_.size()];
    auto children = children_of(parents);
    std::vector<std::size_t> orphans, depth(workers_.size() + 1, kNobody);
    for (std::size_t i = 0; i < parents.size(); ++i)
      if (parents[i] == kNobody && !late_[i]) orphans.push_back(i);
    const auto spare = [&](std::size_t i) { return up_[i] - load_[i]; };
    std::stable_sort(orphans.begin(), orphans.end(), [&](auto a, auto b) { return spare(a) > spare(b); });

    using Open = std::set<std::pair<std::size_t, std::size_t>>;  // possible parents, by depth
    std::vector<Open> open(places_);                             // by region
    Open open_at_most;                                           // all of them, if there is one region
    const auto below = [&](std::size_t top) {                    // including itself
      std::vector<std::size_t> all{top};
      for (std::size_t k = 0; k < all.size(); ++k)
        all.insert(all.end(), children[all[k]].begin(), children[all[k]].end());
      return all;
    };
    const auto reached = [&](std::size_t top, std::size_t at) {
      depth[top] = at;
      for (const std::size_t i : below(top)) {
        if (i != top) depth[i] = depth[parents[i]] + 1;
        open[place(i)].emplace(depth[i], i);
        if (places_ == 1) open_at_most.emplace(depth[i], i);
      }
    };
    // Uplinks only fill here, so a parent without capacity is removed for good.
    const auto nearest = [&](Open& from, std::size_t child, double part, bool learner_too) {
      for (auto it = from.begin(); it != from.end();) {
        const std::size_t i = it->second;
        if (!carries(i, child, part) || (i != learner_ && children[i].size() >= kTreeChildrenMax))
          it = from.erase(it);
        else if ((i == learner_ && !learner_too) || !crosses(i, child, part))
          ++it;
        else
          return i;
      }
      return kNobody;
    };
    reached(learner_, 0);
    // The regions to search for a parent, in order, and whether the learner may be the parent.
    const auto ways_to = [&](std::size_t orphan) {
      const std::size_t home = place(orphan);
      const bool may_seed = workers_[orphan].may_seed;
      std::vector<std::pair<std::size_t, bool>> ways;
      // Planned inter-region capacity comes first, because local uplink is needed for other workers.
      for (std::size_t there = 0; there < std::min(planned_.size(), places_) && !relays; ++there)
        if (there != home && crossing_[there][home] + edge_[orphan] <= due(there, home, stripe) * kRounding)
          ways.emplace_back(there, may_seed);
      if (!may_seed) ways.emplace_back(home, false);
      ways.emplace_back(home, true);
      if (places_ == 1) return ways;
      ways.emplace_back(paths->from[home], true);
      for (std::size_t there = 0; there < places_; ++there)
        if (there != home) ways.emplace_back(there, true);
      return ways;
    };
    const auto hang = [&](std::size_t orphan) {
      std::size_t parent = kNobody;
      for (const auto& [there, learner_too] : ways_to(orphan))
        if (parent == kNobody) parent = nearest(open[there], orphan, 1, learner_too);
      // In a single region the nearest parent. With several regions an overloaded link delays all workers behind it, so
      // the least overloaded parent.
      if (parent == kNobody && places_ == 1) parent = nearest(open_at_most, orphan, kKept, true);
      if (parent == kNobody) parent = least_asked(orphan, depth, children);
      feed(parents, orphan, parent);
      children[parent].push_back(orphan);
      reached(orphan, depth[parent] + 1);
    };
    if (relays) return hang_relays(*paths, orphans, below, depth, hang);
    for (const std::size_t orphan : orphans)
      if (depth[orphan] == kNobody) hang(orphan);
  }

  // The planned traffic between two regions up to this stripe, spread evenly over stripes.
  double due(std::size_t from, std::size_t to, std::size_t stripe) const {
    const double part = static_cast<double>(stripe + 1) / static_cast<double>(parents_.size());
    return relayed_[from][to] + (planned_[from][to] - relayed_[from][to]) * part;
  }

  // In every region that is not reached, attaches the orphan with the most descendants as relay.
  void hang_relays(const RelayPaths& paths, const std::vector<std::size_t>& orphans, const auto& below,
                   const std::vector<std::size_t>& depth, const auto& hang) const {
    std::vector<std::size_t> relay(places_, kNobody), behind(places_, 0);
    std::vector<bool> entered(places_, false);
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (depth[i] != kNobody) entered[place(i)] = true;
    for (const std::size_t orphan : orphans)
      if (const std::size_t n = below(orphan).size(); !entered[place(orphan)] && n > behind[place(orphan)]) {
        relay[place(orphan)] = orphan;
        behind[place(orphan)] = n;
      }
    for (const std::uint32_t region : paths.order) {
      if (relay[region] == kNobody) continue;
      double helped = 0;  // uplink lent to the learner's own region, so that the learner can serve others
      for (std::size_t there = 0; there < places_ && region == place(learner_); ++there)
        if (there != region) helped += planned_[there][region] - crossing_[there][region];
      if (helped < edge_[relay[region]] / 2) hang(relay[region]);
    }
  }

  std::size_t least_asked(std::size_t child, const std::vector<std::size_t>& depth,
                          const std::vector<std::vector<std::size_t>>& children) const {
    const auto load = [&](std::size_t i) {
      const auto from = place(i), to = place(child);
      return std::max((load_[i] + edge_[child]) / up_[i],
                      (crossing_[from][to] + edge_[child]) / regions_.rate(from, to).bits_per_s);
    };
    std::size_t best = learner_;
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (depth[i] != kNobody && up_[i] > 0 && children[i].size() < kTreeChildrenMax && load(i) < load(best)) best = i;
    return best;
  }

  // Attaches late workers where most uplink is spare. The learner's uplink is valuable, so it is used last.
  void hang_late(std::vector<std::size_t>& parents) {
    std::vector<std::size_t> late, children(up_.size(), 0);
    for (std::size_t i = 0; i < parents.size(); ++i) {
      if (parents[i] != kNobody) ++children[parents[i]];
      if (parents[i] == kNobody) late.push_back(i);
    }
    if (late.empty()) return;
    // by region; negated, so the largest is first
    std::vector<std::set<std::pair<double, std::size_t>>> by_spare(places_);
    const auto spare = [&](std::size_t i) { return up_[i] - load_[i]; };
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (up_[i] > 0 && children[i] < kTreeChildrenMax) by_spare[place(i)].emplace(-spare(i), i);
    // Whether the parent with most spare uplink there, and the link, carry one more child.
    const auto carrying = [&](std::size_t there, std::size_t child) {
      const auto& open = by_spare[there];
      return !open.empty() && carries(open.begin()->second, child, 1) && crosses(open.begin()->second, child, 1);
    };
    for (const std::size_t child : late) {
      const std::size_t home = place(child);
      std::size_t there = home;
      for (std::size_t k = 0; k < places_ && places_ > 1 && !carrying(there, child); ++k)
        if (carrying(k, child)) there = k;
      if (by_spare[there].empty()) there = place(learner_);
      auto& open = by_spare[there];
      std::size_t parent = learner_;
      if (!open.empty() &&
          (carrying(there, child) || home != place(learner_) || spare(learner_) <= -open.begin()->first)) {
        parent = open.begin()->second;
        open.erase(open.begin());
      }
      feed(parents, child, parent);
      if (parent != learner_ && ++children[parent] < kTreeChildrenMax) open.emplace(-spare(parent), parent);
    }
  }

  std::span<const ChainWorker> workers_;
  const Regions regions_;
  std::size_t learner_;
  std::size_t places_ = 1;  // regions up to the highest with a node
  std::vector<bool> late_;
  std::vector<RelayPaths> paths_;
  // Like crossing_; relayed_: its value once all relays are attached.
  std::vector<std::vector<double>> planned_, relayed_;
  std::vector<std::vector<std::size_t>> parents_;  // by stripe and worker
  std::vector<double> up_, edge_;                  // bit/s: uplink, and the rate of one edge to the node
  std::vector<double> load_;                       // bit/s to its children
  std::vector<std::vector<double>> crossing_;      // bit/s from region to region
  std::vector<std::size_t> sent_;                  // children in all stripes
};

}  // namespace

// Considers one payload with 0, 1, 2, ... late workers, slowest downlinks first.
std::vector<bool> late_workers(BitRate learner_up, std::span<const ChainWorker> workers, double quorum) {
  ECHO_CHECK(!workers.empty());
  const std::size_t n = workers.size();
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return workers[a].down < workers[b].down; });
  const auto down = [&](std::size_t place) { return workers[order[place]].down.bits_per_s; };
  const std::size_t in_quorum = counted(quorum, n);
  double up = learner_up.bits_per_s;  // of the learner and the workers in time
  for (const ChainWorker& w : workers) up += w.usable_up().bits_per_s;
  struct Line {
    std::size_t late;
    double quorum_time, mean_time;  // per bit
  };
  std::vector<Line> lines;
  double taken = 0, late_time = 0;  // of late workers
  for (std::size_t late = 0; late < n; ++late) {
    if (late > 0) {
      taken += down(late - 1);
      late_time += 1 / down(late - 1);
      up -= workers[order[late - 1]].usable_up().bits_per_s;
    }
    const double carried = late > 0 ? kSharedOut * up - taken : up;
    const double rate = std::min({learner_up.bits_per_s, down(late), carried / static_cast<double>(n - late)});
    if (rate <= 0 || (late > 0 && rate < down(late - 1))) continue;  // a worker that could be faster is not late
    const double last_counted = late <= n - in_quorum ? rate : std::min(rate, down(n - in_quorum));
    lines.push_back({late, 1 / last_counted, (static_cast<double>(n - late) / rate + late_time) / n});
  }
  std::vector<bool> is_late(n, false);
  if (lines.empty()) return is_late;
  double least = lines.front().quorum_time;
  for (const Line& line : lines) least = std::min(least, line.quorum_time);
  std::erase_if(lines, [&](const Line& line) { return line.quorum_time > least * kWorthBeingLate; });
  least = lines.front().mean_time;
  for (const Line& line : lines) least = std::min(least, line.mean_time);
  const auto drawn = std::find_if(lines.begin(), lines.end(),
                                  [&](const Line& line) { return line.mean_time <= least * kWorthBeingLate; });
  for (std::size_t place = 0; place < drawn->late; ++place) is_late[order[place]] = true;
  return is_late;
}

TreePlan plan_trees(BitRate learner_up, std::span<const ChainWorker> workers, double quorum) {
  TreePlan plan;
  plan.late = late_workers(learner_up, workers, quorum);
  plan.stripes =
      plan_stripes(learner_up, those_in_time(workers, plan.late), tree_limits(taken_by_late(workers, plan.late)));
  return plan;
}

namespace {

// For workers that are all in time.
void build(const StripePlan& plan, std::span<const ChainWorker> workers, Topology& topology) {
  const std::size_t s = plan.stripes, n = workers.size();
  std::vector<std::size_t> left = plan.forwards, order(n), children(n);
  const std::size_t planned = std::accumulate(left.begin(), left.end(), std::size_t{0});
  const std::size_t seeds = s * n - std::min(planned, s * (n - 1));
  topology.further.resize(s - 1);
  topology.grafts.assign(s, {});
  for (std::size_t j = 0; j < s; ++j) {
    // Workers with most children left come first, so that the remaining stripes can use all of them.
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return left[a] > left[b]; });
    std::size_t from_learner = seeds / s + (j < seeds % s), wanted = n - from_learner;
    std::fill(children.begin(), children.end(), 0);
    for (const std::size_t i : order) {
      children[i] = std::min({left[i], wanted, kTreeChildrenMax});
      left[i] -= children[i];
      wanted -= children[i];
    }
    from_learner += wanted;
    // Placement order: workers with children first, then possible seeds, then by number of children.
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return std::tuple(children[a] == 0, !workers[a].may_seed, children[b]) <
             std::tuple(children[b] == 0, !workers[b].may_seed, children[a]);
    });
    constexpr std::size_t kLearner = std::numeric_limits<std::size_t>::max();
    std::deque<std::size_t> open(from_learner, kLearner);  // free places, by parent
    std::map<std::size_t, std::size_t> tails;              // worker -> chain whose tail it is
    Chains& chains = topology.stripe(j);
    for (const std::size_t i : order) {
      const std::size_t parent = open.front();
      open.pop_front();
      open.insert(open.end(), children[i], i);
      if (const auto tail = parent == kLearner ? tails.end() : tails.find(parent); tail != tails.end()) {
        chains[tail->second].push_back(workers[i].id);
        tails[i] = tail->second;
        tails.erase(tail);
        continue;
      }
      if (parent != kLearner) topology.grafts[j][workers[i].id] = workers[parent].id;
      tails[i] = chains.size();
      chains.push_back({workers[i].id});
    }
  }
}

}  // namespace

void build_trees(const TreePlan& plan, BitRate learner_up, std::span<const ChainWorker> workers, Topology& topology) {
  const auto in_time = those_in_time(workers, plan.late);
  build(plan.stripes, in_time, topology);
  if (in_time.size() < workers.size())
    Mending(topology, learner_up, workers, aims_of({std::max(1.0, plan.stripes.rate.bits_per_s)}, workers, plan.late),
            {})
        .write(topology);
}

void grow_trees(BitRate rate, std::size_t stripes, BitRate source, std::span<const ChainWorker> workers, BitRate others,
                Topology& topology) {
  StripePlan plan = plan_at(rate, stripes, source, workers, tree_limits());
  // `others` comes from the uplink that the workers do not need themselves.
  const auto edges = static_cast<std::size_t>(
      std::ceil(others.bits_per_s / rate.bits_per_s * static_cast<double>(stripes) / kRounding));
  const std::size_t carried = plan.carried, kept = carried - std::min(carried, edges);
  std::size_t total = std::accumulate(plan.forwards.begin(), plan.forwards.end(), std::size_t{0});
  for (; total > kept; --total) --*std::max_element(plan.forwards.begin(), plan.forwards.end());
  build(plan, workers, topology);
}

void hang_up(const RelayPlan& plan, BitRate learner_up, std::span<const ChainWorker> workers, const Regions& regions,
             Topology& topology) {
  Mending(topology, learner_up, workers, {plan.late, plan.rates, plan.stripes, plan.crossing}, {}, regions)
      .write(topology);
}

BitRate steady_rate(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers, double quorum,
                    const Regions& regions) {
  constexpr Bytes kLarge{std::uint64_t{1} << 40}, kChunk{std::uint64_t{1} << 20};
  std::vector<WorkerLink> links;
  for (const ChainWorker& w : workers) links.push_back({w.id, w.up, w.down, {}, w.region});
  const auto times = broadcast_time(topology, kLarge, kChunk, learner_up, links, regions);
  return times ? BitRate::from_bytes_per_s(static_cast<double>(kLarge.count) / seconds(times->fraction(quorum)))
               : BitRate{1};
}

MendedTrees mend_trees(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers,
                       double quorum, std::optional<WorkerId> moved, const Regions& regions) {
  ECHO_CHECK(topology.policy == TopologyPolicy::kTrees && topology.size() > 0);
  MendedTrees mended;
  mended.topology.policy = TopologyPolicy::kTrees;
  if (workers.empty()) return mended;
  const bool relays = spread_out(workers, regions);
  Aims aims;
  if (relays) {
    const RelayTrees anew = plan_relays(learner_up, workers, quorum, regions);
    mended.best = anew.rate;
    aims = {anew.plan.late, anew.plan.rates, anew.plan.stripes, anew.plan.crossing};
  } else {
    const TreePlan best = plan_trees(learner_up, workers, quorum);
    mended.best = best.stripes.rate;
    const BitRate rate = best_rate(topology.stripes(), learner_up, those_in_time(workers, best.late),
                                   tree_limits(taken_by_late(workers, best.late)));
    aims = aims_of({std::max(1.0, rate.bits_per_s)}, workers, best.late);
  }
  for (std::size_t i = 0; i < workers.size(); ++i)
    if (!workers[i].may_forward || aims.late[i]) mended.topology.leaves_only.push_back(workers[i].id);
  std::sort(mended.topology.leaves_only.begin(), mended.topology.leaves_only.end());
  const Mending mending(topology, learner_up, workers, std::move(aims), moved, relays ? regions : Regions{});
  mending.write(mended.topology);
  mended.topology.chains_wanted = mended.topology.chains.size();
  mended.rate = relays ? steady_rate(mended.topology, learner_up, workers, quorum, regions) : mending.rate();
  return mended;
}

}  // namespace echoline::chains
