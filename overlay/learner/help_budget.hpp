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
    double bytes = 0;               // bytes to send to this worker
    double bytes_max = 0;           // bytes that any one worker may need, such as a full snapshot
    double uplink_bytes_per_s = 0;  // the learner's uplink
    // Pending bytes are limited to those that the uplink sends within this time, plus twice `bytes_max`.
    Duration queue_time_max{};
    std::uint64_t sent_total_bytes = 0;  // bytes sent to all helped workers so far
  };
  // Whether the learner may begin to help one more worker, whose bytes then count as pending. The pending bytes fall
  // with each byte sent, and at least at the uplink's rate, so a worker that reads nothing delays no other one.
  bool begin(const Request& request, TimePoint now) {
    const double sent_bytes = static_cast<double>(request.sent_total_bytes - sent_total_bytes_);
    const double sendable_bytes = seconds(now - updated_at_) * request.uplink_bytes_per_s;
    pending_bytes_ = std::max(0.0, pending_bytes_ - std::max(sent_bytes, sendable_bytes));
    sent_total_bytes_ = request.sent_total_bytes;
    updated_at_ = now;
    const double queued_bytes_max = seconds(request.queue_time_max) * request.uplink_bytes_per_s;
    if (pending_bytes_ > queued_bytes_max + 2 * request.bytes_max) return false;
    pending_bytes_ += request.bytes;
    return true;
  }

 private:
  double pending_bytes_ = 0;  // still to be sent to workers whose help has begun
  std::uint64_t sent_total_bytes_ = 0;
  TimePoint updated_at_{};  // time of the last request
};

}  // namespace echoline::overlay
