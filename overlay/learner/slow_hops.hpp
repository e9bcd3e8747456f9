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
  static constexpr Duration kSlowTime = std::chrono::seconds(60);  // a worker at fault forwards nothing
  // Longer than kSlowTime: a worker that accuses all its parents of being slow costs one of them its place, once.
  static constexpr Duration kSuspicionTime = std::chrono::minutes(2);
  static_assert(kSuspicionTime > kSlowTime + std::chrono::seconds(10));
  static constexpr Duration kSilentTogether = std::chrono::seconds(3);
  static constexpr std::size_t kRecentMax = 64;

  struct Fault {
    SlowHop hop;
    WorkerId worker;
  };

  HopMonitor& monitor() { return monitor_; }
  // Hops that are slow now, at most one for each worker: its others are measured again after a change.
  std::vector<HopMonitor::Finding> find(TimePoint now);
  // Whether this child and another one have heard nothing from the parent lately.
  bool is_silent_to_several(WorkerId parent, WorkerId child, TimePoint now);
  // The worker at fault, which counts as slow from now on. Absent: the receiver is already known to be slow. `limit`:
  // the bottleneck that the sender reports; `sender_up`: its uplink, if known.
  std::optional<Fault> find_cause(const HopMonitor::Finding& finding, std::optional<EdgeLimit> limit,
                                  std::optional<BitRate> sender_up, TimePoint now);

  bool is_slow(WorkerId worker, TimePoint now) const;
  std::optional<BitRate> uplink_of(WorkerId worker) const;  // as it was found to be
  const std::vector<SlowHop>& recent() const { return recent_; }
  void forget(WorkerId worker) { slow_.erase(worker); }
  void check() const { ECHO_CHECK(recent_.size() <= kRecentMax && !slow_.contains(kLearnerId)); }

 private:
  struct Slow {
    TimePoint until{};
    std::optional<BitRate> up;
    std::map<WorkerId, TimePoint> silent_to;  // children that hear nothing, and the time of their reports
  };

  HopMonitor monitor_;
  std::map<WorkerId, Slow> slow_;
  std::map<WorkerId, TimePoint> suspected_;  // receivers at a slow hop, until when
  std::vector<SlowHop> recent_;
};

}  // namespace echoline::overlay
