#include "chains/trees.hpp"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

namespace echoline::chains {
namespace {

constexpr std::size_t kNobody = std::numeric_limits<std::size_t>::max();
// A worker keeps the children that it has, and takes some where nobody else can, while all receive at this part of the
// best rate.
constexpr double kKept = 0.9;

// Workers are numbered as they are given, and the learner comes last.
class Mending {
 public:
  Mending(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers,
          std::optional<WorkerId> moved)
      : workers_(workers),
        learner_(workers.size()),
        parents_(topology.stripes(), std::vector<std::size_t>(workers.size(), kNobody)),
        sent_(workers.size() + 1, 0) {
    const std::size_t s = parents_.size();
    const BitRate rate = best_rate(s, kTreeChildrenMax, learner_up, workers);
    carries_ = children_carried(rate, s, kTreeChildrenMax, learner_up, workers);
    carries_at_most_ = children_carried(BitRate{kKept * rate.bits_per_s}, s, kTreeChildrenMax, learner_up, workers);
    for (const ChainWorker& w : workers) up_.push_back(w.usable_up().bits_per_s);
    up_.push_back(learner_up.bits_per_s);
    keep(topology, moved);
    for (std::vector<std::size_t>& parents : parents_) mend(parents);
  }

  BitRate rate() const {
    double rate = up_[learner_];
    for (const ChainWorker& w : workers_) rate = std::min(rate, w.down.bits_per_s);
    for (std::size_t i = 0; i < sent_.size(); ++i)
      if (sent_[i] > 0)
        rate = std::min(rate, up_[i] * static_cast<double>(parents_.size()) / static_cast<double>(sent_[i]));
    return {rate};
  }

  // The first child of everybody continues its chain.
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

  void keep(const Topology& topology, std::optional<WorkerId> moved) {
    std::map<WorkerId, std::size_t> number{{kLearnerId, learner_}};
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (workers_[i].id != moved) number[workers_[i].id] = i;
    const auto before = topology.parents();
    for (std::size_t j = 0; j < parents_.size(); ++j)
      for (const auto& [id, parents] : before) {
        const auto child = number.find(id), parent = number.find(parents[j]);
        if (child == number.end() || parent == number.end()) continue;
        if (sent_[parent->second] >= carries_at_most_[parent->second]) continue;
        parents_[j][child->second] = parent->second;
        ++sent_[parent->second];
      }
  }

  // One stripe: whoever is cut off from the learner is hung up again, with all that hangs on it.
  void mend(std::vector<std::size_t>& parents) {
    auto children = children_of(parents);
    std::vector<std::size_t> orphans, depth(workers_.size() + 1, kNobody);
    for (std::size_t i = 0; i < parents.size(); ++i)
      if (parents[i] == kNobody) orphans.push_back(i);
    const auto spare = [&](std::size_t i) { return carries_[i] - std::min(sent_[i], carries_[i]); };
    std::stable_sort(orphans.begin(), orphans.end(), [&](auto a, auto b) { return spare(a) > spare(b); });

    using Open = std::set<std::pair<std::size_t, std::size_t>>;  // those that may have a place, by depth
    Open open, open_at_most;
    const auto has_place = [&](std::size_t i, const std::vector<std::size_t>& carries) {
      return sent_[i] < carries[i] && (i == learner_ || children[i].size() < kTreeChildrenMax);
    };
    const auto below = [&](std::size_t top) {  // and itself
      std::vector<std::size_t> all{top};
      for (std::size_t k = 0; k < all.size(); ++k)
        all.insert(all.end(), children[all[k]].begin(), children[all[k]].end());
      return all;
    };
    const auto reached = [&](std::size_t top, std::size_t at) {
      depth[top] = at;
      for (const std::size_t i : below(top)) {
        if (i != top) depth[i] = depth[parents[i]] + 1;
        open.emplace(depth[i], i);
        open_at_most.emplace(depth[i], i);
      }
    };
    // Uplinks fill and never empty again here, so who has no place now is not asked again.
    const auto nearest = [&](Open& from, const std::vector<std::size_t>& carries, bool learner_too) {
      for (auto it = from.begin(); it != from.end();) {
        if (!has_place(it->second, carries))
          it = from.erase(it);
        else if (it->second == learner_ && !learner_too)
          ++it;
        else
          return it->second;
      }
      return kNobody;
    };
    const auto hang = [&](std::size_t child, std::size_t parent) {
      parents[child] = parent;
      children[parent].push_back(child);
      ++sent_[parent];
    };
    reached(learner_, 0);
    for (const std::size_t orphan : orphans) {
      std::size_t parent = kNobody;
      if (!workers_[orphan].may_seed) parent = nearest(open, carries_, false);
      if (parent == kNobody) parent = nearest(open, carries_, true);
      if (parent == kNobody) parent = nearest(open_at_most, carries_at_most_, true);
      if (parent == kNobody) parent = least_asked(depth, children);
      hang(orphan, parent);
      reached(orphan, depth[parent] + 1);
    }
  }

