// The decisions of the job ledger: which worker may generate which group, and until when. The core takes events and
// returns leases and changes. It has no database, clock or thread, so the service (replay_buffer/job_ledger) and the
// simulator run the same code. Times are seconds on one clock of the caller, which never runs backwards.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/ids.hpp"
#include "replay_buffer/fleet_paces.hpp"
#include "replay_buffer/group_pool.hpp"
#include "replay_buffer/lease_table.hpp"
#include "replay_buffer/pace.hpp"
#include "replay_buffer/rules.hpp"
#include "replay_buffer/waiting_groups.hpp"

namespace echoline::replay_buffer {

struct LeaseOptions {
  Pacing pacing;
  LeaseLength lease;
  std::uint32_t leases_per_grant_max = 256;
  std::uint32_t leases_live_max = 65'536;
};

// A worker asks for work. `policy_digest` is the learner's own digest of `version`; the caller has checked that the
// worker's agrees.
struct GrantRequest {
  WorkerId worker;
  Version version;
  std::string policy_digest;
  std::uint32_t groups_max = 1;
  std::optional<double> step_seconds = std::nullopt;  // measured length of a learner step, if known
  std::optional<Version> newest = std::nullopt;       // newest version that workers may have; absent: `version`
};

// The stored group of a lease.
struct StoredResult {
  Version version;                   // oldest version of any token
  std::uint64_t tokens_longest = 0;  // of the longest response
  bool scored = true;
};

// A group that is not leased any more.
struct SetAside {
  GroupId group;
  std::string reason, detail;
};

// A worker that repeatedly takes work and returns none of it; it should get no more.
struct Idler {
  WorkerId worker;
  std::string reason;
};

// A worker's batches of leases that ended without a result (rules.hpp, lapse_weight).
struct Lapses {
  std::uint32_t weight = 0, batches = 0;
  friend bool operator==(const Lapses&, const Lapses&) = default;
};

// A change made by the core, for a journal. Loading a journal restores the same core.
namespace change {
struct Leased {
  LiveLease lease;
};
struct Ended {
  LeaseId lease;
  LeaseState state;
  std::optional<double> settled_s;
};
struct Renewed {
  LeaseId lease;
  std::uint64_t progress;
  double expires_s;
};
// Every live lease of the worker is due at most this long after its grant.
struct DueSooner {
  WorkerId worker;
  double patience_s;
};
// Every live lease is due and expires later by this much.
struct Excused {
  double late_s;
};
struct Pooled {
  GroupId group;
};
struct Unpooled {
  GroupId group;
};
// The number of this worker's failures on this group.
struct Failed {
  GroupId group;
  WorkerId worker;
  std::uint32_t failures;
  bool lost;
};
struct FailuresForgotten {
  GroupId group;
};
struct PutAside {
  SetAside aside;
};
struct Lapsed {
  WorkerId worker;
  Lapses lapses;
};
}  // namespace change
using LeaseChange =
    std::variant<change::Leased, change::Ended, change::Renewed, change::DueSooner, change::Excused, change::Pooled,
                 change::Unpooled, change::Failed, change::FailuresForgotten, change::PutAside, change::Lapsed>;

// Counters that only grow.
struct LeaseTotals {
  std::uint64_t next_lease = 1, next_group = 0;
  std::uint64_t settled = 0, expired = 0, released = 0;
  friend bool operator==(const LeaseTotals&, const LeaseTotals&) = default;
};

// Use from one thread. A grant, a result and the end of a lease take O(log n) in the number of workers, leases and
// groups.
class LeaseCore {
 public:
  // `waiting` must outlive the core, which adds submitted groups; the caller removes consumed, dropped and discarded
  // ones.
  LeaseCore(const LeaseOptions& options, WaitingGroups& waiting);

  // --- From a journal, before anything else ---------------------------------------------------------------------
  void load(LiveLease lease);
  void load_pooled(GroupId group);
  void load_failure(GroupId group, WorkerId worker, std::uint32_t failures, bool lost);
  void load_lapses(WorkerId worker, Lapses lapses);
  void load_totals(const LeaseTotals& totals) { totals_ = totals; }

  // --- To a journal ---------------------------------------------------------------------------------------------
  // From begin() on, every change is recorded until commit() or rollback(). Without begin(), recording costs nothing.
  void begin();
  const std::vector<LeaseChange>& changes() const { return notes_->changes; }
  const LeaseTotals& totals_before() const { return notes_->totals; }
  bool changed() const { return !notes_->changes.empty() || totals_ != notes_->totals; }
  void commit();
  void rollback();  // restores the state at begin()

  // --- Events ---------------------------------------------------------------------------------------------------
  // Leases up to groups_max groups for learner step t, as far as pacing, the worker's share and its earlier results
  // allow (rules.hpp). Groups from the pool come first, lowest id first; then new problems from the cursor. A worker
  // does not get a group on which it failed, unless it is the only worker. A group with which several workers were lost
  // is leased alone. Empty if nothing may be generated now, or if the batch of this step is covered and the worker is
  // too slow for a later one. Ends expired leases first, as expire() does.
  std::vector<LiveLease> grant(const GrantRequest& request, std::uint64_t step, double now_s);

  // The lease's result is stored and now waits in the buffer. `lease` must be live. Returns the seconds for which the
  // worker held leases that no earlier result covers.
  double settle(LeaseId lease, const StoredResult& result, double now_s);
  // The lease's result was refused, so its group returns to the pool. `lease` must be live.
  void refuse(LeaseId lease, std::uint64_t tokens_longest, double now_s);
  // A result came after its lease expired. It still shows how long the work takes; otherwise a slow worker's next lease
  // would be equally short.
  void came_late(WorkerId worker, double granted_s, std::uint64_t tokens_longest, double now_s);

