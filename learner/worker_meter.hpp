// Measures a worker's speed for the fleet, from the worker's reported time and the learner's own observation. Private
// to learner/.
#pragma once
#include <cstdint>

#include "base/clock.hpp"
#include "data_plane/schema.pb.h"

namespace echoline::learner {

// Pure. Rollouts count when they are accepted. The seconds of work are those that the worker reports, because only it
// knows when it generated and when it waited. They count as at most the time that has passed, and as at least half of
// the time in which the worker had leases. So a false report can gain at most a factor of two. Without a report, all
// time with leases counts as work.
class WorkerMeter {
 public:
  struct Progress {
    double rollouts = 0, busy_s = 0;  // busy_s: seconds of work
    bool turned_away = false;         // its request got no lease, because no worker could have got one
    double without_work_s = 0;        // LeaseCore::take_seconds_without_work; not limited by the elapsed time
  };

  // The desk accepted rollouts of a batch; the worker had leases for `lease_seconds` more seconds.
  void record_accepted(std::uint64_t rollouts, double lease_seconds);
  void record_turned_away() { pending_.turned_away = true; }
  void record_without_work(double seconds) { without_work_s_ += seconds; }
  // Takes the worker's latest heartbeat. Returns the progress since the last call.
  Progress take_heartbeat(const schema::Vitals& vitals, TimePoint now);
  // The worker is back after an absence. Its next report does not count, because it includes the absence.
  void record_return(TimePoint now);
  // Totals over the worker's whole life, for the status page.
  const Progress& total() const { return total_; }

 private:
  Progress measured_progress(const schema::Vitals& vitals, TimePoint now);

  double without_work_s_ = 0;  // since the last heartbeat
  Progress pending_;           // accepted since the last heartbeat; its busy_s is the time with leases
  Progress total_;
  double reported_busy_s_ = 0;
  TimePoint counted_since_ = kNever;     // reported time counts from then on
  TimePoint unreported_since_ = kNever;  // since then, accepted results have no reported time
  bool has_returned_ = false;            // it has come back, and no progress has counted since
};

}  // namespace echoline::learner
