// Plans, builds and repairs trees, for plan_chains(), plan_relays() and the learner's topology. A stripe is a share of
// the payload's chunks that has a tree of its own over all workers. A late worker has too slow a downlink for the
// trees; the others are in time.
#include "chains/trees.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <unordered_map>

#include "chains/broadcast_model.hpp"
#include "chains/relays.hpp"

namespace echoline::chains {
namespace {

// Stands for no parent, for no relay, or for the depth of a worker that the learner does not reach.
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
// A parent keeps its children as long as its uplink gives each child this fraction of the best rate. On this condition,
// it also takes another child that no other parent can take. Below 1, so that small changes of measured rates move no
// worker.
constexpr double kRateFractionMin = 0.9;
constexpr double kRounding = 1 + 1e-9;   // a ratio that misses an integer by this factor counts as that integer
constexpr double kLateTolerance = 1.03;  // times within this factor count as equal, so fewer workers are made late

std::vector<ChainWorker> workers_in_time(std::span<const ChainWorker> workers, const std::vector<bool>& is_late) {
  std::vector<ChainWorker> in_time;
  for (std::size_t i = 0; i < workers.size(); ++i)
    if (!is_late[i]) in_time.push_back(workers[i]);
  return in_time;
}

// The downlinks of all late workers together.
BitRate late_download_rate(std::span<const ChainWorker> workers, const std::vector<bool>& is_late) {
  BitRate sum{0};
  for (std::size_t i = 0; i < workers.size(); ++i)
    if (is_late[i]) sum.bits_per_s += workers[i].down.bits_per_s;
  return sum;
}

// The limits for trees. `reserved_up`: uplink reserved for late workers.
StripeLimits tree_limits(BitRate reserved_up = {}) {
  StripeLimits limits;
  limits.children_per_stripe_max = kTreeChildrenMax;
  limits.reserved_up = reserved_up;
  return limits;
}

// The targets of a repair: the late workers, each worker's receiving rate, and the traffic between regions.
struct TreeTargets {
  std::vector<bool> is_late;
  std::vector<BitRate> worker_rates;
  std::vector<RegionRoute> routes;             // by stripe; empty if there is one region (relays.hpp)
  std::vector<std::vector<double>> link_load;  // planned bit/s, [from][to] by region; empty if there is one region
};

// Targets of one region: `rate` for all workers, except that a late worker receives at most its downlink.
TreeTargets tree_targets(BitRate rate, std::span<const ChainWorker> workers, std::vector<bool> is_late) {
  TreeTargets targets{.is_late = std::move(is_late), .worker_rates = {}, .routes = {}, .link_load = {}};
  for (std::size_t i = 0; i < workers.size(); ++i)
    targets.worker_rates.push_back(targets.is_late[i] ? std::min(rate, workers[i].down) : rate);
  return targets;
}

// A repair attaches the relays of all regions first (relays.hpp), and in a second pass the other workers in time.
enum class RepairPass { kRelays, kOtherWorkers };

// Repairs trees in its constructor, so that every worker has a parent; write_chains() writes the result. Workers are
// numbered by input order, the learner comes last. An orphan is a worker in time without a parent. `reattached`: a
// worker whose old edges, up and down, are not kept.
class TreeRepair {
 public:
  TreeRepair(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers, TreeTargets targets,
             std::optional<WorkerId> reattached, const Regions& regions = {})
      : workers_(workers),
        regions_(regions),
        learner_(workers.size()),
        is_late_(std::move(targets.is_late)),
        routes_(std::move(targets.routes)),
        planned_link_load_(std::move(targets.link_load)),
        parents_(topology.stripes(), std::vector<std::size_t>(workers.size(), kNone)),
        uplink_load_(workers.size() + 1, 0),
        child_count_(workers.size() + 1, 0) {
    for (std::size_t i = 0; i < workers.size(); ++i) {
      up_.push_back(is_late_[i] ? 0 : workers[i].forwarding_up().bits_per_s);  // late workers forward nothing
      edge_rate_.push_back(targets.worker_rates[i].bits_per_s / static_cast<double>(stripe_count()));
      region_count_ = std::max<std::size_t>(region_count_, region_of(i) + 1);
    }
    up_.push_back(learner_up.bits_per_s);  // the learner has the last index
    region_count_ = std::max<std::size_t>(region_count_, region_of(learner_) + 1);
    link_load_.assign(region_count_, std::vector<double>(region_count_, 0));
    keep_old_edges(topology, reattached);
    // A region's relay in a stripe is the worker that another region feeds. Attaches the relays of all stripes before
    // other workers, which could use up the links' capacity.
    for (std::size_t s = 0; s < stripe_count() && region_count_ > 1; ++s) repair_stripe(s, RepairPass::kRelays);
    relay_link_load_ = link_load_;  // the traffic of relays alone
    for (std::size_t s = 0; s < stripe_count(); ++s) repair_stripe(s, RepairPass::kOtherWorkers);
    for (std::vector<std::size_t>& parents : parents_) attach_late(parents);
  }

