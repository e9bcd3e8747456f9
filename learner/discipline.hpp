// Misconduct of workers, and the expulsion that follows. Private to learner/.
#pragma once
#include <cstdint>
#include <map>
#include <string>

#include "base/token_bucket.hpp"
#include "learner/desk_context.hpp"

namespace echoline::learner {

// Counts misconduct by the worker's identity, so that neither a new connection nor a new learner process clears it. A
// fault such as a broken driver is no attack. So a worker is expelled only after several malformed messages, or after
// several groups in a row that fail on this worker alone. Pure.
class MisconductTracker {
 public:
  void restore(WorkerId worker, const replay_buffer::Misconduct& stored);  // `stored` by an earlier process
  replay_buffer::Misconduct misconduct_of(WorkerId worker) const;
  // Counts a malformed message. Returns true once the worker must be expelled.
  bool record_malformed(WorkerId worker);
  // Counts a group that failed. Returns true once the worker must be expelled.
  bool record_failure(WorkerId worker);
  void record_accepted(WorkerId worker);  // an accepted submission
  // Counts a message without new trajectories: a request, a progress message, a repeated submission. Returns true if
  // the worker sends more of them than it needs.
  bool exceeds_message_rate(WorkerId worker, TimePoint now);

  void check() const;  // aborts if its parts disagree

 private:
  struct Record {
    std::uint32_t malformed = 0;
    std::uint32_t accepted_since = 0;     // submissions accepted since the last malformed message or forgiveness
    std::uint32_t failures_in_a_row = 0;  // groups
    std::uint64_t successes_before = 0;   // successes_ when the row of failures began
  };
  std::map<WorkerId, Record> records_;
  std::map<WorkerId, TokenBucket> message_buckets_;
  std::uint64_t successes_ = 0;  // accepted submissions of all workers
};

// Counts offences, stores the counts with the leases, and expels guilty workers. One thread, the desk's.
class Discipline {
 public:
  explicit Discipline(DeskContext& desk);

  // Expels workers that repeatedly take work and return none of it (JobLedger::newly_unproductive).
  void expel_unproductive_workers();
  // `forged`: no honest worker sends such a message, so the worker is expelled at once.
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
