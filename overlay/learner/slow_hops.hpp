// Decides which end of a slow hop is at fault, and remembers it for a while. A hop is one edge of the topology. No I/O
// and no clock.
#pragma once
#include <set>
#include <string>

#include "overlay/learner/hop_monitor.hpp"
#include "overlay/wire/control.hpp"

namespace echoline::overlay {

class SlowHops {
 public:
  static constexpr Duration kSlowTime = std::chrono::seconds(60);  // for this long, a worker at fault forwards nothing
  // The receiver of a slow hop is suspected for this long: if it receives slowly again, it is at fault itself. Longer
  // than kSlowTime, so that a receiver that slows all its hops cannot put the blame on one parent after another.
  static constexpr Duration kSuspicionTime = std::chrono::minutes(2);
  static_assert(kSuspicionTime > kSlowTime + std::chrono::seconds(10));
  // Reports of several children about a silent parent count together if they come within this time.
  static constexpr Duration kSilentTogether = std::chrono::seconds(3);
  static constexpr std::size_t kRecentMax = 64;  // slow hops remembered for the statistics

  struct Fault {
    SlowHop hop;
    WorkerId worker;  // the end that is at fault
  };

  HopMonitor& monitor() { return monitor_; }
  // Returns the hops that are slow now, at most one for each worker. A worker's other hops are measured again after the
  // topology has changed.
  std::vector<HopMonitor::Finding> find(TimePoint now);
  // Records that the child hears nothing from the parent. Returns whether another child reported the same lately.
  bool is_silent_to_several(WorkerId parent, WorkerId child, TimePoint now);
  // Returns the end at fault, which counts as slow from now on. Absent: the receiver is already known to be slow.
  // `limit`: the bottleneck that the sender reports; `sender_up`: its uplink, if known.
  std::optional<Fault> find_cause(const HopMonitor::Finding& finding, std::optional<EdgeLimit> limit,
                                  std::optional<BitRate> sender_up, TimePoint now);

  bool is_slow(WorkerId worker, TimePoint now) const;
  std::optional<BitRate> uplink_of(WorkerId worker) const;  // as measured when it was found slow; absent: not measured
  const std::vector<SlowHop>& recent() const { return recent_; }
  void forget(WorkerId worker) { slow_workers_.erase(worker); }
  void check() const { ECHO_CHECK(recent_.size() <= kRecentMax && !slow_workers_.contains(kLearnerId)); }

 private:
  struct SlowWorker {
    TimePoint slow_until{};
    std::optional<BitRate> measured_up;
    std::map<WorkerId, TimePoint> silent_to;  // children that hear nothing, and the time of their reports
  };

  HopMonitor monitor_;
  std::map<WorkerId, SlowWorker> slow_workers_;
  std::map<WorkerId, TimePoint> suspected_until_;  // by receiver of a slow hop
  std::vector<SlowHop> recent_;
};

}  // namespace echoline::overlay
