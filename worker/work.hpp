// Holds a worker's leases until their groups begin, and results until they may be submitted. With a speed limit, a
// result becomes due only when a machine of that speed would have generated it (pace.hpp). No I/O, no clock. Private to
// worker/.
#pragma once
#include <deque>
#include <optional>
#include <vector>

#include "data_plane/schema.pb.h"
#include "worker/pace.hpp"

namespace echoline::worker {

class WorkQueue {
 public:
  struct DueResult {  // the rollouts of one group
    TimePoint due;    // earliest time to submit it
    std::uint64_t rollouts = 0;
    schema::Submission submission;
  };

  // `rollouts_per_s_max`: limit on the speed of generation; absent: results are due at once.
  explicit WorkQueue(std::optional<double> rollouts_per_s_max);

  void add_leases(schema::WorkGrant& grant);  // moves the leases out of `grant`
  std::vector<schema::Lease> take_leases();   // removes and returns all leases; the caller begins their groups
  bool has_leases() const { return !leases_.empty(); }

  // Adds the result of a group that was begun at `begun`. Its due time follows from the speed limit.
  void add_result(TimePoint begun, schema::Submission submission, TimePoint now);
  // Removes and returns the result with the earliest due time, if that has come.
  std::optional<DueResult> take_due_result(TimePoint now);
  bool has_results() const { return !results_.empty(); }
  // The earliest due time; kNever without results.
  TimePoint next_due() const { return results_.empty() ? kNever : results_.front().due; }
  std::vector<std::uint64_t> lease_ids_of_results() const;

  // Drops all work, after the learner has taken its leases back.
  void clear();
  std::size_t rollouts() const { return rollouts_; }  // of leases and results
  void check() const;                                 // aborts if the members disagree

 private:
  std::optional<Pace> pace_;
  std::deque<schema::Lease> leases_;
  std::deque<DueResult> results_;  // by due time
  std::size_t rollouts_ = 0;
};

}  // namespace echoline::worker
