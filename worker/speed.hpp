// Holds generation to the speed of the machine that was rented. Pure. Private to worker/.
#pragma once
#include <algorithm>

#include "base/clock.hpp"

namespace echoline::worker {

// A batch lasts as long as it would take at that speed. By what one lasts longer, because the system wakes this process
// late, the next is shorter, so that the speed holds over time; a machine that is too slow makes up for nothing.
class Speed {
 public:
  static constexpr double kMadeUpMax = 0.25;  // of a batch

  explicit Speed(double rollouts_per_s) : rollouts_per_s_(rollouts_per_s) {}
  // When a batch of so many that began then should end.
  TimePoint due(TimePoint began, std::uint64_t rollouts) const {
    const double batch_s = static_cast<double>(rollouts) / rollouts_per_s_;
    return began + from_seconds(batch_s - std::min(seconds(late_), kMadeUpMax * batch_s));
  }
  // `generated`: when the work was done; what is late after that is not the machine's own speed.
  void ended(TimePoint due, TimePoint generated, TimePoint now) {
    late_ = std::max(Duration{}, now - std::max(due, generated));
  }

 private:
  double rollouts_per_s_;
  Duration late_{};
};

}  // namespace echoline::worker