  // Returns the rate that every worker in time reaches. A parent's children in time share the uplink that its late
  // children leave over, and each gets at least an even share among all children. An edge carries one stripe, so a
  // worker's rate is that of an edge times the number of stripes.
  BitRate in_time_rate() const {
    double rate = up_[learner_];
    std::vector<double> late_load(up_.size(), 0), child_counts(up_.size(), 0), in_time_counts(up_.size(), 0);
    for (const std::vector<std::size_t>& parents : parents_)
      for (std::size_t i = 0; i < parents.size(); ++i) {
        ++child_counts[parents[i]];
        if (is_late_[i])
          late_load[parents[i]] += edge_rate_[i];
        else
          ++in_time_counts[parents[i]];
      }
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (!is_late_[i]) rate = std::min(rate, workers_[i].down.bits_per_s);
    for (std::size_t i = 0; i < up_.size(); ++i) {
      if (in_time_counts[i] <= 0) continue;
      const double even_share = up_[i] / child_counts[i];
      const double share_beside_late = (up_[i] - late_load[i]) / in_time_counts[i];
      const double in_time_edge_rate = std::max(even_share, share_beside_late);
      rate = std::min(rate, static_cast<double>(stripe_count()) * in_time_edge_rate);
    }
    return {rate};
  }

  // Writes the trees as chains. A worker's first child continues its chain. Each other child begins a chain, which
  // `grafts` attaches to the worker.
  void write_chains(Topology& topology) const {
    topology.further_stripes.resize(stripe_count() - 1);
    topology.grafts.assign(stripe_count(), {});
    for (std::size_t s = 0; s < stripe_count(); ++s) {
      const auto children = children_of(parents_[s]);
      Chains& chains = topology.stripe(s);
      chains.clear();
      std::deque<std::size_t> chain_heads(children[learner_].begin(), children[learner_].end());
      for (; !chain_heads.empty(); chain_heads.pop_front()) {
        const std::size_t head = chain_heads.front(), parent = parents_[s][head];
        if (parent != learner_) topology.grafts[s][workers_[head].id] = workers_[parent].id;
        std::vector<WorkerId>& chain = chains.emplace_back();
        for (std::size_t node = head;; node = children[node].front()) {
          chain.push_back(workers_[node].id);
          if (children[node].empty()) break;
          chain_heads.insert(chain_heads.end(), children[node].begin() + 1, children[node].end());
        }
      }
    }
  }

 private:
  std::size_t stripe_count() const { return parents_.size(); }

  // By worker, and last for the learner: its children in the stripe with these parents.
  std::vector<std::vector<std::size_t>> children_of(const std::vector<std::size_t>& parents) const {
    std::vector<std::vector<std::size_t>> children(workers_.size() + 1);
    for (std::size_t i = 0; i < parents.size(); ++i)
      if (parents[i] != kNone) children[parents[i]].push_back(i);
    return children;
  }

  std::uint32_t region_of(std::size_t i) const {
    if (!regions_.several()) return 0;
    return i == learner_ ? regions_.learner_region : workers_[i].region;
  }

  // Whether the parent may have this child too: its uplink suffices for all its children at this fraction of the best
  // rate, and it has few enough children. The learner may have any number of children.
  bool uplink_has_room(std::size_t parent, std::size_t child, double rate_fraction) const {
    const std::size_t children_max = std::min(stripe_count() * kTreeChildrenMax, kChildrenOverStripesMax);
    const bool takes_more_children = parent == learner_ || child_count_[parent] < children_max;
    const double load = uplink_load_[parent] + edge_rate_[child];
    return takes_more_children && load * rate_fraction <= up_[parent] * kRounding;
  }
  // Whether the link from the parent's region to the child's region has room for this child at this fraction of the
  // best rate.
  bool link_has_room(std::size_t parent, std::size_t child, double rate_fraction) const {
    const auto from = region_of(parent), to = region_of(child);
    const double load = link_load_[from][to] + edge_rate_[child];
    return load * rate_fraction <= regions_.rate(from, to).bits_per_s * kRounding;
  }

