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
#include <unordered_map>
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
  std::uint32_t groups_max = 1;                       // groups that the worker asks for
  std::optional<double> step_seconds = std::nullopt;  // measured length of a learner step, if known
  std::optional<Version> newest = std::nullopt;       // newest version that any worker may have; absent: `version`
  // Share of the worker's capacity that has no work before this request; absent: by the groups it asks for and holds.
  std::optional<double> free_share = std::nullopt;
};

// The group that was submitted for a lease and stored.
struct StoredResult {
  Version version;                   // oldest version of any token
  std::uint64_t tokens_longest = 0;  // length of the longest response
  bool scored = true;                // false: the group waits for the learner's scores before it is trained on
};

// A group that is not leased any more, because workers repeatedly failed on it.
struct SetAsideGroup {
  GroupId group;
  std::string reason;  // a stable text, by which reports count
  std::string detail;  // for people
};

// A worker that repeatedly takes work and returns little or none of it. The caller should give it no more.
struct UnproductiveWorker {
  WorkerId worker;
  std::string reason;
};

// A worker's lapses. A lapse is a batch of leases (one grant) of which more expired together than had brought results,
// or that the worker held when it was lost.
struct Lapses {
  std::uint32_t weight = 0;   // rises with each lapse, falls with each submitted batch (rules.hpp, weight_after_lapse)
  std::uint32_t batches = 0;  // number of lapses
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
  std::optional<double> settled_s;  // time at which the result was stored; absent if the lease ended without one
};
struct Renewed {
  LeaseId lease;
  std::uint64_t progress;
  double expires_s;
};
// Every live lease of the worker is due at most this long after its grant.
struct WaitsShortened {
  WorkerId worker;
  double patience_s;
};
// Every live lease is due, and expires, later by this time, in which the learner paused.
struct AllExtended {
  double extend_by_s;
};
// The pool has the groups whose lease ended without a result. They are leased again, before new groups.
struct Pooled {
  GroupId group;
};
struct Unpooled {
  GroupId group;
};
struct FailuresCounted {
  GroupId group;
  WorkerId worker;
  std::uint32_t failures;  // how often the worker reported that it could not generate the group
  bool worker_lost;        // the connection to the worker broke while it held the group
};
struct FailuresForgotten {
  GroupId group;
};
struct GroupSetAside {
  SetAsideGroup aside;
};
struct Lapsed {
  WorkerId worker;
  Lapses lapses;
};
}  // namespace change
using LeaseChange = std::variant<change::Leased, change::Ended, change::Renewed, change::WaitsShortened,
                                 change::AllExtended, change::Pooled, change::Unpooled, change::FailuresCounted,
                                 change::FailuresForgotten, change::GroupSetAside, change::Lapsed>;

// Counters that only grow.
struct LeaseTotals {
  std::uint64_t next_lease = 1, next_group = 0;          // numbers of the next new lease and group
  std::uint64_t settled = 0, expired = 0, released = 0;  // leases by their end
  friend bool operator==(const LeaseTotals&, const LeaseTotals&) = default;
};

// Use from one thread. A grant, a result and the end of a lease take O(log n) in the number of workers, leases and
// groups.
class LeaseCore {
 public:
  // `waiting` must outlive the core. The core adds submitted groups to it; the caller removes groups that were
  // consumed, dropped or discarded.
  LeaseCore(const LeaseOptions& options, WaitingGroups& waiting);

  // --- From a journal, before anything else ---------------------------------------------------------------------
  void load(LiveLease lease);
  void load_pooled(GroupId group);
  void load_failure(GroupId group, WorkerId worker, std::uint32_t failures, bool worker_lost);
  void load_lapses(WorkerId worker, Lapses lapses);
  void load_totals(const LeaseTotals& totals) { totals_ = totals; }

  // --- To a journal ---------------------------------------------------------------------------------------------
  // From begin() on, every change is recorded until commit() or rollback(). Without begin(), recording costs nothing.
  // changes(), totals_before() and has_changes() may be called only in between.
  void begin();
  const std::vector<LeaseChange>& changes() const { return recording_->changes; }
  const LeaseTotals& totals_before() const { return recording_->totals; }
  bool has_changes() const { return !recording_->changes.empty() || totals_ != recording_->totals; }
  void commit();
  void rollback();  // restores the state at begin()

