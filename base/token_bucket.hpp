// A rate limit: a burst at once, and a rate in the long run. Pure.
#pragma once
#include <algorithm>

#include "base/clock.hpp"

namespace echoline {

struct Allowance {
  double burst = 1;  // weight that may be taken at once
  double per_s = 1;  // weight that becomes available per second
};

class TokenBucket {
 public:
  explicit TokenBucket(const Allowance& allowance) : allowance_(allowance), tokens_(allowance.burst) {}
  // Takes `weight` and returns true, or takes nothing and returns false. Never grants a weight above the burst.
  bool take(TimePoint now, double weight = 1) {
    tokens_ = std::min(allowance_.burst, tokens_ + allowance_.per_s * std::max(0.0, seconds(now - updated_at_)));
    updated_at_ = std::max(updated_at_, now);
    if (tokens_ < weight) return false;
    tokens_ -= weight;
    return true;
  }

 private:
  Allowance allowance_;
  double tokens_;
  TimePoint updated_at_{};
};

}  // namespace echoline
