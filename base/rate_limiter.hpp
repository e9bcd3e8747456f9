// Token bucket: a byte rate with a bounded burst. Pure: the caller passes the time.
#pragma once
#include <algorithm>
#include <optional>

#include "base/clock.hpp"
#include "base/units.hpp"

namespace echoline {

// Spending may drive the balance below zero (one frame is never split), so the long-run rate holds for any frame
// size: a spender waits until the balance is positive again. No limit when rate is absent.
class RateLimiter {
 public:
  RateLimiter() = default;
  RateLimiter(std::optional<BitRate> rate, Bytes burst, TimePoint now)
      : rate_(rate), burst_(static_cast<double>(burst.count)), balance_(burst_), updated_(now) {}

  // Whether anything may be sent at `now`.
  bool ready(TimePoint now) {
    refill(now);
    return !rate_ || balance_ > 0;
  }
  void spend(Bytes bytes, TimePoint now) {
    refill(now);
    if (rate_) balance_ -= static_cast<double>(bytes.count);
  }
  // When ready() turns true, given no further spending.
  TimePoint ready_at(TimePoint now) {
    refill(now);
    if (!rate_ || balance_ > 0) return now;
    if (rate_->bits_per_s <= 0) return kNever;
    return now + from_seconds((1.0 - balance_) / rate_->bytes_per_s());
  }
  std::optional<BitRate> rate() const { return rate_; }

 private:
  void refill(TimePoint now) {
    if (!rate_ || now <= updated_) return;
    balance_ = std::min(burst_, balance_ + seconds(now - updated_) * rate_->bytes_per_s());
    updated_ = now;
  }
  std::optional<BitRate> rate_;
  double burst_ = 0;    // bytes
  double balance_ = 0;  // bytes
  TimePoint updated_{};
};

}  // namespace echoline