  // `parents`: of one stripe.
  void set_parent(std::vector<std::size_t>& parents, std::size_t child, std::size_t parent) {
    parents[child] = parent;
    uplink_load_[parent] += edge_rate_[child];
    link_load_[region_of(parent)][region_of(child)] += edge_rate_[child];
    ++child_count_[parent];
  }

  // Keeps the edges of the old trees that still fit the uplinks and links. Edges to workers in time come first; late
  // workers get what is left.
  void keep_old_edges(const Topology& topology, std::optional<WorkerId> reattached) {
    std::map<WorkerId, std::size_t> index_by_id{{kLearnerId, learner_}};
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (workers_[i].id != reattached) index_by_id[workers_[i].id] = i;
    const auto old_parent_ids = topology.parents();  // by child: its parent in each stripe
    for (const bool late_workers_turn : {false, true})
      for (std::size_t s = 0; s < stripe_count(); ++s)
        for (const auto& [child_id, parent_ids] : old_parent_ids) {
          const auto child_entry = index_by_id.find(child_id), parent_entry = index_by_id.find(parent_ids[s]);
          if (child_entry == index_by_id.end() || parent_entry == index_by_id.end()) continue;
          const std::size_t child = child_entry->second, parent = parent_entry->second;
          if (is_late_[child] != late_workers_turn) continue;
          if (uplink_has_room(parent, child, kRateFractionMin) && link_has_room(parent, child, kRateFractionMin))
            set_parent(parents_[s], child, parent);
        }
  }