  // --- Events ---------------------------------------------------------------------------------------------------
  // Leases up to groups_max groups for learner step `step`, as far as pacing, the worker's share and its earlier
  // results allow (rules.hpp). Groups from the pool come first, lowest id first; then new groups in order of their
  // numbers. A worker does not get a group on which it failed, unless it is the only worker. A group with which several
  // workers were lost is leased alone. Empty if nothing may be generated now. Also empty if leased and waiting groups
  // already suffice for this step and the worker is too slow for a later one. Ends expired leases first, as expire()
  // does.
  std::vector<LiveLease> grant(const GrantRequest& request, std::uint64_t step, double now_s);

  // The lease's result is stored and now waits in the buffer. `lease` must be live. Returns for how many seconds the
  // worker has held leases since its previous result, so that no time is counted twice.
  double settle(LeaseId lease, const StoredResult& result, double now_s);
  // The lease's result was refused, so its group returns to the pool. `lease` must be live.
  void refuse(LeaseId lease, std::uint64_t tokens_longest, double now_s);
  // A result came after its lease expired. Records how long the work took, because otherwise a slow worker's next lease
  // would be equally short.
  void record_late_result(WorkerId worker, double granted_s, std::uint64_t tokens_longest, double now_s);

  // Extends these leases by a full term from now if `progress` has grown. Returns how many.
  std::uint64_t renew(WorkerId worker, std::span<const LeaseId> leases, std::uint64_t progress, double now_s);
  // The worker could not generate the group. The group goes to another worker, or is set aside after repeated failures.
  // Returns false if this is not a live lease of this worker.
  bool on_group_failed(WorkerId worker, LeaseId lease, std::string_view reason, const std::string& detail);
  // The worker's result could not be scored. The group is in the pool; this counts as the worker's failure.
  void on_result_unscorable(GroupId group, WorkerId worker, std::string_view reason, const std::string& detail);
  // Ends leases of this worker without counting a failure. Returns how many of them were live and this worker's.
  std::uint64_t return_leases(WorkerId worker, std::span<const LeaseId> leases);
  std::uint64_t return_all_leases(WorkerId worker);
  // Sets the group of this lease aside, because no worker can generate it. Returns false if the lease is not live.
  bool set_aside(LeaseId lease, std::string_view reason, const std::string& detail);
  // A stored group was discarded, so the core leases it again.
  void regenerate(GroupId group);
  // The worker is lost: its groups return to the pool, its measured speed is dropped. Returns the number of groups.
  std::uint64_t release_worker(WorkerId worker, double now_s);
  // Ends all live leases without counting a failure; their groups return to the pool. Returns the number of leases.
  std::uint64_t release_all();
  // Ends leases whose time has run out; their groups return to the pool. Returns the number of leases.
  std::uint64_t expire(double now_s);
  // expire() for a caller without heartbeats (the simulator, the prediction of idle time). An expired lease of a worker
  // for which `is_alive` holds is renewed, as if the worker had just reported progress, up to the lease's maximum term.
  std::uint64_t renew_or_expire(double now_s, const std::function<bool(WorkerId)>& is_alive);
  // Extends all live leases by `extend_by_s`, a time until now in which no result could be submitted, because the
  // learner paused. Returns how many.
  std::uint64_t extend_all_leases(double extend_by_s, double now_s);

  // --- Questions ------------------------------------------------------------------------------------------------
  const LiveLease* find(LeaseId lease) const;  // null unless live; valid until the next event
  // Trajectories of awaited leases that would be too stale for every later batch if the learner trained now (rules.hpp,
  // stranded).
  std::uint64_t stranded_by_next_step(std::uint64_t step, double now_s);
  // Whether pacing allows no more work for a policy of this version now, for a worker of any speed.
  bool has_no_room(Version version, std::uint64_t step, double now_s);
  std::uint64_t leases_held(WorkerId worker) const;  // number of its live leases
  // If the worker's last grant() was empty because the worker is too slow: the seconds that it takes from grant to
  // result.
  std::optional<double> too_slow_batch_seconds(WorkerId worker) const;
  // Whether the worker's last grant() was empty although it held nothing, because there was no work for any worker.
  bool was_turned_away(WorkerId worker) const;
  // How long, since the last call, the worker has wanted work and there was none for it, because of pacing or of its
  // share of the stock. While only a part of its capacity is without work, that part of the time counts. Decides
  // nothing.
  double take_seconds_without_work(WorkerId worker, double now_s);
  std::vector<SetAsideGroup> newly_set_aside();          // groups set aside since the last call
  std::vector<UnproductiveWorker> newly_unproductive();  // workers found unproductive since the last call
  std::size_t live() const { return leases_.size(); }
  std::size_t pooled() const { return pool_.size(); }
  const std::map<Version, std::uint64_t>& live_by_version() const { return leases_.by_version(); }
  const LeaseTotals& totals() const { return totals_; }
  // Steps in which a pacing bound, S or L, kept workers from work.
  const LimitedStepCounter& limited_steps() const { return limited_steps_; }
  Version version_min(std::uint64_t step) const;  // the oldest version that is fresh enough at the step

