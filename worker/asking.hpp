// Decides when a worker may ask its learner for work. Pure. Private to worker/.
#pragma once
#include <algorithm>

#include "base/clock.hpp"
#include "base/result.hpp"

namespace echoline::worker {

// A worker may ask if it has joined, was not told to wait, has no unanswered request, and the pause that the last grant
// demanded is over.
class Asking {
 public:
  static constexpr Duration kAskEvery = std::chrono::milliseconds(50);  // the least time between two requests

  void joined() { joined_ = true; }
  // The learner takes its leases back, and receives nothing until this worker has joined again.
  void away() { joined_ = awaits_grant_ = told_to_wait_ = false; }
  // A learner that resumes loads its model first. It answers no request for work until it has sent the run's
  // description.
  void told_to_wait() { told_to_wait_ = true, awaits_grant_ = false; }
  void told_the_run() { told_to_wait_ = false; }
  void asked(TimePoint now) { awaits_grant_ = true, next_ = now + kAskEvery; }
  void granted(TimePoint ask_again) { awaits_grant_ = false, ask_again_ = ask_again; }

  bool is_joined() const { return joined_; }
  bool awaits_grant() const { return awaits_grant_; }
  // kNever: only after another message from the learner.
  TimePoint not_before() const {
    return joined_ && !told_to_wait_ && !awaits_grant_ ? std::max(ask_again_, next_) : kNever;
  }
  void check() const { ECHO_CHECK(!(awaits_grant_ && told_to_wait_), "a request to a learner that answers none"); }

 private:
  bool joined_ = false, told_to_wait_ = false, awaits_grant_ = false;
  TimePoint ask_again_{};  // as the learner says
  TimePoint next_{};       // as kAskEvery says
};

}  // namespace echoline::worker
