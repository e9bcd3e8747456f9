// Delays results to the speed of the rented machine. Pure. Private to worker/.
#pragma once
#include <algorithm>

#include "base/clock.hpp"

namespace echoline::worker {

// Models groups that are generated one after another at the given speed. A result that leaves late, because the system
// woke this process late, does not delay the next ones. A machine that is too slow catches up at most kMadeUpMax of a
// group's time.
class Pace {
 public:
  static constexpr double kMadeUpMax = 0.25;  // of a group's time

  explicit Pace(double rollouts_per_s) : rollouts_per_s_(rollouts_per_s) {}
  // The time at which `rollouts` rollouts, begun at `begun` and ready `now`, may leave.
  TimePoint due(TimePoint begun, std::uint64_t rollouts, TimePoint now) {
    const Duration takes = from_seconds(static_cast<double>(rollouts) / rollouts_per_s_);
    const TimePoint due = std::max(begun, free_at_) + takes;
    free_at_ = std::max(due, now - from_seconds(kMadeUpMax * seconds(takes)));
    return due;
  }

 private:
  double rollouts_per_s_;
  TimePoint free_at_{};
};

}  // namespace echoline::worker
