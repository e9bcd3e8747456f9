// A rate limit: a number at once, and a number per second in the long run. Pure.
#pragma once
#include <algorithm>

#include "base/clock.hpp"

namespace echoline {

struct Allowance {
  double burst = 1;
  double per_s = 1;
};

class TokenBucket {
 public:
  explicit TokenBucket(const Allowance& allowance) : allowance_(allowance), tokens_(allowance.burst) {}
  // Takes `weight`, or nothing. A weight above the burst is never granted.
  bool take(TimePoint now, double weight = 1) {
    tokens_ = std::min(allowance_.burst, tokens_ + allowance_.per_s * std::max(0.0, seconds(now - at_)));
    at_ = std::max(at_, now);
    if (tokens_ < weight) return false;
    tokens_ -= weight;
    return true;
  }

 private:
  Allowance allowance_;
  double tokens_;
  TimePoint at_{};
};

}  // namespace echoline
