// The job ledger: which worker may generate which group until when. A LeaseCore decides; the ledger keeps what it
// decides in the replay buffer's file, so a restarted learner neither loses nor doubles a group.
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

using LedgerOptions = LeaseOptions;  // the group size is the buffer's

// A worker hands in the trajectories of one lease. The caller has found data_plane::check() in order for each of them,
// or says in `refused` that it has not.
struct Delivery {
  WorkerId worker;  // who the connection belongs to, not what the message says
  const schema::Submission* submission = nullptr;
  // Why it must not be stored, found by the caller: a stable text, and what was expected and found. Empty: nothing.
  std::string_view refused = {};
  std::string detail = {};
  bool unscored = false;  // it brings no score, and nobody trains on it before there is one
};

// A worker could not generate the group of a lease.
struct FailedWork {
  WorkerId worker;
  LeaseId lease;
  std::string_view reason;  // a stable text
  std::string detail;
};

// What else is held against a worker, by whoever looks at what it hands in; kept with the leases.
struct Misconduct {
  std::uint32_t malformed = 0, failures = 0;
  friend bool operator==(const Misconduct&, const Misconduct&) = default;
};

struct Verdict {
  LeaseId lease;
  bool accepted = false;   // durable, counted once
  bool duplicate = false;  // accepted earlier; this copy changed nothing
  std::string reason;      // why not, one of the stable texts of rules.hpp, "malformed", "stale", or the caller's
  std::string detail;      // more for the log: what was expected and what was found
  double held_s = 0;       // accepted: for how long the worker had leases that no earlier result accounts for
};

struct LedgerCounts {
  std::uint64_t live = 0;     // outstanding leases
  std::uint64_t pooled = 0;   // groups waiting to be leased again
  std::uint64_t settled = 0;  // since the file was made
  std::uint64_t expired = 0;
  std::uint64_t released = 0;
  std::map<std::string, std::uint64_t> set_aside = {};  // groups by reason, since the file was made
  BoundSteps bound = {};                                // what kept workers from more work, since the ledger was opened
};

// Times are seconds since 1970 (leases outlive a process). Thread: the buffer's owner thread. The buffer must outlive
// the ledger. A method that returns an Error has changed nothing, in the file or in memory, and may be called again.
// Group g is training problem g of the adapter: one cursor numbers both.
class JobLedger {
 public:
  static Result<std::unique_ptr<JobLedger>> open(ReplayBuffer& buffer, const LedgerOptions& options);
  ~JobLedger();

  // Leases up to groups_max groups for learner step t, as pacing, the worker's share and what it has handed in before
  // allow (rules.hpp); returned groups first, but none that this worker failed on while others are there to try it,
  // then new problems from the cursor. A group that several workers were lost with is leased alone. Empty when nothing
  // may be generated now, or when the batch of this step is covered and the worker is too slow for a later one. Expires
  // overdue leases.
  Result<std::vector<LeaseRecord>> grant(const GrantRequest& request, std::uint64_t step, double now_unix_s);

  // Accepts, checks, stores and settles all deliveries in ONE transaction: when it returns, every accepted verdict is
  // durable. The same submission again is acknowledged without being counted twice. A refusal concerns its delivery
  // only; its live lease ends and the group goes back to the pool. An Error (disk, buffer full) means nothing was
  // stored and the workers should send again. `step` is the learner's: what is too stale for it already is refused.
  Result<std::vector<Verdict>> submit(std::span<const Delivery> deliveries, std::uint64_t step, double now_unix_s);

  // What `calls` change through this ledger, but for submit(), is written in ONE transaction after they have returned.
  // On an Error none of them has happened, whatever they returned, and all may be made again.
  Status together(const std::function<void()>& calls);

  // Signs of life: the leases of this worker get a full term from now (LeaseSettings::max bounds it), if `progress` has
  // grown since it was last told. Returns how many.
  Result<std::uint64_t> renew(WorkerId worker, std::span<const LeaseId> leases, std::uint64_t progress,
                              double now_unix_s);

  // The worker gives a lease back. The group goes to another worker, or is set aside after that (rules.hpp). False when
  // it was no live lease of this worker.
  Result<bool> failed(const FailedWork& failure);
  // What this worker handed in could not be scored, and was discarded: the group counts as one that failed.
  Status unscorable(GroupId group, WorkerId worker, std::string_view reason, const std::string& detail);
  // Nothing comes of these leases of this worker, and nobody is to blame: their groups go back to the pool. Returns how
  // many.
  Result<std::uint64_t> give_back(WorkerId worker, std::span<const LeaseId> leases);
  // Likewise every live lease of this worker.
  Result<std::uint64_t> give_back_all(WorkerId worker);
  // The group of a live lease cannot be generated by anybody: it is set aside at once.
  Status set_aside(LeaseId lease, std::string_view reason, std::string detail);
  // Groups that were set aside since the last call.
  std::vector<SetAside> newly_set_aside();

  // Who has taken too many batches and returned none of them, since the last call; also across connections and
  // restarts.
  std::vector<Idler> newly_idle();
  const std::map<WorkerId, Misconduct>& misconduct() const;
  Status keep(WorkerId worker, const Misconduct& misconduct);

  // The worker is lost: its groups go back to the pool, its measured speed is forgotten. Returns how many.
  Result<std::uint64_t> release_worker(WorkerId worker, double now_unix_s);
  // After a restart whose workers ended with the learner: every live lease ends and its group goes back to the pool.
  Result<std::uint64_t> release_all();
  // Overdue leases end and their groups go back to the pool. Returns how many.
  Result<std::uint64_t> expire(double now_unix_s);

  // For so long this process did not run, or could not store what was handed in: every live lease lasts so much longer.
  // Call before the next grant() or expire(). Returns how many. Writes to the file even when there is no lease, and so
  // shows whether it can be written.
  Result<std::uint64_t> excuse(double late_s, double now_unix_s);

  // Trajectories of live leases that would come too late for every later batch if the learner trained on what
  // sample(step) gives now (rules.hpp, stranded). A learner that waits while it is above zero, at most until those
  // leases expire, never throws generated work away.
  Result<std::uint64_t> stranded_by_next_step(std::uint64_t step, double now_unix_s);

  Result<LedgerCounts> counts();
  std::uint64_t held(WorkerId worker);  // its live leases

  // What the worker's latest batches took from grant to result, when the last grant() gave it nothing for being too
  // slow; absent otherwise.
  std::optional<double> too_slow(WorkerId worker) const;
  // At its last grant() it held nothing and got nothing, because nobody could have been given anything, whatever their
  // speed and policy: that it hands in nothing is not its doing.
  bool turned_away(WorkerId worker) const;

 private:
  class Impl;
  explicit JobLedger(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::replay_buffer
