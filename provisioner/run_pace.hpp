// Measures a run's pace: how long steps and broadcasts take (the planned times count until enough was measured), the
// share of time that the learner waits, and how much of the fleet's capacity is used. Private to provisioner/. No I/O
// and no clock.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "base/clock.hpp"
#include "base/units.hpp"

namespace echoline::provisioner {

inline constexpr Duration kPaceWindowMax = std::chrono::hours(2);  // how far IdleMeter and UsedCapacityMeter look back

// The median of the last kSamplesMax measurements.
template <class T>
class MedianMeter {
 public:
  static constexpr std::size_t kSamplesMax = 15, kSamplesMin = 5;

  void add(T sample) {
    if (sample <= T{}) return;  // 0 stands for an unknown value
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
    // Before the first batch the learner waits. The first stretch begins when that ends.
    const bool was_waiting = stretches_.empty() || stretches_.back().is_waiting;
    if (now_waits == was_waiting) return;
    if (!stretches_.empty()) stretches_.back().to = now;
    stretches_.push_back({.from = now, .to = kNever, .is_waiting = now_waits});
    while (stretches_.size() > 1 && now - stretches_.front().to > kPaceWindowMax) stretches_.pop_front();
    if (stretches_.size() > kStretchesMax) stretches_.pop_front();
  }
  bool has_begun() const { return !stretches_.empty(); }
  // Returns the share within the last `window`. A shorter history counts as at least `history_min` long, so that a
  // first short wait is not a large share.
  double idle_fraction(Duration window, Duration history_min, TimePoint now) const {
    if (stretches_.empty()) return 0;
    window = std::min<Duration>(window, kPaceWindowMax);
    const TimePoint begin = now - window;
    Duration waiting{};
    for (const Stretch& stretch : stretches_)
      if (stretch.is_waiting && stretch.to > begin)
        waiting += std::min(stretch.to, now) - std::max(stretch.from, begin);
    const Duration history = std::min(window, now - stretches_.front().from);
    return seconds(waiting) / seconds(std::max<Duration>(history, history_min));
  }

 private:
  static constexpr std::size_t kStretchesMax = 4096;
  // A time in which the learner only waited or only trained; the last one has no end yet.
  struct Stretch {
    TimePoint from, to;
    bool is_waiting = false;
  };
  std::deque<Stretch> stretches_;
};

// Measures the capacity that the fleet uses: the rollouts/s of the working machines, less the part that asked for work
// and got none. Call add_capacity() only from the first batch on, because earlier the workers only fill the stock.
class UsedCapacityMeter {
 public:
  // Machines with `rollouts_per_s` in total have worked since the last call.
  void add_capacity(double rollouts_per_s, TimePoint now) {
    if (bins_.empty())
      bins_.push_back({.from = now});
    else
      current_bin(now).rollouts += rollouts_per_s * seconds(now - counted_until_);
    counted_until_ = now;
  }
  // The machines could have generated these rollouts, but had no work.
  void subtract_unused(double rollouts, TimePoint now) {
    if (!bins_.empty()) current_bin(now).rollouts -= rollouts;
  }
  // Within about the last `window`, at most kPaceWindowMax. Absent until that much time was measured.
  std::optional<double> rollouts_per_s(Duration window, TimePoint now) const {
    window = std::min<Duration>(window, kPaceWindowMax);
    if (bins_.empty() || now - bins_.front().from < window) return std::nullopt;
    double rollouts = 0;
    for (auto bin = bins_.rbegin(); bin != bins_.rend(); ++bin) {
      rollouts += bin->rollouts;
      if (now - bin->from >= window) return std::max(0.0, rollouts) / seconds(now - bin->from);
    }
    return std::nullopt;
  }

 private:
  static constexpr Duration kBinLength = std::chrono::seconds(10);
  struct Bin {
    TimePoint from;  // to the begin of the next bin
    double rollouts = 0;
  };
  Bin& current_bin(TimePoint now) {
    if (now - bins_.back().from >= kBinLength) bins_.push_back({.from = now});
    // A bin is needed until the bins after it cover the longest window.
    while (bins_.size() > 2 && now - bins_[1].from >= kPaceWindowMax) bins_.pop_front();
    return bins_.back();
  }
  std::deque<Bin> bins_;
  TimePoint counted_until_{};  // the last call of add_capacity()
};

// Measures the stock of rollouts that are finished and not yet trained on.
class StockMeter {
 public:
  void add(double rollouts, TimePoint now) {
    samples_.push_back({.at = now, .rollouts = rollouts});
    // A sample is needed until the samples after it cover the longest window.
    while (samples_.size() > 2 && now - samples_[1].at >= kPaceWindowMax) samples_.pop_front();
    if (samples_.size() > kSamplesMax) samples_.pop_front();
  }
  // Over at least about the last `window`; negative if the stock shrinks. Absent until that much time was measured.
  std::optional<double> growth_per_s(Duration window) const {
    const std::optional<std::size_t> first = first_of(window);
    if (!first) return std::nullopt;
    const Sample &from = samples_[*first], &to = samples_.back();
    return (to.rollouts - from.rollouts) / seconds(to.at - from.at);
  }
  std::optional<double> newest() const {
    return samples_.empty() ? std::nullopt : std::optional(samples_.back().rollouts);
  }
  // The least stock in that time.
  std::optional<double> least(Duration window) const {
    const std::optional<std::size_t> first = first_of(window);
    if (!first) return std::nullopt;
    double rollouts = samples_.back().rollouts;
    for (std::size_t i = *first; i < samples_.size(); ++i) rollouts = std::min(rollouts, samples_[i].rollouts);
    return rollouts;
  }

 private:
  static constexpr std::size_t kSamplesMax = 4096;
  struct Sample {
    TimePoint at;
    double rollouts = 0;
  };
  // The latest sample that is at least `window` older than the last one.
  std::optional<std::size_t> first_of(Duration window) const {
    window = std::min<Duration>(window, kPaceWindowMax);
    for (std::size_t i = samples_.size(); i-- > 0;)
      if (samples_.back().at - samples_[i].at >= window && i + 1 < samples_.size()) return i;
    return std::nullopt;
  }
  std::deque<Sample> samples_;
};

// All measurements of a run's pace.
struct RunPace {
  MedianMeter<Duration> step_times, broadcast_times, install_times;
  MedianMeter<Duration> start_times;  // from the request of a machine to the first results of its worker
  MedianMeter<Bytes> payloads;
  IdleMeter learner_idle;
  UsedCapacityMeter used_capacity;
  StockMeter stock;
  std::optional<std::uint64_t> steps_left;  // of the run
};

}  // namespace echoline::provisioner