  // Attaches the orphans of one stripe, each with all its descendants. The pass kRelays attaches only one orphan for
  // each region without a reached worker, as that region's relay. (The learner reaches a worker if a path of edges
  // leads to it.)
  void repair_stripe(std::size_t stripe, RepairPass pass) {
    std::vector<std::size_t>& parents = parents_[stripe];
    // Modulo, because the topology may have more stripes than the present plan.
    const RegionRoute* route = routes_.empty() ? nullptr : &routes_[stripe % routes_.size()];
    auto children = children_of(parents);
    std::vector<std::size_t> depth(workers_.size() + 1, kNone);  // kNone: the learner does not reach the worker
    std::vector<std::size_t> orphans;
    for (std::size_t i = 0; i < parents.size(); ++i)
      if (parents[i] == kNone && !is_late_[i]) orphans.push_back(i);
    // The orphans with most spare uplink come first, because they can become parents of later orphans.
    const auto spare_uplink = [&](std::size_t i) { return up_[i] - uplink_load_[i]; };
    std::stable_sort(orphans.begin(), orphans.end(), [&](auto a, auto b) { return spare_uplink(a) > spare_uplink(b); });

    using ByDepth = std::set<std::pair<std::size_t, std::size_t>>;  // possible parents: depth, index
    std::vector<ByDepth> candidates(region_count_);                 // by region
    // With one region, a second set serves searches at kRateFractionMin. From the first set, nearest_parent() erases
    // parents that are full at the best rate, although they may take a child at the lower rate.
    ByDepth candidates_at_min_rate;
    const auto subtree_of = [&](std::size_t top) {  // `top` and its descendants
      std::vector<std::size_t> nodes{top};
      for (std::size_t k = 0; k < nodes.size(); ++k)
        nodes.insert(nodes.end(), children[nodes[k]].begin(), children[nodes[k]].end());
      return nodes;
    };
    // Makes `top` and its descendants possible parents.
    const auto add_subtree = [&](std::size_t top, std::size_t top_depth) {
      depth[top] = top_depth;
      for (const std::size_t i : subtree_of(top)) {
        if (i != top) depth[i] = depth[parents[i]] + 1;
        candidates[region_of(i)].emplace(depth[i], i);
        if (region_count_ == 1) candidates_at_min_rate.emplace(depth[i], i);
      }
    };
    // Returns the possible parent nearest the learner with room for the child; kNone if there is none. Erases parents
    // without room from the set: repair_stripe() only adds children, so they will have none later either.
    const auto nearest_parent = [&](ByDepth& parents_by_depth, std::size_t child, double rate_fraction,
                                    bool may_be_learner) {
      for (auto it = parents_by_depth.begin(); it != parents_by_depth.end();) {
        const std::size_t i = it->second;
        if (!uplink_has_room(i, child, rate_fraction) || (i != learner_ && children[i].size() >= kTreeChildrenMax))
          it = parents_by_depth.erase(it);
        else if ((i == learner_ && !may_be_learner) || !link_has_room(i, child, rate_fraction))
          ++it;
        else
          return i;
      }
      return kNone;
    };
    add_subtree(learner_, 0);
    // The regions to search for a parent, in order, each with whether the learner may be the parent. For an orphan that
    // may not be a seed, the learner comes after the workers of the orphan's region.
    const auto regions_to_search = [&](std::size_t orphan) {
      const std::size_t home = region_of(orphan);
      const bool may_seed = workers_[orphan].may_seed;
      std::vector<std::pair<std::size_t, bool>> search;  // region, whether the learner may be the parent
      // Planned inter-region capacity comes first, because local uplink is needed for other workers. With one region,
      // planned_link_load_ is empty.
      const std::size_t planned_count =
          pass == RepairPass::kRelays ? 0 : std::min(planned_link_load_.size(), region_count_);
      for (std::size_t region = 0; region < planned_count; ++region) {
        if (region == home) continue;
        const double load = link_load_[region][home] + edge_rate_[orphan];
        if (load <= planned_share(region, home, stripe) * kRounding) search.emplace_back(region, may_seed);
      }
      constexpr bool kWithLearner = true, kWithoutLearner = false;
      if (!may_seed) search.emplace_back(home, kWithoutLearner);
      search.emplace_back(home, kWithLearner);
      if (region_count_ == 1) return search;
      search.emplace_back(route->feeding_region[home], kWithLearner);
      for (std::size_t region = 0; region < region_count_; ++region)
        if (region != home) search.emplace_back(region, kWithLearner);
      return search;
    };
    const auto attach = [&](std::size_t orphan) {
      std::size_t parent = kNone;
      for (const auto& [region, may_be_learner] : regions_to_search(orphan))
        if (parent == kNone) parent = nearest_parent(candidates[region], orphan, /*rate_fraction=*/1, may_be_learner);
      // With one region, falls back to the nearest parent at a lower rate. With several regions, and as the last
      // resort, falls back to the least overloaded parent, because an overloaded link delays all workers behind it.
      if (parent == kNone && region_count_ == 1)
        parent = nearest_parent(candidates_at_min_rate, orphan, kRateFractionMin, /*may_be_learner=*/true);
      if (parent == kNone) parent = least_overloaded_parent(orphan, depth, children);
      set_parent(parents, orphan, parent);
      children[parent].push_back(orphan);
      add_subtree(orphan, depth[parent] + 1);
    };
    if (pass == RepairPass::kRelays) return attach_relays(*route, orphans, subtree_of, depth, attach);
    for (const std::size_t orphan : orphans)
      if (depth[orphan] == kNone) attach(orphan);
  }

  // The traffic between two regions (bit/s) that is planned for the stripes up to and including this one: all traffic
  // of relays, and a share of the other traffic that grows evenly with the stripes. So early stripes leave capacity for
  // later ones.
  double planned_share(std::size_t from, std::size_t to, std::size_t stripe) const {
    const double stripes_done = static_cast<double>(stripe + 1) / static_cast<double>(stripe_count());
    return relay_link_load_[from][to] + (planned_link_load_[from][to] - relay_link_load_[from][to]) * stripes_done;
  }

