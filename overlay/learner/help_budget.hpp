// How many workers the learner helps at a time: its one uplink serves all of them, and the sooner one has the whole,
// the sooner it can help others. Pure.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/clock.hpp"

namespace echoline::overlay {

class HelpBudget {
 public:
  struct Request {
    double bytes = 0, most = 0;    // for one more worker; the most that one may take
    double rate = 0;               // the learner's uplink [bytes per second]
    Duration wait{};               // the learner begins no more than it can send within this, and twice `most`
    std::uint64_t sent_total = 0;  // to all helped workers so far
  };
  // Whether the learner may begin to help one more worker, which then counts. Sent bytes leave the budget,
  // at least at `rate`: a worker that reads nothing delays no other one.
  bool begin(const Request& r, TimePoint now) {
    const double done = std::max(static_cast<double>(r.sent_total - sent_), seconds(now - at_) * r.rate);
    pending_ = std::max(0.0, pending_ - done);
    sent_ = r.sent_total;
    at_ = now;
    if (pending_ > seconds(r.wait) * r.rate + 2 * r.most) return false;
    pending_ += r.bytes;
    return true;
  }

 private:
  double pending_ = 0;      // bytes begun, and neither sent since nor given the time for it
  std::uint64_t sent_ = 0;  // to helped workers, until at_
  TimePoint at_{};
};

}  // namespace echoline::overlay
