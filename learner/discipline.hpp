// Misconduct of workers, and the expulsion that follows. Private to learner/.
#pragma once
#include <cstdint>
#include <map>
#include <string>

#include "base/token_bucket.hpp"
#include "learner/desk_context.hpp"

namespace echoline::learner {

// Misconduct by identity: neither a new connection nor a new learner process clears it. A broken driver is no attack:
// only several bad messages, or group after group that fails on one worker alone, make it guilty. Pure.
class MisconductTracker {
 public:
  void restore(WorkerId worker, const replay_buffer::Misconduct& kept);  // stored by an earlier process
  replay_buffer::Misconduct misconduct_of(WorkerId worker) const;
  // Both count an offence, and return true once the worker must be expelled.
  bool record_malformed(WorkerId worker);
  bool record_failure(WorkerId worker);
  void record_accepted(WorkerId worker);  // a submission
  // A message that brought no trajectories: a request, a sign of progress, a repeated result. True if it exceeds the
  // rate that a worker needs.
  bool exceeds_message_rate(WorkerId worker, TimePoint now);

  void check() const;  // aborts if its parts disagree

 private:
  struct Record {
    std::uint32_t malformed = 0;
    std::uint32_t good_since = 0;          // submissions accepted since the last offence or the last one forgiven
    std::uint32_t failures = 0;            // groups in a row
    std::uint64_t successes_at_first = 0;  // of all workers, when the row began
  };
  std::map<WorkerId, Record> records_;
  std::map<WorkerId, TokenBucket> message_buckets_;
  std::uint64_t successes_ = 0;
};

// Counts offences, stores the counts with the leases, and expels guilty workers. One thread, the desk's.
class Discipline {
 public:
  explicit Discipline(DeskContext& desk);

  void expel_idle_workers();
  // `forged`: no honest worker sends this, and one such message is enough.
  void count_malformed(WorkerId worker, const std::string& what, bool forged = false);
  void count_failure(WorkerId worker, const std::string& what);
  void count_accepted(WorkerId worker);
  // Counts a message without trajectories. Returns false if the worker was expelled, because it sends too many.
  bool count_idle_message(WorkerId worker);

  void check() const { misconduct_.check(); }

 private:
  void store_misconduct(WorkerId worker);

  DeskContext& desk_;
  MisconductTracker misconduct_;
};

}  // namespace echoline::learner
