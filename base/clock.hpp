// Clocks. Cores, which only decide, receive a TimePoint as an argument. Drivers, which use threads and sockets, own a
// Clock.
#pragma once
#include <chrono>

#include "base/units.hpp"

namespace echoline {

struct MonotonicTimeline {
  using rep = Duration::rep;
  using period = Duration::period;
  using duration = Duration;
  using time_point = std::chrono::time_point<MonotonicTimeline, Duration>;
  static constexpr bool is_steady = true;
};
// A point on a monotonic timeline, real or simulated; comparable only within one run of one process.
using TimePoint = MonotonicTimeline::time_point;
inline constexpr TimePoint kNever = TimePoint::max();

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint now() const = 0;
  // Wall time, seconds since 1970, for records and leases that outlive a process.
  virtual double unix_seconds() const = 0;
};

class SystemClock final : public Clock {
 public:
  TimePoint now() const override {
    return TimePoint(std::chrono::duration_cast<Duration>(std::chrono::steady_clock::now().time_since_epoch()));
  }
  double unix_seconds() const override {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  }
};

// A clock that its owner advances, for tests and simulations.
class ManualClock final : public Clock {
 public:
  TimePoint now() const override { return now_; }
  double unix_seconds() const override { return kUnixSecondsAtStart + seconds(now_.time_since_epoch()); }
  void advance(Duration d) { now_ += d; }
  void set(TimePoint t) { now_ = t; }

 private:
  static constexpr double kUnixSecondsAtStart = 1.7e9;  // in November 2023
  TimePoint now_{};
};

}  // namespace echoline
