// Measures the learner's and the broadcasts' speed, with planned values until enough was measured, and the share of
// time that the learner waits. Private to provisioner/. Pure.
#pragma once
#include <algorithm>
#include <deque>
#include <optional>
#include <vector>

#include "base/clock.hpp"
#include "base/units.hpp"

namespace echoline::provisioner {

// The median of the last kSamplesMax measurements.
template <class T>
class MedianMeter {
 public:
  static constexpr std::size_t kSamplesMax = 15, kSamplesMin = 5;

  void add(T sample) {
    if (sample <= T{}) return;
    samples_.push_back(sample);
    if (samples_.size() > kSamplesMax) samples_.pop_front();
    std::vector<T> sorted(samples_.begin(), samples_.end());
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    median_ = *middle;
  }
  // The planned value until there are kSamplesMin measurements.
  T median_or(T planned) const { return samples_.size() >= kSamplesMin ? *median_ : planned; }
  // The planned value only until the first measurement.
  T early_median_or(T planned) const { return median_.value_or(planned); }

 private:
  std::deque<T> samples_;
  std::optional<T> median_;
};

// Measures the share of time that the learner waits for batches. The measurement begins with the first batch: in the
// time before it, machines boot and receive the first policy, so the wait for it says nothing about the size of the
// fleet.
class IdleMeter {
 public:
  void set_waiting(bool now_waits, TimePoint now) {
    if (stretches_.empty() ? now_waits : stretches_.back().is_waiting == now_waits) return;
    if (!stretches_.empty()) stretches_.back().to = now;
    stretches_.push_back({.from = now, .to = kNever, .is_waiting = now_waits});
    while (stretches_.size() > 1 && now - stretches_.front().to > kWindowMax) stretches_.pop_front();
    if (stretches_.size() > kStretchesMax) stretches_.pop_front();
  }
  // Returns the share within the last `window`. A shorter history counts as at least `history_min` long, so that a
  // first short wait is not a large share.
  double idle_fraction(Duration window, Duration history_min, TimePoint now) const {
    if (stretches_.empty()) return 0;
    window = std::min<Duration>(window, kWindowMax);
    const TimePoint begin = now - window;
    Duration waiting{};
    for (const Stretch& stretch : stretches_)
      if (stretch.is_waiting && stretch.to > begin)
        waiting += std::min(stretch.to, now) - std::max(stretch.from, begin);
    const Duration history = std::min(window, now - stretches_.front().from);
    return seconds(waiting) / seconds(std::max<Duration>(history, history_min));
  }

 private:
  static constexpr Duration kWindowMax = std::chrono::hours(2);
  static constexpr std::size_t kStretchesMax = 4096;
  // A time in which the learner did not change between waiting and training; the last one has no end yet.
  struct Stretch {
    TimePoint from, to;
    bool is_waiting = false;
  };
  std::deque<Stretch> stretches_;
};

}  // namespace echoline::provisioner
