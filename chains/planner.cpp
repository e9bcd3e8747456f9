// Plans topologies (chains of workers that start at the learner, or trees), removes lost workers from them and adds new
// ones. Called by choose_topology() and by the learner.
#include "chains/planner.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "chains/fleet_graph.hpp"
#include "chains/relays.hpp"
#include "chains/stripes.hpp"
#include "chains/trees.hpp"

namespace echoline::chains {
namespace {

// Tolerance for rounding: rates that differ by less are equal, and a ratio that misses an integer by less is that
// integer.
constexpr double kRounding = 1e-9;
// Trees with relays (relays.hpp) are chosen if they reach this fraction of the rate of trees that ignore regions. The
// fraction is below 1 because relay trees have shorter edges and leave the links between regions to other traffic.
constexpr double kRelayTreesRateMin = 0.98;

Status check_request(BitRate learner_up, BitRate chain_rate, std::span<const ChainWorker> workers,
                     TopologyPolicy policy) {
  constexpr std::string_view kOperation = "plan chains";
  const auto positive = [](BitRate rate) { return std::isfinite(rate.bits_per_s) && rate.bits_per_s > 0; };
  if (!positive(learner_up))
    return fail(Code::kInvalid, kOperation, "the learner's uplink must be positive, found {} bit/s",
                learner_up.bits_per_s);
  if (policy == TopologyPolicy::kAuto)
    return fail(Code::kInvalid, kOperation, "'auto' is not a topology: it stands for one that depends on the payload");
  // Only the policy echo2 plans for a given rate of one chain.
  if (policy == TopologyPolicy::kEcho2 && !positive(chain_rate))
    return fail(Code::kInvalid, kOperation, "the rate of one chain must be positive, found {} bit/s",
                chain_rate.bits_per_s);
  if (workers.size() > kChainWorkersMax)
    return fail(Code::kInvalid, kOperation, "{} workers, at most {} can be planned", workers.size(), kChainWorkersMax);
  std::vector<WorkerId> ids;
  for (const ChainWorker& w : workers) {
    if (w.id == kLearnerId) return fail(Code::kInvalid, kOperation, "a worker has id 0, which is the learner's");
    if (!positive(w.down) || (w.may_forward && !positive(w.up)))
      return fail(Code::kInvalid, kOperation, "worker {}: rates must be positive, found up {} and down {} bit/s", w.id,
                  w.up.bits_per_s, w.down.bits_per_s);
    if (!std::isfinite(w.score)) return fail(Code::kInvalid, kOperation, "worker {}: its score is not finite", w.id);
    ids.push_back(w.id);
  }
  std::sort(ids.begin(), ids.end());
  if (const auto twice = std::adjacent_find(ids.begin(), ids.end()); twice != ids.end())
    return fail(Code::kInvalid, kOperation, "worker {} is listed twice", *twice);
  return ok();
}

Status check_regions(const Regions& regions, std::span<const ChainWorker> workers) {
  constexpr std::string_view kOperation = "plan chains";
  if (!regions.several()) return ok();
  const std::size_t n = regions.links.size();
  if (n > kRegionsMax) return fail(Code::kInvalid, kOperation, "{} regions, at most {} are allowed", n, kRegionsMax);
  if (regions.learner_region >= n)
    return fail(Code::kInvalid, kOperation, "the learner's region is {}, expected 0 to {}", regions.learner_region,
                n - 1);
  for (const auto& row : regions.links) {
    if (row.size() != n)
      return fail(Code::kInvalid, kOperation, "the number of links from a region is {}, expected {}", row.size(), n);
    for (const RegionLink& link : row)
      if (!(link.rate.bits_per_s > 0))
        return fail(Code::kInvalid, kOperation, "a link between regions needs a capacity, found {} bit/s",
                    link.rate.bits_per_s);
  }
  for (const ChainWorker& w : workers)
    if (w.region >= n)
      return fail(Code::kInvalid, kOperation, "worker {}: its region is {}, expected 0 to {}", w.id, w.region, n - 1);
  return ok();
}

// The placement order: workers that may forward come before those that may not. Within each of these, workers that may
// be a chain's first worker (seed) come first; then the highest score; then the least id.
bool is_before(const ChainWorker& a, const ChainWorker& b) {
  return std::tuple(!a.may_forward, !a.may_seed, -a.score, a.id) <
         std::tuple(!b.may_forward, !b.may_seed, -b.score, b.id);
}

// Deals the workers over the chains in turn, so the first chain_count workers become seeds and the last ones tails.
Chains deal_into_chains(std::span<const ChainWorker> workers, std::size_t chain_count) {
  Chains chains(std::min(chain_count, workers.size()));
  for (std::size_t i = 0; i < workers.size(); ++i) chains[i % chains.size()].push_back(workers[i].id);
  return chains;
}

// Ends the process if the topology is not valid: that is a bug of this file.
void check_valid(const Topology& topology) {
  const std::vector<WorkerId> workers = topology.workers();
  const Status status = validate(topology, workers);
  ECHO_CHECK(status.has_value(), "{}", status.error().message());
}

bool may_forward(const Topology& topology, WorkerId id) {
  return !std::binary_search(topology.leaves_only.begin(), topology.leaves_only.end(), id);
}

// The shortest chain (the first of equals) that satisfies `suits`.
template <class Predicate>
std::vector<WorkerId>* shortest_chain(Chains& chains, Predicate suits) {
  std::vector<WorkerId>* best = nullptr;
  for (auto& chain : chains)
    if (suits(chain) && (!best || chain.size() < best->size())) best = &chain;
  return best;
}

}  // namespace

std::size_t best_chain_count(BitRate learner_up, std::span<const ChainWorker> workers) {
  ECHO_CHECK(!workers.empty());
  std::vector<double> uplinks;  // ascending; ends with infinity, the limit if no worker sends
  double down_min = std::numeric_limits<double>::infinity();
  for (const ChainWorker& w : workers) {
    uplinks.push_back(w.forwarding_up().bits_per_s);
    down_min = std::min(down_min, w.down.bits_per_s);
  }
  std::sort(uplinks.begin(), uplinks.end());
  uplinks.push_back(std::numeric_limits<double>::infinity());
  std::size_t best_count = 1;
  double best_rate = -1;  // lower than any rate
  for (std::size_t count = 1; count <= workers.size(); ++count) {
    // With `count` chains, the `count` workers with the slowest uplinks are tails and send nothing. So uplinks[count]
    // is the slowest uplink that is used.
    const double rate = std::min({learner_up.bits_per_s / static_cast<double>(count), uplinks[count], down_min});
    // A later count wins a tie, because more chains are shorter.
    if (rate >= best_rate * (1 - kRounding)) {
      best_count = count;
      best_rate = std::max(rate, best_rate);  // a tie within the tolerance must not lower it
    }
  }
  return best_count;
}

Result<Topology> plan_chains(BitRate learner_up, BitRate chain_rate, std::span<const ChainWorker> workers,
                             TopologyPolicy policy, double quorum, const Regions& regions,
                             std::optional<std::size_t> stripes) {
  ECHO_TRY(check_request(learner_up, chain_rate, workers, policy));
  ECHO_TRY(check_regions(regions, workers));
  std::vector<ChainWorker> ordered_workers(workers.begin(), workers.end());
  std::sort(ordered_workers.begin(), ordered_workers.end(), is_before);
  // The placement order has the leaves (workers that may not forward) last.
  const auto first_leaf =
      std::find_if(ordered_workers.begin(), ordered_workers.end(), [](const auto& w) { return !w.may_forward; });
  const auto leaf_count = static_cast<std::size_t>(ordered_workers.end() - first_leaf);

  Topology topology;
  topology.policy = policy;
  switch (policy) {
    case TopologyPolicy::kEcho2: {
      // As many chains as the learner can feed at chain_rate. The limits of the clamp keep the conversion to an integer
      // defined.
      const double count = std::floor(learner_up.bits_per_s / chain_rate.bits_per_s * (1 + kRounding));
      topology.chains_wanted = static_cast<std::size_t>(std::clamp(count, 1.0, static_cast<double>(kChainWorkersMax)));
      break;
    }
    case TopologyPolicy::kBestChains:
      topology.chains_wanted = ordered_workers.empty() ? 1 : best_chain_count(learner_up, ordered_workers);
      break;
    case TopologyPolicy::kStar:
      topology.chains_wanted = std::max<std::size_t>(1, ordered_workers.size());
      break;
    case TopologyPolicy::kStripes:  // both are planned below
    case TopologyPolicy::kTrees:
      break;
    case TopologyPolicy::kAuto:  // refused above
      break;
  }
  for (auto leaf = first_leaf; leaf != ordered_workers.end(); ++leaf) topology.leaves_only.push_back(leaf->id);
  std::sort(topology.leaves_only.begin(), topology.leaves_only.end());
  if ((policy == TopologyPolicy::kStripes || policy == TopologyPolicy::kTrees) && !ordered_workers.empty()) {
    if (policy == TopologyPolicy::kStripes) {
      const StripePlan plan = stripes ? plan_stripes_at_rate(best_rate(*stripes, learner_up, ordered_workers, {}),
                                                             *stripes, learner_up, ordered_workers, {})
                                      : plan_stripes(learner_up, ordered_workers);
      build_stripes(plan, ordered_workers, topology);
    } else {
      TreePlan plan = plan_trees(learner_up, ordered_workers, quorum, stripes);
      build_trees(plan, learner_up, ordered_workers, topology);
      std::vector<bool> is_late = std::move(plan.is_late);
      if (spans_regions(ordered_workers, regions)) {  // relay trees replace these if they are about as fast
        RelayTrees relays = plan_relays(learner_up, ordered_workers, quorum, regions);
        const BitRate rate_without_relays = steady_rate(topology, learner_up, ordered_workers, quorum, regions);
        if (relays.rate.bits_per_s >= kRelayTreesRateMin * rate_without_relays.bits_per_s) {
          topology.chains = std::move(relays.topology.chains);  // the first stripe
          topology.further_stripes = std::move(relays.topology.further_stripes);
          topology.grafts = std::move(relays.topology.grafts);
          is_late = std::move(relays.plan.is_late);
        }
      }
      // Late workers (too slow for the trees, see trees.hpp) do not forward, so that they delay no other worker.
      for (std::size_t i = 0; i < ordered_workers.size(); ++i)
        if (is_late[i] && ordered_workers[i].may_forward) topology.leaves_only.push_back(ordered_workers[i].id);
      std::sort(topology.leaves_only.begin(), topology.leaves_only.end());
    }
    topology.chains_wanted = topology.chains.size();
    check_valid(topology);
    return topology;
  }
  // A chain can hold one leaf, at its tail. Leaves come last in `ordered_workers`, so with at least a chain per leaf,
  // deal_into_chains() makes each leaf a tail.
  const std::size_t chain_count = std::max(topology.chains_wanted, leaf_count);
  if (policy == TopologyPolicy::kBestChains && ordered_workers.size() > chain_count) {
    // Moves the workers with the chain_count slowest uplinks to the end, where they become tails, which send nothing.
    // The other workers return to the placement order.
    std::sort(ordered_workers.begin(), ordered_workers.end(), [](const ChainWorker& a, const ChainWorker& b) {
      if (a.forwarding_up() != b.forwarding_up()) return a.forwarding_up() > b.forwarding_up();
      return std::tuple(-a.score, a.id) < std::tuple(-b.score, b.id);
    });
    std::sort(ordered_workers.begin(), ordered_workers.end() - static_cast<std::ptrdiff_t>(chain_count), is_before);
  }
  if (!ordered_workers.empty()) topology.chains = deal_into_chains(ordered_workers, chain_count);
  check_valid(topology);
  return topology;
}

Topology remove_worker(const Topology& topology, WorkerId dead) {
  ECHO_CHECK(topology.policy != TopologyPolicy::kTrees, "trees are repaired by repair_trees()");
  Topology next = topology;
  for (std::size_t s = 0; s < next.stripes(); ++s) {
    for (auto& chain : next.stripe(s)) std::erase(chain, dead);
    std::erase_if(next.stripe(s), [](const auto& chain) { return chain.empty(); });
  }
  std::erase(next.leaves_only, dead);
  check_valid(next);
  return next;
}

Topology add_worker(const Topology& topology, const ChainWorker& joiner) {
  ECHO_CHECK(topology.policy != TopologyPolicy::kTrees, "trees are repaired by repair_trees()");
  ECHO_CHECK(joiner.id != kLearnerId && !topology.contains(joiner.id),
             "worker {} cannot join: it is in the topology already", joiner.id);
  Topology next = topology;
  const auto any_chain = [](const auto&) { return true; };
  const auto tail_may_forward = [&](const auto& chain) { return may_forward(next, chain.back()); };
  for (std::size_t s = 0; s < next.stripes(); ++s) {
    Chains& chains = next.stripe(s);
    const bool has_too_few_chains =
        chains.empty() || next.policy == TopologyPolicy::kStar || chains.size() < next.chains_wanted;
    std::vector<WorkerId>* const extensible = shortest_chain(chains, tail_may_forward);
    const bool fits_in_no_chain = !extensible && !joiner.may_forward;  // neither it nor any tail may forward
    if (has_too_few_chains || fits_in_no_chain) {
      chains.push_back({joiner.id});
    } else if (extensible) {
      extensible->push_back(joiner.id);
    } else {  // before a tail that may not forward
      std::vector<WorkerId>& chain = *shortest_chain(chains, any_chain);
      chain.insert(chain.end() - 1, joiner.id);
    }
  }
  if (!joiner.may_forward)
    next.leaves_only.insert(std::lower_bound(next.leaves_only.begin(), next.leaves_only.end(), joiner.id), joiner.id);
  check_valid(next);
  return next;
}

}  // namespace echoline::chains
