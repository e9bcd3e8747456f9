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

// Measures the share of time that the learner waits for batches.
class IdleMeter {
 public:
  void set_waiting(bool now_waits, TimePoint now) {
    if (!stretches_.empty()) {
      if (stretches_.back().waiting == now_waits) return;
      stretches_.back().to = now;
    }
    stretches_.push_back({now, kNever, now_waits});
    while (stretches_.size() > 1 && now - stretches_.front().to > kWindowMax) stretches_.pop_front();
    if (stretches_.size() > kStretchesMax) stretches_.pop_front();
  }
  // The share within the last `window`. A shorter history counts as at least `seen_min` long.
  double idle_fraction(Duration window, Duration seen_min, TimePoint now) const {
    if (stretches_.empty()) return 0;
    window = std::min<Duration>(window, kWindowMax);
    const TimePoint begin = now - window;
    Duration waiting{};
    for (const Stretch& s : stretches_)
      if (s.waiting && s.to > begin) waiting += std::min(s.to, now) - std::max(s.from, begin);
    return seconds(waiting) / seconds(std::max<Duration>(std::min(window, now - stretches_.front().from), seen_min));
  }

 private:
  static constexpr Duration kWindowMax = std::chrono::hours(2);
  static constexpr std::size_t kStretchesMax = 4096;
  struct Stretch {
    TimePoint from, to;
    bool waiting = false;
  };
  std::deque<Stretch> stretches_;
};

}  // namespace echoline::provisioner