  // In every region without a reached worker, attaches the orphan with the most descendants as relay.
  void attach_relays(const RegionRoute& route, const std::vector<std::size_t>& orphans, const auto& subtree_of,
                     const std::vector<std::size_t>& depth, const auto& attach) const {
    std::vector<std::size_t> relay(region_count_, kNone), relay_subtree_size(region_count_, 0);
    std::vector<bool> is_reached(region_count_, false);
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (depth[i] != kNone) is_reached[region_of(i)] = true;
    for (const std::size_t orphan : orphans) {
      const std::size_t home = region_of(orphan), size = subtree_of(orphan).size();
      if (is_reached[home] || size <= relay_subtree_size[home]) continue;
      relay[home] = orphan;
      relay_subtree_size[home] = size;
    }
    for (const std::uint32_t region : route.order) {
      if (relay[region] == kNone) continue;
      // The learner's region gets no relay if other regions lend it uplink. The second pass then attaches its workers
      // to the lenders' workers, and the learner can feed other regions. Less than half an edge counts as nothing lent.
      double lent = 0;  // bit/s that are not used yet
      if (region == region_of(learner_))
        for (std::size_t lender = 0; lender < region_count_; ++lender)
          if (lender != region) lent += planned_link_load_[lender][region] - link_load_[lender][region];
      if (lent < edge_rate_[relay[region]] / 2) attach(relay[region]);
    }
  }

  // Returns the parent with the least relative load: load divided by capacity, of its uplink or of its link to the
  // child's region. The larger of the two counts.
  std::size_t least_overloaded_parent(std::size_t child, const std::vector<std::size_t>& depth,
                                      const std::vector<std::vector<std::size_t>>& children) const {
    const auto relative_load = [&](std::size_t i) {
      const auto from = region_of(i), to = region_of(child);
      return std::max((uplink_load_[i] + edge_rate_[child]) / up_[i],
                      (link_load_[from][to] + edge_rate_[child]) / regions_.rate(from, to).bits_per_s);
    };
    std::size_t best = learner_;
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      const bool can_be_parent = depth[i] != kNone && up_[i] > 0 && children[i].size() < kTreeChildrenMax;
      if (can_be_parent && relative_load(i) < relative_load(best)) best = i;
    }
    return best;
  }

  // Attaches the late workers of one stripe where most uplink is spare. The learner's uplink is valuable, so it is used
  // last.
  void attach_late(std::vector<std::size_t>& parents) {
    std::vector<std::size_t> unattached, child_counts(up_.size(), 0);
    for (std::size_t i = 0; i < parents.size(); ++i) {
      if (parents[i] == kNone)
        unattached.push_back(i);
      else
        ++child_counts[parents[i]];
    }
    if (unattached.empty()) return;
    // By region: possible parents, each with its spare uplink (bit/s), which is negated, so that the largest is first.
    std::vector<std::set<std::pair<double, std::size_t>>> by_spare(region_count_);
    const auto spare_uplink = [&](std::size_t i) { return up_[i] - uplink_load_[i]; };
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (up_[i] > 0 && child_counts[i] < kTreeChildrenMax) by_spare[region_of(i)].emplace(-spare_uplink(i), i);
    // Whether the region's possible parent with most spare uplink, and the link from there, have room for one more
    // child.
    const auto has_room = [&](std::size_t region, std::size_t child) {
      const auto& candidates = by_spare[region];
      if (candidates.empty()) return false;
      const std::size_t parent = candidates.begin()->second;
      return uplink_has_room(parent, child, /*rate_fraction=*/1) && link_has_room(parent, child, /*rate_fraction=*/1);
    };
    for (const std::size_t child : unattached) {
      // Takes the child's own region if it has room or if no region has, otherwise the first region with room.
      const std::size_t home = region_of(child);
      std::size_t region = home;
      for (std::size_t other = 0; other < region_count_ && !has_room(region, child); ++other)
        if (has_room(other, child)) region = other;
      if (by_spare[region].empty()) region = region_of(learner_);  // no worker there can take a child
      auto& candidates = by_spare[region];
      std::size_t parent = learner_;
      if (!candidates.empty()) {
        const auto [negated_spare, worker] = *candidates.begin();
        // If no worker has room, the child becomes a child of the learner or of the worker, whichever has more spare
        // uplink; of the learner only in its own region, so that no link between regions is loaded.
        const bool learner_is_better =
            !has_room(region, child) && home == region_of(learner_) && spare_uplink(learner_) > -negated_spare;
        if (!learner_is_better) {
          parent = worker;
          candidates.erase(candidates.begin());  // added again below, with less spare uplink
        }
      }
      set_parent(parents, child, parent);
      if (parent != learner_ && ++child_counts[parent] < kTreeChildrenMax)
        candidates.emplace(-spare_uplink(parent), parent);
    }
  }

