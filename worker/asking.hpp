// Decides when a worker may request work from its learner. Pure (no clock, no I/O). Private to worker/.
#pragma once
#include <algorithm>

#include "base/clock.hpp"
#include "base/result.hpp"

namespace echoline::worker {

// A grant is the learner's answer to a request: leases, and the earliest time of the next request. A worker may send a
// request if it has joined, was not told to wait, has no unanswered request, and the time of the next request has come.
class Asking {
 public:
  static constexpr Duration kRequestIntervalMin = std::chrono::milliseconds(50);

  void on_joined() { joined_ = true; }
  // The learner is out of reach. Nothing can be requested until this worker has joined again.
  void on_away() { joined_ = awaits_grant_ = told_to_wait_ = false; }
  // A learner that resumes a run loads its model first. Until it has sent the run's description, it answers no request
  // for work, not even one that came before.
  void on_told_to_wait() { told_to_wait_ = true, awaits_grant_ = false; }
  void on_run_described() { told_to_wait_ = false; }
  void on_requested(TimePoint now) { awaits_grant_ = true, earliest_by_interval_ = now + kRequestIntervalMin; }
  void on_granted(TimePoint earliest) { awaits_grant_ = false, earliest_by_learner_ = earliest; }

  bool is_joined() const { return joined_; }
  bool awaits_grant() const { return awaits_grant_; }
  // The earliest time of the next request; kNever: none may be sent until another message from the learner has come.
  TimePoint earliest_request() const {
    return joined_ && !told_to_wait_ && !awaits_grant_ ? std::max(earliest_by_learner_, earliest_by_interval_) : kNever;
  }
  void check() const { ECHO_CHECK(!(awaits_grant_ && told_to_wait_), "a request to a learner that answers none"); }

 private:
  bool joined_ = false, told_to_wait_ = false, awaits_grant_ = false;
  TimePoint earliest_by_learner_{};   // the learner's last grant allows no earlier request
  TimePoint earliest_by_interval_{};  // kRequestIntervalMin after the last request
};

}  // namespace echoline::worker
