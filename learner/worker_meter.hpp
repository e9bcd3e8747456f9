// How fast a worker is, as the fleet's core is told: by what it says of its time and by what the learner saw itself.
// Private to learner/.
#pragma once
#include <cstdint>

#include "base/clock.hpp"
#include "data_plane/schema.pb.h"

namespace echoline::learner {

// Pure. Rollouts count when they were accepted. The seconds are the worker's own, because only it knows when it
// generated and when it waited; but they cannot be more than have passed, nor less than half of the time in which it
// had leases. So who lies about its speed gains a factor of two, and who says nothing of its time is taken to have
// worked while it had leases.
class WorkerMeter {
 public:
  struct Progress {
    double rollouts = 0, busy_s = 0;
    bool turned_away = false;  // it asked for work, and there was none for anybody
  };

  // The desk took in rollouts of a batch for which the worker had leases for `held_s` more.
  void accepted(std::uint64_t rollouts, double held_s);
  void turned_away() { pending_.turned_away = true; }
  // Its latest heartbeat; what has come since the last call.
  Progress heard(const schema::Vitals& vitals, TimePoint now);
  // It is back after it was away: what it tells of the time before says nothing of how fast it is.
  void returned(TimePoint now);
  // Of its whole life, as told: for people to look at.
  const Progress& total() const { return total_; }

 private:
  Progress pending_;  // accepted since the last heartbeat; busy_s: with leases
  Progress total_;
  double told_busy_s_ = 0;
  TimePoint since_ = kNever;         // what was told before is counted
  TimePoint untold_since_ = kNever;  // results are here whose time is not told yet
  bool returned_ = false;            // and nothing counted since
};

}  // namespace echoline::learner
