// Plans, mends and changes the topology with the planners of chains/. Called by LearnerCore.
#include "overlay/learner/topology_plan.hpp"

#include <algorithm>

#include "chains/planner.hpp"

namespace echoline::overlay {

using enum chains::TopologyPolicy;

namespace {

constexpr int kQuietPauses = 8;  // pauses without a reason to plan whole trees, before the fleet counts as quiet

}  // namespace

bool TopologyPlan::set(chains::Topology topology, BitRate learner_up, std::span<const chains::SourceNode> nodes) {
  workers_topology_ = std::move(topology);
  chains::Topology with_nodes = chains::add_nodes(workers_topology_, learner_up, nodes);
  if (with_nodes == topology_) return false;
  topology_ = std::move(with_nodes);
  return true;
}

void TopologyPlan::plan_soon(std::size_t workers, TimePoint now) {
  plan_at_ = std::min(plan_at_, now + kDelay + kDelayPerWorker * static_cast<std::int64_t>(workers));
}

// Before the first publication, the whole topology is planned for all workers. Later, workers keep their places where
// possible: chains get the newcomers added, and trees are mended. Best chains and stripes are always planned as a
// whole, because their best form depends on all workers. Planning whole trees moves nearly every worker. So it happens
// only if mended trees are slow, and after longer and longer pauses while trouble goes on.
chains::Topology TopologyPlan::next(const Fleet& fleet, bool is_in_use, TimePoint now) {
  plan_at_ = kNever;
  if (!is_in_use || workers_topology_.size() == 0 || topology_.policy == kBestChains || topology_.policy == kStripes)
    return plan_whole(fleet);
  if (!is_trees()) {
    chains::Topology next = workers_topology_;
    for (const chains::ChainWorker& worker : fleet.workers)
      if (!workers_topology_.contains(worker.id)) next = chains::add_worker(next, worker);
    return next;
  }
  chains::RepairedTrees trees = repair(std::nullopt, fleet);
  const bool is_worthwhile = std::exchange(stripes_lag_, false) || trees.worth_replanning();
  if (now < next_whole_trees_at_ || !is_worthwhile) return accept_repaired(std::move(trees), now);
  const bool was_quiet = now >= next_whole_trees_at_ + kQuietPauses * whole_trees_pause_;
  const Duration beat = rules_.heartbeat;
  whole_trees_pause_ = was_quiet ? kPauseBeats * beat : std::min(2 * whole_trees_pause_, kPauseBeatsMax * beat);
  next_whole_trees_at_ = now + whole_trees_pause_;
  return plan_whole(fleet);
}

chains::Topology TopologyPlan::plan_whole(const Fleet& fleet) const {
  auto planned = chains::plan_for_sources(fleet.learner_up, fleet.nodes, rules_.chain_rate, fleet.workers,
                                          topology_.policy, rules_.network.quorum, rules_.regions);
  ECHO_CHECK(planned.has_value(), "{}", planned ? "" : planned.error().message());  // the inputs were checked at hello
  return std::move(*planned);
}

chains::RepairedTrees TopologyPlan::repair(std::optional<WorkerId> moved_last, const Fleet& fleet) const {
  return chains::repair_trees(workers_topology_, fleet.sources_up(), fleet.workers, rules_.network.quorum, moved_last,
                              rules_.regions);
}

// If a whole plan would be much better than these trees, it follows as soon as the pause between whole plans is over.
chains::Topology TopologyPlan::accept_repaired(chains::RepairedTrees trees, TimePoint now) {
  if (trees.worth_replanning()) plan_at_ = std::min(plan_at_, std::max(now + kDelay, next_whole_trees_at_));
  return std::move(trees.topology);
}

chains::Topology TopologyPlan::without(WorkerId id, const Fleet& fleet, TimePoint now) {
  if (!workers_topology_.contains(id)) return workers_topology_;  // a node of the trainer
  return is_trees() ? accept_repaired(repair(std::nullopt, fleet), now) : chains::remove_worker(workers_topology_, id);
}

chains::Topology TopologyPlan::with_worker_last(WorkerId id, const Fleet& fleet, TimePoint now) {
  if (is_trees()) return accept_repaired(repair(id, fleet), now);
  if (topology_.policy == kStripes)
    return next(fleet, /*is_in_use=*/true, now);  // the caller has changed what this worker may forward
  const auto worker = std::find_if(fleet.workers.begin(), fleet.workers.end(),
                                   [&](const auto& candidate) { return candidate.id == id; });
  ECHO_CHECK(worker != fleet.workers.end(), "worker {} has a place and is not heard", id);
  return chains::add_worker(chains::remove_worker(workers_topology_, id), *worker);
}

bool TopologyPlan::take_comparison(std::size_t workers, bool is_broadcasting, TimePoint now) {
  if (!rules_.chooses_policy) return false;
  const Duration pause =
      std::max<Duration>(kChooseBeats * rules_.heartbeat, kChoosePerWorker * static_cast<std::int64_t>(workers));
  if (choose_at_ == kNever) choose_at_ = now + pause;
  if (now < choose_at_ || (is_broadcasting && now < choose_at_ + pause)) return false;  // waits at most another `pause`
  choose_at_ = now + pause;
  return true;
}

std::optional<TopologyPlan::Change> TopologyPlan::choose(const Fleet& fleet, std::span<const chains::WorkerLink> links,
                                                         const chains::BroadcastGoal& goal) {
  auto choice = chains::choose_topology(fleet.sources_up(), rules_.chain_rate, fleet.workers, links, goal,
                                        topology_.policy, rules_.regions);
  const bool is_faster = choice && choice->topology.policy != topology_.policy;
  faster_in_a_row_ = is_faster ? faster_in_a_row_ + 1 : 0;
  if (faster_in_a_row_ < kFasterInARow) return std::nullopt;
  faster_in_a_row_ = 0;
  const auto current =
      std::find_if(choice->candidates.begin(), choice->candidates.end(),
                   [&](const chains::Candidate& candidate) { return candidate.policy == topology_.policy; });
  std::string text = fmt::format(
      "topology {} instead of {}: it is expected to bring {} to {} workers in {} instead of {}, and nothing could in "
      "less than {}",
      to_string(choice->topology.policy), to_string(topology_.policy), echoline::to_text(goal.payload),
      fleet.workers.size(), echoline::to_text(choice->predicted), echoline::to_text(current->predicted),
      echoline::to_text(choice->lower_bound));
  return Change{std::move(choice->topology), std::move(text)};
}

void TopologyPlan::check() const {
  ECHO_CHECK(faster_in_a_row_ >= 0 && faster_in_a_row_ < kFasterInARow &&
             whole_trees_pause_ <= kPauseBeatsMax * rules_.heartbeat);
  ECHO_CHECK(rules_.chooses_policy || topology_.policy == rules_.policy, "the kind of topology has changed");
}

}  // namespace echoline::overlay
