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
    std::uint64_t bytes = 0;   // to send, by the cheapest path over the publications it holds
    std::size_t children = 0;  // in the topology
    bool failed = false;       // it lost the right to forward; helping regains it, but other candidates come first
  };
  struct Choice {
    std::optional<WorkerId> helper;
    bool busy = false;  // a candidate helps kHelpedMax workers now, so a later call may find a helper
  };

  // Returns the candidate of least cost: its bytes × (1 + the workers it already helps). Excludes those that cost more
  // than `cost_max` and those that have already been tried for `worker`.
  Choice choose(WorkerId worker, std::span<const Candidate> candidates, double cost_max) const;
  // If the helper is the learner, all workers can be tried again afterwards.
  void begin(WorkerId worker, WorkerId helper);
  void end(WorkerId worker);
  void exclude(WorkerId worker, WorkerId helper) { workers_[worker].tried.insert(helper); }
  void on_installed(WorkerId worker);
  // Whether the learner may help one more worker, by HelpBudget::begin(). A worker counts once per version, so repeated
  // calls for help do not delay other workers.
  bool take_budget(WorkerId worker, Version target, const HelpBudget::Request& request, TimePoint now);
  void forget(WorkerId worker);

  std::optional<WorkerId> helper_of(WorkerId worker) const;
  std::size_t helped_by(WorkerId helper) const;
  void check() const;

 private:
  struct Record {
    std::set<WorkerId> tried;
    std::optional<WorkerId> helper;  // until the worker installs a version or calls again
    std::optional<Version> budgeted;
  };
  std::map<WorkerId, Record> workers_;
  std::map<WorkerId, std::size_t> helped_;  // by helper; none is zero
  HelpBudget budget_;
};

}  // namespace echoline::overlay
