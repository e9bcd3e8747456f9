// Work of a worker that its engine does not have: leases that are not begun, and results that are not handed in. Pure.
// Private to worker/.
#pragma once
#include <deque>
#include <optional>
#include <vector>

#include "data_plane/schema.pb.h"
#include "worker/pace.hpp"

namespace echoline::worker {

class Work {
 public:
  struct Finished {
    TimePoint due;  // for the learner
    std::uint64_t rollouts = 0;
    schema::Submission submission;
  };

  // Absent: results are due at once.
  explicit Work(std::optional<double> rollouts_per_s_max);

  void granted(schema::WorkGrant& grant);
  std::vector<schema::Lease> take_leases();
  bool has_leases() const { return !leases_.empty(); }

  // A group that was begun at `begun` is complete.
  void finished(TimePoint begun, schema::Submission submission, TimePoint now);
  // The first result, if it is due.
  std::optional<Finished> take_due(TimePoint now);
  bool has_results() const { return !results_.empty(); }
  TimePoint next_due() const { return results_.empty() ? kNever : results_.front().due; }
  std::vector<std::uint64_t> result_leases() const;

  // The learner has taken its leases back.
  void clear();
  std::size_t rollouts() const { return rollouts_; }  // of leases and results
  void check() const;

 private:
  std::optional<Pace> pace_;
  std::deque<schema::Lease> leases_;
  std::deque<Finished> results_;  // by due time
  std::size_t rollouts_ = 0;
};

}  // namespace echoline::worker