  std::span<const ChainWorker> workers_;
  const Regions regions_;
  std::size_t learner_;           // the learner's index
  std::size_t region_count_ = 1;  // 1 + the highest region of a worker or the learner
  std::vector<bool> is_late_;
  std::vector<RegionRoute> routes_;  // by stripe
  // The planned value of link_load_, and its value after the pass kRelays.
  std::vector<std::vector<double>> planned_link_load_, relay_link_load_;
  std::vector<std::vector<std::size_t>> parents_;  // by stripe and worker
  std::vector<double> up_, edge_rate_;             // bit/s: uplink; rate of the edge to the worker, in one stripe
  std::vector<double> uplink_load_;                // bit/s to the children
  std::vector<std::vector<double>> link_load_;     // bit/s from region to region
  std::vector<std::size_t> child_count_;           // children in all stripes
};

}  // namespace

// Considers a large payload with 0, 1, 2, ... late workers, slowest downlinks first.
std::vector<bool> late_workers(BitRate learner_up, std::span<const ChainWorker> workers, double quorum) {
  ECHO_CHECK(!workers.empty());
  const std::size_t n = workers.size();
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return workers[a].down < workers[b].down; });
  const auto down_of_rank = [&](std::size_t rank) { return workers[order[rank]].down.bits_per_s; };
  const std::size_t in_quorum = quorum_count(quorum, n);
  double uplink_total = learner_up.bits_per_s;  // of the learner and the workers in time
  for (const ChainWorker& w : workers) uplink_total += w.forwarding_up().bits_per_s;
  struct LateChoice {
    std::size_t late_count;
    double quorum_time, mean_time;  // seconds per bit of the payload: the reciprocals of rates
  };
  std::vector<LateChoice> choices;
  double late_rate_sum = 0, late_time_sum = 0;  // over the late workers: bit/s, seconds per bit
  for (std::size_t late_count = 0; late_count < n; ++late_count) {
    if (late_count > 0) {
      late_rate_sum += down_of_rank(late_count - 1);
      late_time_sum += 1 / down_of_rank(late_count - 1);
      uplink_total -= workers[order[late_count - 1]].forwarding_up().bits_per_s;
    }
    // The uplink that late workers leave over, and the rate of the workers in time. With late workers, edges have
    // different rates, so that not all uplink is usable.
    const double uplink_left = late_count > 0 ? kUsableUplinkFraction * uplink_total - late_rate_sum : uplink_total;
    const double in_time_count = static_cast<double>(n - late_count);
    const double rate = std::min({learner_up.bits_per_s, down_of_rank(late_count), uplink_left / in_time_count});
    // Skipped if a late worker could receive faster than the workers in time: it should be in time as well.
    if (rate <= 0 || (late_count > 0 && rate < down_of_rank(late_count - 1))) continue;
    // The quorum takes as long as its slowest member. That is a late worker if too few workers are in time.
    const double quorum_rate = late_count <= n - in_quorum ? rate : std::min(rate, down_of_rank(n - in_quorum));
    choices.push_back({.late_count = late_count,
                       .quorum_time = 1 / quorum_rate,
                       .mean_time = (in_time_count / rate + late_time_sum) / static_cast<double>(n)});
  }
  std::vector<bool> is_late(n, false);
  if (choices.empty()) return is_late;
  double quorum_time_min = choices.front().quorum_time;
  for (const LateChoice& choice : choices) quorum_time_min = std::min(quorum_time_min, choice.quorum_time);
  std::erase_if(choices,
                [&](const LateChoice& choice) { return choice.quorum_time > quorum_time_min * kLateTolerance; });
  double mean_time_min = choices.front().mean_time;
  for (const LateChoice& choice : choices) mean_time_min = std::min(mean_time_min, choice.mean_time);
  const auto chosen = std::find_if(choices.begin(), choices.end(), [&](const LateChoice& choice) {
    return choice.mean_time <= mean_time_min * kLateTolerance;
  });
  for (std::size_t rank = 0; rank < chosen->late_count; ++rank) is_late[order[rank]] = true;
  return is_late;
}

