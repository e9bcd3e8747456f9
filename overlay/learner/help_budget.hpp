// Limits the workers that the learner helps at a time. They share its one uplink, and a worker that is complete sooner
// can help others sooner. No I/O and no clock.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/clock.hpp"

namespace echoline::overlay {

class HelpBudget {
 public:
  struct Request {
    double bytes = 0;              // to send to this worker
    double most = 0;               // to send to any one worker, such as a full snapshot
    double rate = 0;               // the learner's uplink [bytes per second]
    Duration wait{};               // the learner begins at most the bytes it can send within this, plus twice `most`
    std::uint64_t sent_total = 0;  // bytes sent to all helped workers so far
  };
  // Whether the learner may begin to help one more worker, whose bytes then count as pending. The pending bytes fall
  // with each byte sent, and at least at `rate`, so a worker that reads nothing delays no other one.
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
  double pending_ = 0;      // bytes of workers whose help has begun, still to be sent
  std::uint64_t sent_ = 0;  // sent_total at at_
  TimePoint at_{};
};

}  // namespace echoline::overlay
