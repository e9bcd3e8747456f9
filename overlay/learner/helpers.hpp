// Which worker helps which late one, and how many the learner helps itself. Pure.
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
    std::uint64_t bytes = 0;   // of the cheapest way over what it holds
    std::size_t children = 0;  // in the topology
    bool failed = false;       // it may not forward, and can win that back by helping where no other worker can
  };
  struct Choice {
    std::optional<WorkerId> helper;
    bool busy = false;  // a candidate helps kHelpedMax workers: time will bring a helper
  };

  // By cost, which grows with the workers that a candidate helps already. No candidate that costs more than `cost_max`,
  // or that `worker` was sent to before.
  Choice choose(WorkerId worker, std::span<const Candidate> candidates, double cost_max) const;
  // The helper may be the learner; then all others can be tried again.
  void begin(WorkerId worker, WorkerId helper);
  void end(WorkerId worker);
  void exclude(WorkerId worker, WorkerId helper) { workers_[worker].tried.insert(helper); }
  void on_installed(WorkerId worker);
  // Whether the learner may help one more, by HelpBudget::begin(). A worker counts once for a version, so repeated
  // calls for help do not delay others.
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