TreePlan plan_trees(BitRate learner_up, std::span<const ChainWorker> workers, double quorum,
                    std::optional<std::size_t> stripes) {
  TreePlan plan;
  plan.is_late = late_workers(learner_up, workers, quorum);
  const std::vector<ChainWorker> in_time = workers_in_time(workers, plan.is_late);
  const StripeLimits limits = tree_limits(late_download_rate(workers, plan.is_late));
  plan.stripe_plan = stripes ? plan_stripes_at_rate(best_rate(*stripes, learner_up, in_time, limits), *stripes,
                                                    learner_up, in_time, limits)
                             : plan_stripes(learner_up, in_time, limits);
  return plan;
}

namespace {

// Builds the chains of every stripe for workers that are all in time.
void build_in_time(const StripePlan& plan, std::span<const ChainWorker> workers, Topology& topology) {
  const std::size_t stripes = plan.stripes, n = workers.size();
  std::vector<std::size_t> children_left = plan.child_counts, order(n), child_counts(n);
  const std::size_t planned_edges = std::accumulate(children_left.begin(), children_left.end(), std::size_t{0});
  // Seeds are children of the learner. All stripes together have `stripes * n` edges, one to each worker in each
  // stripe; those that no worker feeds begin at the learner. Every stripe has at least one seed.
  const std::size_t seed_count = stripes * n - std::min(planned_edges, stripes * (n - 1));
  topology.further_stripes.resize(stripes - 1);
  topology.grafts.assign(stripes, {});
  for (std::size_t s = 0; s < stripes; ++s) {
    // Workers with most planned children left come first, so that the remaining stripes can use all of them.
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return children_left[a] > children_left[b]; });
    // Divides the seeds evenly, so each stripe has at most n: the first seed_count % stripes stripes have one more.
    std::size_t learner_edges = seed_count / stripes + (s < seed_count % stripes);
    std::size_t worker_edges_left = n - learner_edges;
    std::fill(child_counts.begin(), child_counts.end(), 0);
    for (const std::size_t i : order) {
      child_counts[i] = std::min({children_left[i], worker_edges_left, kTreeChildrenMax});
      children_left[i] -= child_counts[i];
      worker_edges_left -= child_counts[i];
    }
    learner_edges += worker_edges_left;  // the learner feeds the workers that no worker can feed
    // Placement order: workers with children first, then possible seeds, then by number of children, largest first (so
    // the counts of `a` and `b` are exchanged in the comparison).
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return std::tuple(child_counts[a] == 0, !workers[a].may_seed, child_counts[b]) <
             std::tuple(child_counts[b] == 0, !workers[b].may_seed, child_counts[a]);
    });
    constexpr std::size_t kLearner = std::numeric_limits<std::size_t>::max();  // instead of a worker's index
    std::deque<std::size_t> free_edges(learner_edges, kLearner);  // edges without a child yet: the parent of each
    std::unordered_map<std::size_t, std::size_t> chain_of_tail;   // last worker of a chain so far -> the chain
    Chains& chains = topology.stripe(s);
    for (const std::size_t i : order) {
      const std::size_t parent = free_edges.front();
      free_edges.pop_front();
      free_edges.insert(free_edges.end(), child_counts[i], i);
      // Extends the parent's chain if the parent is its tail. Otherwise begins a chain.
      if (const auto tail = parent == kLearner ? chain_of_tail.end() : chain_of_tail.find(parent);
          tail != chain_of_tail.end()) {
        chains[tail->second].push_back(workers[i].id);
        chain_of_tail[i] = tail->second;
        chain_of_tail.erase(tail);
        continue;
      }
      if (parent != kLearner) topology.grafts[s][workers[i].id] = workers[parent].id;
      chain_of_tail[i] = chains.size();
      chains.push_back({workers[i].id});
    }
  }
}

}  // namespace

void build_trees(const TreePlan& plan, BitRate learner_up, std::span<const ChainWorker> workers, Topology& topology) {
  const auto in_time = workers_in_time(workers, plan.is_late);
  build_in_time(plan.stripe_plan, in_time, topology);
  if (in_time.size() == workers.size()) return;
  // A repair attaches the late workers. The rate is at least 1 bit/s, so that every edge takes some uplink.
  const BitRate rate{std::max(1.0, plan.stripe_plan.rate.bits_per_s)};
  TreeRepair(topology, learner_up, workers, tree_targets(rate, workers, plan.is_late), std::nullopt)
      .write_chains(topology);
}

