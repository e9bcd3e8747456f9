// The time that the RolloutDesk compares leases with. Private to learner/.
#pragma once
#include "base/clock.hpp"
#include "base/result.hpp"

namespace echoline::learner {

// Unix time: the wall clock when the desk was opened, advanced by the monotonic clock. So a jump of the wall clock ends
// no lease. One thread.
class LeaseClock {
 public:
  // The system's clock if `clock` is null. `clock` must outlive it.
  explicit LeaseClock(const Clock* clock) : clock_(clock != nullptr ? *clock : system_clock_) {}
  LeaseClock(const LeaseClock&) = delete;

  TimePoint now() const { return clock_.now(); }
  double unix_seconds() const { return unix_seconds_at(clock_.now()); }

  // Sets the time up to which the desk has kept up with its work. Leases are extended by a pause that follows.
  void tick(TimePoint now) {
    ECHO_CHECK(now >= last_tick_, "the monotonic clock went back by {}", to_text(last_tick_ - now));
    last_tick_ = now;
  }
  TimePoint last_tick() const { return last_tick_; }
  double unix_seconds_at_last_tick() const { return unix_seconds_at(last_tick_); }

 private:
  double unix_seconds_at(TimePoint time) const { return opened_unix_s_ + seconds(time - opened_); }

  const SystemClock system_clock_;
  const Clock& clock_;
  const TimePoint opened_ = clock_.now();
  const double opened_unix_s_ = clock_.unix_seconds();
  TimePoint last_tick_ = opened_;
};

}  // namespace echoline::learner
