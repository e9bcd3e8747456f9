// How many workers the learner begins to help: one uplink serves all of them. Were they dozens at once, none of them
// would soon have the whole, and be able to help others. Pure.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/clock.hpp"

namespace echoline::overlay {

class HelpBudget {
 public:
  // Whether the learner begins to send `bytes` to one more worker, which then counts. It begins with no more than it
  // can send within `wait` and twice `most`. Bytes leave the budget as they are sent (`sent_total`, to all helped
  // workers so far), and at least at `rate` [bytes per second]: a worker that takes nothing keeps no other one waiting.
  bool begin(double bytes, double most, double rate, Duration wait, std::uint64_t sent_total, TimePoint now) {
    const double done = std::max(static_cast<double>(sent_total - sent_), seconds(now - at_) * rate);
    pending_ = std::max(0.0, pending_ - done);
    sent_ = sent_total;
    at_ = now;
    if (pending_ > seconds(wait) * rate + 2 * most) return false;
    pending_ += bytes;
    return true;
  }

 private:
  double pending_ = 0;      // bytes begun with, and neither sent since nor had the time to be
  std::uint64_t sent_ = 0;  // to those helped, until at_
  TimePoint at_{};
};

}  // namespace echoline::overlay
