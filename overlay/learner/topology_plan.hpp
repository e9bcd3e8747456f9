// The learner's topology: which workers receive from which parents. It may be trees or chains, and in each stripe (a
// fixed share of the chunks) a different one. Decides when the topology is planned as a whole, mended, or replaced by
// another kind. No I/O and no clock.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "chains/choice.hpp"
#include "chains/sources.hpp"
#include "chains/trees.hpp"
#include "overlay/settings.hpp"

namespace echoline::overlay {

class TopologyPlan {
 public:
  // A change, such as a join, is planned after kDelay plus kDelayPerWorker for each worker. So changes that come
  // together are planned once: planning many workers takes longer and moves more of them.
  static constexpr Duration kDelay = std::chrono::milliseconds(20);
  static constexpr Duration kDelayPerWorker = std::chrono::microseconds(100);
  // Heartbeats between two plans of whole trees. Doubled at every plan until the fleet is quiet, because each plan
  // moves many workers.
  static constexpr int kPauseBeats = 2, kPauseBeatsMax = 128;
  // Time between two comparisons of kinds of topologies: the longer of kChooseBeats heartbeats and kChoosePerWorker for
  // each worker.
  static constexpr int kChooseBeats = 60;
  static constexpr Duration kChoosePerWorker = std::chrono::milliseconds(10);
  static constexpr int kFasterInARow = 3;  // comparisons in a row that another kind must win before the fleet is moved

  struct Fleet {
    BitRate learner_up;
    std::vector<chains::ChainWorker> workers;  // those that are not silent, without nodes
    std::vector<chains::SourceNode> nodes = {};

    BitRate sources_up() const { return chains::total_up(learner_up, nodes); }
  };
  struct Change {
    chains::Topology topology;
    std::string text;  // the new kind, and the reason
  };

  // `rules` must outlive the plan.
  explicit TopologyPlan(const LearnerRules& rules) : rules_(rules) {
    topology_.policy = workers_topology_.policy = rules.policy;
  }

  const chains::Topology& topology() const { return topology_; }  // its policy: the kind it is planned as
  bool is_trees() const { return topology_.policy == chains::TopologyPolicy::kTrees; }
  // The topology of the workers alone: the learner feeds those that topology() attaches to nodes of the trainer. The
  // functions below return such topologies, planned for the uplinks of all nodes and the learner.
  const chains::Topology& workers_topology() const { return workers_topology_; }
  // `topology`: of the workers alone. Returns whether topology() has changed.
  bool set(chains::Topology topology, BitRate learner_up = {}, std::span<const chains::SourceNode> nodes = {});

  void plan_soon(std::size_t workers, TimePoint now);
  TimePoint next_deadline() const { return plan_at_; }
  void stop() { plan_at_ = kNever; }
  // A hop was slow, so the stripes it carries lag behind the others. Mending the trees would not change that, so the
  // next plan is of whole trees.
  void on_slow_hop() { stripes_lag_ = true; }
  // Returns the topology to set, now that a plan is due. `is_in_use`: versions have been published over the present
  // one.
  chains::Topology next(const Fleet& fleet, bool is_in_use, TimePoint now);
  // The topology without a worker that is gone: its children get other parents.
  chains::Topology without(WorkerId id, const Fleet& fleet, TimePoint now);
  // The topology with the worker behind all others, where it delays the fewest workers.
  chains::Topology with_worker_last(WorkerId id, const Fleet& fleet, TimePoint now);

  // True once in each interval: the caller must compare the kinds of topologies now. If a broadcast runs then, true
  // only after it, because a change moves workers, but at most one interval later.
  bool take_comparison(std::size_t workers, bool is_broadcasting, TimePoint now);
  // Returns another kind of topology, if the model has expected it to be faster kFasterInARow times. `links`: of the
  // same workers. `goal`: the bytes and the quorum of a broadcast.
  std::optional<Change> choose(const Fleet& fleet, std::span<const chains::WorkerLink> links,
                               const chains::BroadcastGoal& goal);
  void check() const;

 private:
  chains::Topology plan_whole(const Fleet& fleet) const;
  chains::RepairedTrees repair(std::optional<WorkerId> moved_last, const Fleet& fleet) const;
  chains::Topology accept_repaired(chains::RepairedTrees trees, TimePoint now);

  const LearnerRules& rules_;
  chains::Topology topology_, workers_topology_;
  TimePoint plan_at_ = kNever;
  TimePoint next_whole_trees_at_{};  // before this time, trees are only mended
  Duration whole_trees_pause_{};
  bool stripes_lag_ = false;      // since the last plan, a slow hop was found
  TimePoint choose_at_ = kNever;  // of the next comparison
  int faster_in_a_row_ = 0;       // comparisons in a row that another topology won
};

}  // namespace echoline::overlay
