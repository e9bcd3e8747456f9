// Delays results to the speed of an emulated machine. No I/O, no clock. Private to worker/.
#pragma once
#include <algorithm>

#include "base/clock.hpp"

namespace echoline::worker {

// Models groups that are generated one after another at the given speed. A result may become ready late because the
// operating system woke this process late. This does not delay later results: they may exceed the speed until they have
// caught up by at most kCatchUpMax of a group's time.
class Pace {
 public:
  static constexpr double kCatchUpMax = 0.25;  // fraction of a group's time

  explicit Pace(double rollouts_per_s) : rollouts_per_s_(rollouts_per_s) {}
  // Returns the time from which a group of `rollouts` rollouts, begun at `begun` and ready `now`, may be submitted.
  TimePoint due_time(TimePoint begun, std::uint64_t rollouts, TimePoint now) {
    const Duration group_time = from_seconds(static_cast<double>(rollouts) / rollouts_per_s_);
    const TimePoint due = std::max(begun, free_at_) + group_time;
    // A delay beyond kCatchUpMax of the group's time is not caught up.
    free_at_ = std::max(due, now - from_seconds(kCatchUpMax * seconds(group_time)));
    return due;
  }

 private:
  double rollouts_per_s_;
  TimePoint free_at_{};  // when the modelled machine will have generated all groups so far
};

}  // namespace echoline::worker
