// The job ledger: which worker may generate which group, and until when. A lease is that permission. A LeaseCore
// decides; the ledger stores its decisions in the replay buffer's file. So a restarted learner neither loses nor
// duplicates a group.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "replay_buffer/buffer.hpp"
#include "replay_buffer/lease_core.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::replay_buffer {

using LedgerOptions = LeaseOptions;  // pacing.group_size is ignored: the buffer's group size counts

// A worker's trajectories for one lease. The caller has checked each with data_plane::check(), or states a
// `refusal_reason`.
struct Delivery {
  WorkerId worker;  // the worker whose connection sent it, whatever the message says
  const schema::Submission* submission = nullptr;
  // Why the caller refuses it: a stable text. Empty: not refused. If the worker does not hold the lease, the reason
  // from refusal() in rules.hpp counts instead.
  std::string_view refusal_reason = {};
  std::string detail = {};  // what was expected and found
  bool unscored = false;    // it has no score, and is not trained on before it gets one
};

// A worker could not generate the group of a lease.
struct FailedWork {
  WorkerId worker;
  LeaseId lease;
  std::string_view reason;  // a stable text
  std::string detail;
};

// A worker's misconduct besides lapses, found by the learner's checks; stored with the leases.
struct Misconduct {
  std::uint32_t malformed = 0;  // malformed messages
  std::uint32_t failures = 0;   // groups in a row that it could not generate
  friend bool operator==(const Misconduct&, const Misconduct&) = default;
};

// The ledger's decision on a delivery.
struct Verdict {
  LeaseId lease;
  bool accepted = false;     // durable, counted once
  bool duplicate = false;    // accepted earlier; this copy changed nothing
  std::string reason;        // why it was refused: a stable text of rules.hpp, "malformed", "stale", or the caller's
  std::string detail;        // for the log: what was expected and found
  double lease_seconds = 0;  // if accepted: time with leases since the worker's previous result
};

struct LedgerCounts {
  std::uint64_t live = 0;     // outstanding leases
  std::uint64_t pooled = 0;   // groups waiting for another lease
  std::uint64_t settled = 0;  // since the file was created
  std::uint64_t expired = 0;
  std::uint64_t released = 0;
  std::map<std::string, std::uint64_t> set_aside = {};  // groups by reason, since the file was created
  // Steps in which a pacing bound, S or L (rules.hpp), kept workers from more work, since the ledger was opened.
  LimitedStepCounter limited_steps = {};
};

// Times are seconds since 1970, because leases outlive a process. Thread: the buffer's owner thread. The buffer must
// outlive the ledger. A method that returns an Error has changed nothing, in the file or in memory, and may be called
// again. Group g is training problem g of the adapter, because both are numbered in the order of their first lease.
class JobLedger {
 public:
  static Result<std::unique_ptr<JobLedger>> open(ReplayBuffer& buffer, const LedgerOptions& options);
  ~JobLedger();

  // Leases up to groups_max groups for learner step `step` and stores the leases. LeaseCore::grant() has the rules.
  Result<std::vector<LeaseRecord>> grant(const GrantRequest& request, std::uint64_t step, double now_unix_s);

  // Checks, stores and settles all deliveries in ONE transaction: on return, every accepted verdict is durable. A
  // repeated submission is acknowledged without being counted twice. A refusal concerns its delivery only; its live
  // lease ends and the group returns to the pool. After an Error (disk, buffer full) nothing is stored and the workers
  // should send again. `step` is the learner's; a delivery too stale for it is refused.
  Result<std::vector<Verdict>> submit(std::span<const Delivery> deliveries, std::uint64_t step, double now_unix_s);

  // Runs calls to this ledger, except submit(), and writes their changes in ONE transaction. Their results count only
  // if this returns ok. On an Error none of them has happened, whatever they returned, and all may be repeated.
  Status run_in_transaction(const std::function<void()>& calls);

  // Extends these leases of this worker by a full term from now (bounded by LeaseSettings::max) if `progress` has grown
  // since the last call. Returns how many.
  Result<std::uint64_t> renew(WorkerId worker, std::span<const LeaseId> leases, std::uint64_t progress,
                              double now_unix_s);

  // The worker could not generate the group of its lease. The group goes to another worker, or is set aside after
  // repeated failures (rules.hpp). False if it was not a live lease of this worker.
  Result<bool> on_group_failed(const FailedWork& failure);
  // This worker's result could not be scored and was discarded. The group counts as failed.
  Status on_result_unscorable(GroupId group, WorkerId worker, std::string_view reason, const std::string& detail);
  // This worker returns leases, which is no failure. Their groups return to the pool. Returns how many.
  Result<std::uint64_t> return_leases(WorkerId worker, std::span<const LeaseId> leases);
  // Returns all live leases of this worker.
  Result<std::uint64_t> return_all_leases(WorkerId worker);
  // Sets a live lease's group aside at once, because no worker can generate it.
  Status set_aside(LeaseId lease, std::string_view reason, std::string detail);
  // Groups that were set aside since the last call.
  std::vector<SetAsideGroup> newly_set_aside();

  // Workers that reached kLapseWeightMax (rules.hpp) since the last call. Lapses count across connections and restarts.
  std::vector<UnproductiveWorker> newly_unproductive();
  const std::map<WorkerId, Misconduct>& misconduct() const;
  Status store_misconduct(WorkerId worker, const Misconduct& misconduct);

  // The worker is lost: its groups return to the pool, its measured speed is dropped. Returns the number of groups.
  Result<std::uint64_t> release_worker(WorkerId worker, double now_unix_s);
  // Call after a restart whose workers ended with the learner. All live leases end and their groups return to the pool.
  Result<std::uint64_t> release_all();
  // Ends leases whose time has run out; their groups return to the pool. Returns the number of leases.
  Result<std::uint64_t> expire(double now_unix_s);

  // Extends all live leases by `extend_by_s`, the time in which this process did not run or could not store results.
  // Call before the next grant() or expire(). Returns how many. Writes to the file even without leases, so its result
  // shows whether the file is writable.
  Result<std::uint64_t> extend_all_leases(double extend_by_s, double now_unix_s);

  // Trajectories of live leases that would be too stale for every later batch if the learner trained on sample(step)
  // now (rules.hpp, stranded). A learner that waits while this is above zero, at most until those leases expire, never
  // discards generated work.
  Result<std::uint64_t> stranded_by_next_step(std::uint64_t step, double now_unix_s);

  Result<LedgerCounts> counts();
  std::uint64_t leases_held(WorkerId worker);  // number of its live leases

  // The time from grant to result of the worker's latest batches, if the last grant() gave it nothing because it is too
  // slow; otherwise absent.
  std::optional<double> too_slow_batch_seconds(WorkerId worker) const;
  // Whether the worker's last grant() gave it nothing while it held nothing, because no worker of any speed or policy
  // could have got work. Then the worker is not to blame for submitting nothing.
  bool was_turned_away(WorkerId worker) const;
  double take_seconds_without_work(WorkerId worker, double now_unix_s);  // LeaseCore::take_seconds_without_work

 private:
  class Impl;
  explicit JobLedger(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::replay_buffer