  void check() const { leases_.check(); }  // LeaseTable::check

 private:
  struct Worker {
    WorkerPace pace;
    bool too_slow = false, turned_away = false;  // results of its last request, see the questions above
    std::uint64_t group_allowance = 0;           // groups that it may hold, by its earlier results
    // Since share_begun_s, this share of its capacity has had no work. seconds_without_work counts the time before,
    // each second with the share of then.
    double share_without_work = 0, share_begun_s = 0, seconds_without_work = 0;
    double counted_until_s = 0;  // settle() has counted the time with leases before this time
  };
  struct Pause {  // of the learner
    double ended_s, length_s;
  };
  // The changes since begin(), and the functions that undo them.
  struct Recording {
    std::vector<LeaseChange> changes;
    std::vector<std::function<void()>> undo;
    LeaseTotals totals;                                       // the totals at begin()
    std::size_t set_aside_count = 0, unproductive_count = 0;  // sizes of the lists at begin()
  };

  Worker& find_or_add_worker(WorkerId id);
  static void count_without_work(Worker& worker, double now_s);
  std::uint64_t groups_held_max_by_pace(const Worker& worker) const;
  std::uint64_t trajectories_in_stock(std::uint64_t step) const;  // trajectories being generated, or waiting
  std::vector<GroupId> take_groups(std::uint64_t count, WorkerId worker, bool holds_nothing);
  void add_lease(LiveLease lease);
  LiveLease end_lease(LeaseId lease, LeaseState state, std::optional<double> settled_s = std::nullopt);
  void put_in_pool(GroupId group);
  void take_from_pool(GroupId group);
  void record_failure(GroupId group, WorkerId worker, bool worker_lost);
  void set_failures(GroupId group, GroupPool::Failures failures);
  void forget_failures(GroupId group);
  void set_aside_if_failed_often(GroupId group, std::string_view reason, const std::string& detail);
  void set_group_aside(GroupId group, std::string_view reason, const std::string& detail);
  void record_lapse(WorkerId worker, LapseKind kind);
  void set_lapses(WorkerId worker, Lapses lapses);
  void record_pace(WorkerId worker, double granted_s, double now_s, std::uint64_t tokens);
  void shorten_waits_for_unmeasured_workers();
  double result_time_without_pauses(double granted_s, double now_s) const;
  void record_change(LeaseChange change);
  // Keeps a function that undoes a change, for rollback().
  template <class Undo>
  void add_undo(Undo&& undo) {
    if (recording_) recording_->undo.emplace_back(std::forward<Undo>(undo));
  }

  LeaseOptions options_;
  WaitingGroups& waiting_;
  LeaseTotals totals_;
  LeaseTable leases_;
  GroupPool pool_;
  std::unordered_map<WorkerId, Worker> workers_;  // workers that asked for work and were not lost
  FleetPaces paces_;                              // the paces of the workers in workers_
  std::map<WorkerId, Lapses> lapses_;             // only workers with lapses
  std::optional<double> version_usable_s_;        // duration of the S + 1 steps that may train on work granted now
  std::deque<Pause> pauses_;                      // recorded by extend_all_leases()
  LimitedStepCounter limited_steps_;
  std::vector<SetAsideGroup> newly_set_aside_;
  std::vector<UnproductiveWorker> newly_unproductive_;
  std::optional<Recording> recording_;
};

}  // namespace echoline::replay_buffer
