// Assigns helpers. A helper is a worker, or the learner, that sends publications to a late worker whose parents no
// longer have them. No I/O and no clock.
#pragma once
#include <set>
#include <span>

#include "overlay/learner/help_budget.hpp"
#include "overlay/types.hpp"

namespace echoline::overlay {

class Helpers {
 public:
  static constexpr std::size_t kHelpedMax = 8;  // workers that one worker helps at a time

  struct Candidate {
    WorkerId id;
    std::uint64_t bytes = 0;   // bytes to send, by the cheapest path over the publications this candidate holds
    std::size_t children = 0;  // in the topology
    // The candidate failed to forward and lost the right to. It may regain the right by helping, but others come first.
    bool failed = false;
  };
  struct Choice {
    std::optional<WorkerId> helper;
    bool some_candidate_full = false;  // a suitable candidate helps kHelpedMax workers now; a later call may find it
  };

  // Returns the candidate of least cost: its bytes × (1 + the workers it already helps). Excludes those that cost more
  // than `cost_max` and those that have already been tried for `worker`.
  Choice choose(WorkerId worker, std::span<const Candidate> candidates, double cost_max) const;
  // The learner is the last resort: after it, every helper may be tried again.
  void begin(WorkerId worker, WorkerId helper);
  void end(WorkerId worker);
  // `helper` must not be chosen for `worker` until the worker has installed a version, or the learner has helped it.
  void exclude(WorkerId worker, WorkerId helper) { workers_[worker].tried.insert(helper); }
  // The worker has installed a version: its help ends, and every helper may be tried again.
  void on_installed(WorkerId worker);
  // Reserves the learner's own help budget (HelpBudget::begin()), once per worker and target version, so that repeated
  // calls for help do not delay other workers. Returns false if no budget is left now.
  bool reserve_budget(WorkerId worker, Version target, const HelpBudget::Request& request, TimePoint now);
  void forget(WorkerId worker);

  std::optional<WorkerId> helper_of(WorkerId worker) const;
  std::size_t helped_count(WorkerId helper) const;
  void check() const;

 private:
  struct Record {
    std::set<WorkerId> tried;        // helpers that must not be chosen again
    std::optional<WorkerId> helper;  // until the worker installs a version or calls again
    std::optional<Version> budgeted_version;
  };
  std::map<WorkerId, Record> workers_;
  std::map<WorkerId, std::size_t> helped_;  // number of helped workers, by helper; never zero
  HelpBudget budget_;
};

}  // namespace echoline::overlay