  std::size_t least_asked(const std::vector<std::size_t>& depth,
                          const std::vector<std::vector<std::size_t>>& children) const {
    const auto load = [&](std::size_t i) { return static_cast<double>(sent_[i] + 1) / up_[i]; };
    std::size_t best = learner_;
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (depth[i] != kNobody && up_[i] > 0 && children[i].size() < kTreeChildrenMax && load(i) < load(best)) best = i;
    return best;
  }

  std::span<const ChainWorker> workers_;
  std::size_t learner_;
  std::vector<std::vector<std::size_t>> parents_;       // by stripe and worker
  std::vector<std::size_t> sent_;                       // children in all stripes
  std::vector<std::size_t> carries_, carries_at_most_;  // children an uplink is good for
  std::vector<double> up_;                              // bit/s
};

}  // namespace

void build_trees(const StripePlan& plan, std::span<const ChainWorker> workers, Topology& topology) {
  const std::size_t s = plan.stripes, n = workers.size();
  std::vector<std::size_t> left = plan.forwards, order(n), children(n);
  const std::size_t planned = std::accumulate(left.begin(), left.end(), std::size_t{0});
  const std::size_t seeds = s * n - std::min(planned, s * (n - 1));
  topology.further.resize(s - 1);
  topology.grafts.assign(s, {});
  for (std::size_t j = 0; j < s; ++j) {
    // Who has most left to give is asked first: no one is left with more than the remaining stripes can take.
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
    // Those with most children stand nearest to the learner, after those that should.
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return std::tuple(children[a] == 0, !workers[a].may_seed, children[b]) <
             std::tuple(children[b] == 0, !workers[b].may_seed, children[a]);
    });
    constexpr std::size_t kLearner = std::numeric_limits<std::size_t>::max();
    std::deque<std::size_t> open(from_learner, kLearner);  // places to stand, by parent
    std::map<std::size_t, std::size_t> tails;              // of chains: worker -> chain
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

MendedTrees mend_trees(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers,
                       std::optional<WorkerId> moved) {
  ECHO_CHECK(topology.policy == TopologyPolicy::kTrees && topology.size() > 0);
  MendedTrees mended;
  mended.topology.policy = TopologyPolicy::kTrees;
  if (workers.empty()) return mended;
  const Mending mending(topology, learner_up, workers, moved);
  mending.write(mended.topology);
  mended.topology.chains_wanted = mended.topology.chains.size();
  for (const ChainWorker& w : workers)
    if (!w.may_forward) mended.topology.leaves_only.push_back(w.id);
  std::sort(mended.topology.leaves_only.begin(), mended.topology.leaves_only.end());
  mended.rate = mending.rate();
  mended.best = plan_stripes(learner_up, workers, kTreeChildrenMax).rate;
  return mended;
}

}  // namespace echoline::chains