void build_trees_at_rate(BitRate rate, std::size_t stripes, BitRate learner_up, std::span<const ChainWorker> workers,
                         BitRate reserved_up, Topology& topology) {
  StripePlan plan = plan_stripes_at_rate(rate, stripes, learner_up, workers, tree_limits());
  // Uplink is counted in edges: an edge feeds one child in one stripe and takes rate / stripes. The plan keeps the
  // edges that the workers' uplinks can feed, less those that `reserved_up` takes.
  const auto reserved_edges = static_cast<std::size_t>(
      std::ceil(reserved_up.bits_per_s / rate.bits_per_s * static_cast<double>(stripes) / kRounding));
  const std::size_t kept_edges = plan.child_capacity_total - std::min(plan.child_capacity_total, reserved_edges);
  std::size_t child_total = std::accumulate(plan.child_counts.begin(), plan.child_counts.end(), std::size_t{0});
  for (; child_total > kept_edges; --child_total)  // a child less for the worker with most children
    --*std::max_element(plan.child_counts.begin(), plan.child_counts.end());
  build_in_time(plan, workers, topology);
}

namespace {

TreeTargets targets_of(const RelayPlan& plan) {
  return {
      .is_late = plan.is_late, .worker_rates = plan.worker_rates, .routes = plan.routes, .link_load = plan.link_load};
}

}  // namespace

void attach_orphans(const RelayPlan& plan, BitRate learner_up, std::span<const ChainWorker> workers,
                    const Regions& regions, Topology& topology) {
  TreeRepair(topology, learner_up, workers, targets_of(plan), std::nullopt, regions).write_chains(topology);
}

BitRate steady_rate(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers, double quorum,
                    const Regions& regions) {
  // A payload of 1 TiB in chunks of 1 MiB: so large that the first chunk's time from hop to hop does not matter.
  constexpr Bytes kPayload{std::uint64_t{1} << 40}, kChunk{std::uint64_t{1} << 20};
  std::vector<WorkerLink> links;
  for (const ChainWorker& w : workers)
    links.push_back({.id = w.id, .up = w.up, .down = w.down, .delay = {}, .region = w.region});
  const auto times = broadcast_time(topology, kPayload, kChunk, learner_up, links, regions);
  if (!times) return BitRate{1};  // the topology cannot carry a broadcast, so any other one is better
  return BitRate::from_bytes_per_s(static_cast<double>(kPayload.count) / seconds(times->quorum_time(quorum)));
}

RepairedTrees repair_trees(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers,
                           double quorum, std::optional<WorkerId> reattached, const Regions& regions) {
  ECHO_CHECK(topology.policy == TopologyPolicy::kTrees && topology.size() > 0);
  RepairedTrees repaired;
  repaired.topology.policy = TopologyPolicy::kTrees;
  if (workers.empty()) return repaired;
  const bool uses_relays = spans_regions(workers, regions);
  TreeTargets targets;
  if (uses_relays) {
    const RelayTrees replanned = plan_relays(learner_up, workers, quorum, regions);
    repaired.replanned_rate = replanned.rate;
    targets = targets_of(replanned.plan);
  } else {
    const TreePlan replanned_plan = plan_trees(learner_up, workers, quorum);
    repaired.replanned_rate = replanned_plan.stripe_plan.rate;
    // The repair keeps the number of stripes, so its rate is the best one with that number.
    const BitRate rate = best_rate(topology.stripes(), learner_up, workers_in_time(workers, replanned_plan.is_late),
                                   tree_limits(late_download_rate(workers, replanned_plan.is_late)));
    // At least 1 bit/s, because the rates of edges are divisors.
    targets = tree_targets({std::max(1.0, rate.bits_per_s)}, workers, replanned_plan.is_late);
  }
  for (std::size_t i = 0; i < workers.size(); ++i)
    if (!workers[i].may_forward || targets.is_late[i]) repaired.topology.leaves_only.push_back(workers[i].id);
  std::sort(repaired.topology.leaves_only.begin(), repaired.topology.leaves_only.end());
  const TreeRepair repair(topology, learner_up, workers, std::move(targets), reattached,
                          uses_relays ? regions : Regions{});
  repair.write_chains(repaired.topology);
  repaired.topology.chains_wanted = repaired.topology.chains.size();
  repaired.rate =
      uses_relays ? steady_rate(repaired.topology, learner_up, workers, quorum, regions) : repair.in_time_rate();
  return repaired;
}

}  // namespace echoline::chains