  // Extends these leases by a full term from now if `progress` has grown. Returns how many.
  std::uint64_t renew(WorkerId worker, std::span<const LeaseId> leases, std::uint64_t progress, double now_s);
  // The worker could not generate the group. It goes to another worker, or is set aside after repeated failures. False
  // if this is not a live lease of this worker.
  bool failed(WorkerId worker, LeaseId lease, std::string_view reason, const std::string& detail);
  // The worker's result could not be scored. The group is in the pool; this counts as the worker's failure.
  void unscorable(GroupId group, WorkerId worker, std::string_view reason, const std::string& detail);
  // Returns leases without blame to a worker. Returns how many were live and this worker's.
  std::uint64_t give_back(WorkerId worker, std::span<const LeaseId> leases);
  std::uint64_t give_back_all(WorkerId worker);
  // No worker can generate the group of this live lease. False if it is not live.
  bool set_aside(LeaseId lease, std::string_view reason, const std::string& detail);
  // A stored group was discarded, so the core leases it again.
  void regenerate(GroupId group);
  // The worker is lost: its groups return to the pool, its measured speed is dropped. Returns how many.
  std::uint64_t release_worker(WorkerId worker, double now_s);
  std::uint64_t release_all();
  // Ends overdue leases; their groups return to the pool. Returns how many.
  std::uint64_t expire(double now_s);
  // Extends all live leases by a time in which no result could be submitted. Returns how many.
  std::uint64_t excuse(double late_s, double now_s);

  // --- Questions ------------------------------------------------------------------------------------------------
  const LiveLease* find(LeaseId lease) const;  // null unless live; valid until the next event
  // The lease that expires first; null if there is none.
  const LiveLease* first_to_expire() const;
  // Trajectories of live leases that would be too stale for every later batch if the learner trained now (rules.hpp,
  // stranded).
  std::uint64_t stranded_by_next_step(std::uint64_t step, double now_s);
  // Whether no worker of any speed can get work for a policy of this version now.
  bool closed(Version version, std::uint64_t step, double now_s);
  std::uint64_t held(WorkerId worker) const;              // its live leases
  std::optional<double> too_slow(WorkerId worker) const;  // JobLedger::too_slow
  bool turned_away(WorkerId worker) const;                // JobLedger::turned_away
  std::vector<SetAside> newly_set_aside();                // since the last call
  std::vector<Idler> newly_idle();                        // since the last call
  std::size_t live() const { return leases_.size(); }
  std::size_t pooled() const { return pool_.size(); }
  const std::map<Version, std::uint64_t>& live_by_version() const { return leases_.by_version(); }
  const LeaseTotals& totals() const { return totals_; }
  const BoundSteps& bound() const { return bound_; }  // reasons that kept workers from more work
  Version version_min(std::uint64_t step) const;      // the oldest version that is fresh enough at the step

  void check() const { leases_.check(); }  // LeaseTable::check

 private:
  struct Worker {
    WorkerPace pace;
    bool too_slow = false, turned_away = false;  // at its last request
    std::uint64_t trusted = 0;                   // groups that it may hold by its earlier results
    double accounted_until_s = 0;                // end of the time covered by its results
  };
  // The changes since begin(), and the functions that undo them.
  struct Notes {
    std::vector<LeaseChange> changes;
    std::vector<std::function<void()>> undo;
    LeaseTotals totals;
    std::size_t set_aside = 0, idle = 0;
  };

  Worker& worker_of(WorkerId id);
  std::uint64_t may_hold(const Worker& worker) const;  // groups, by the worker's speed
  std::uint64_t ahead(std::uint64_t step) const;       // trajectories in flight or waiting
  std::vector<GroupId> take_groups(std::uint64_t count, WorkerId worker, bool idle);
  void lease(LiveLease lease);
  LiveLease end(LeaseId lease, LeaseState state, std::optional<double> settled_s = std::nullopt);
  void put_in_pool(GroupId group);
  void take_from_pool(GroupId group);
  void note_failure(GroupId group, WorkerId worker, bool lost);
  void put_failures(GroupId group, GroupPool::Failures failures);
  void forget_failures(GroupId group);
  void judge(GroupId group, std::string_view reason, const std::string& detail);
  void put_aside(GroupId group, std::string_view reason, const std::string& detail);
  void lapsed(WorkerId worker, LapseKind kind);
  void put_lapses(WorkerId worker, Lapses lapses);
  void keep_pace(WorkerId worker, double granted_s, double now_s, std::uint64_t tokens);
  void wait_less_for_newcomers();
  double worked_until(double granted_s, double now_s) const;  // excluding later pauses
  void note(LeaseChange change);
  template <class F>
  void undo(F&& back) {
    if (notes_) notes_->undo.emplace_back(std::forward<F>(back));
  }

  LeaseOptions options_;
  WaitingGroups& waiting_;
  LeaseTotals totals_;
  LeaseTable leases_;
  GroupPool pool_;
  std::map<WorkerId, Worker> workers_;  // workers that asked for work and were not lost
  FleetPaces paces_;                    // of workers_
  std::map<WorkerId, Lapses> lapses_;   // workers with any
  std::optional<double> fresh_s_;       // time in which the learner does all steps that may use work granted now
  std::deque<std::pair<double, double>> pauses_;  // of excuse(): end and length of each pause
  BoundSteps bound_;
  std::vector<SetAside> newly_set_aside_;
  std::vector<Idler> newly_idle_;
  std::optional<Notes> notes_;
};

}  // namespace echoline::replay_buffer
