// Holds results to the speed of the machine that was rented. Pure. Private to worker/.
#pragma once
#include <algorithm>

#include "base/clock.hpp"

namespace echoline::worker {

// As if one group were generated after the other at that speed. What leaves late, because the system wakes this process
// late, does not delay what comes after it; a machine that is too slow makes up for nothing.
class Pace {
 public:
  static constexpr double kMadeUpMax = 0.25;  // of a group's time

  explicit Pace(double rollouts_per_s) : rollouts_per_s_(rollouts_per_s) {}
  // When so many rollouts may leave that were begun then and are ready `now`.
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
