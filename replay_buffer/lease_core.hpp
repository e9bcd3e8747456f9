// The decisions of the job ledger: which worker may generate which group, and until when. The core takes events and
// answers with leases and changes. It has no database, clock or thread, so the service (replay_buffer/job_ledger) and
// the simulator run the same code. Times are seconds on one clock of the caller, which never runs backwards.
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
  std::optional<double> step_seconds = std::nullopt;  // a learner step, as measured; absent: not yet
  std::optional<Version> newest = std::nullopt;       // that workers may have; absent: this one
};

// The whole group of a lease, as it was stored.
struct StoredResult {
  Version version;                   // the oldest in any token
  std::uint64_t tokens_longest = 0;  // of the longest response
  bool scored = true;
};

// A group that is given to no worker any more.
struct SetAside {
  GroupId group;
  std::string reason, detail;
};

// A worker that takes work again and again and returns nothing of it: it should get no more.
struct Idler {
  WorkerId worker;
  std::string reason;
};

// Batches of leases of one worker that ended without a result (rules.hpp, lapse_weight).
struct Lapses {
  std::uint32_t weight = 0, batches = 0;
  friend bool operator==(const Lapses&, const Lapses&) = default;
};

// A change that the core made, for a journal. A core loaded from the journal is the same core.
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
// Every live lease of the worker is due at most so long after its grant.
struct DueSooner {
  WorkerId worker;
  double patience_s;
};
// Every live lease is due and expires so much later.
struct Excused {
  double late_s;
};
struct Pooled {
  GroupId group;
};
struct Unpooled {
  GroupId group;
};
// All failures of this worker on this group.
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

// Numbers that only grow.
struct LeaseTotals {
  std::uint64_t next_lease = 1, next_group = 0;
  std::uint64_t settled = 0, expired = 0, released = 0;
  friend bool operator==(const LeaseTotals&, const LeaseTotals&) = default;
};

// One thread. A grant, a result and the end of a lease take O(log n) in the number of workers, leases and groups.
class LeaseCore {
 public:
  // `waiting` must outlive the core, which adds the groups that are handed in; the caller removes those that were
  // consumed, dropped or discarded.
  LeaseCore(const LeaseOptions& options, WaitingGroups& waiting);

  // --- From a journal, before anything else ---------------------------------------------------------------------
  void load(LiveLease lease);
  void load_pooled(GroupId group);
  void load_failure(GroupId group, WorkerId worker, std::uint32_t failures, bool lost);
  void load_lapses(WorkerId worker, Lapses lapses);
  void load_totals(const LeaseTotals& totals) { totals_ = totals; }

  // --- To a journal ---------------------------------------------------------------------------------------------
  // From here on every change is noted, until commit() or rollback(). Without begin() nothing is noted, which costs
  // nothing.
  void begin();
  const std::vector<LeaseChange>& changes() const { return notes_->changes; }
  const LeaseTotals& totals_before() const { return notes_->totals; }
  bool changed() const { return !notes_->changes.empty() || totals_ != notes_->totals; }
  void commit();
  void rollback();  // all is as it was at begin()

  // --- Events ---------------------------------------------------------------------------------------------------
  // Leases up to groups_max groups for learner step t. Pacing, the worker's share and its earlier results set the limit
  // (rules.hpp). Groups from the pool come first, lowest id first; then new problems from the cursor. A worker does not
  // get a group that it failed on, unless it is the only worker. A group that several workers were lost with is leased
  // alone. The answer is empty when nothing may be generated now, or when the batch of this step is covered and the
  // worker is too slow for a later one. Ends expired leases first, as expire() does.
  std::vector<LiveLease> grant(const GrantRequest& request, std::uint64_t step, double now_s);

  // The lease's result is stored: it waits in the buffer from now on. `lease` must be live. Returns for how long the
  // worker had leases that no earlier result accounts for.
  double settle(LeaseId lease, const StoredResult& result, double now_s);
  // The lease's result was refused: its group goes back to the pool. `lease` must be live.
  void refuse(LeaseId lease, std::uint64_t tokens_longest, double now_s);
  // The result of a lease that had expired earlier. It still tells how long the work takes, or a slow worker's next
  // lease would be as short.
  void came_late(WorkerId worker, double granted_s, std::uint64_t tokens_longest, double now_s);

  // Signs of life: these leases get a full term from now, if `progress` has grown. Returns how many.
  std::uint64_t renew(WorkerId worker, std::span<const LeaseId> leases, std::uint64_t progress, double now_s);
  // The worker could not generate the group; it goes to another worker, or is set aside after that. False: no live
  // lease of this worker.
  bool failed(WorkerId worker, LeaseId lease, std::string_view reason, const std::string& detail);
  // The worker's result could not be scored. The group is in the pool; this counts as a failure of the worker.
  void unscorable(GroupId group, WorkerId worker, std::string_view reason, const std::string& detail);
  // Nothing comes of these leases, and no worker is to blame. Returns how many were live and this worker's.
  std::uint64_t give_back(WorkerId worker, std::span<const LeaseId> leases);
  std::uint64_t give_back_all(WorkerId worker);
  // No worker can generate the group of this live lease. False: it is not live.
  bool set_aside(LeaseId lease, std::string_view reason, const std::string& detail);
  // A stored group was discarded: the core leases it again.
  void regenerate(GroupId group);
  // The worker is lost: its groups go back to the pool, its measured speed is forgotten. Returns how many.
  std::uint64_t release_worker(WorkerId worker, double now_s);
  std::uint64_t release_all();
  // Overdue leases end and their groups go back to the pool. Returns how many.
  std::uint64_t expire(double now_s);
  // For so long nothing could be handed in: every live lease lasts so much longer. Returns how many.
  std::uint64_t excuse(double late_s, double now_s);

  // --- Questions ------------------------------------------------------------------------------------------------
  const LiveLease* find(LeaseId lease) const;  // null unless it is live; valid until the next event
  // The lease that expires first; null when there is none.
  const LiveLease* first_to_expire() const;
  // Trajectories of live leases that would come too late for every later batch if the learner trained now (rules.hpp,
  // stranded).
  std::uint64_t stranded_by_next_step(std::uint64_t step, double now_s);
  // No worker can be given anything for a policy of this version now, whatever its speed.
  bool closed(Version version, std::uint64_t step, double now_s);
  std::uint64_t held(WorkerId worker) const;              // its live leases
  std::optional<double> too_slow(WorkerId worker) const;  // JobLedger::too_slow
  bool turned_away(WorkerId worker) const;                // JobLedger::turned_away
  std::vector<SetAside> newly_set_aside();                // since the last call
  std::vector<Idler> newly_idle();                        // likewise
  std::size_t live() const { return leases_.size(); }
  std::size_t pooled() const { return pool_.size(); }
  // Trajectories of live leases by version.
  const std::map<Version, std::uint64_t>& live_by_version() const { return leases_.by_version(); }
  const LeaseTotals& totals() const { return totals_; }
  const BoundSteps& bound() const { return bound_; }  // what kept workers from more work
  Version version_min(std::uint64_t step) const;      // the oldest that is fresh enough at the step

  void check() const { leases_.check(); }  // LeaseTable::check

 private:
  struct Worker {
    WorkerPace pace;
    bool too_slow = false, turned_away = false;  // at its last request
    std::uint64_t trusted = 0;                   // groups that it may hold by what it has handed in
    double accounted_until_s = 0;                // of the time in which it had leases
  };
  // The changes since begin(), and the functions that take them back.
  struct Notes {
    std::vector<LeaseChange> changes;
    std::vector<std::function<void()>> undo;
    LeaseTotals totals;
    std::size_t set_aside = 0, idle = 0;
  };

  Worker& worker_of(WorkerId id);
  std::uint64_t may_hold(const Worker& worker) const;  // groups, by its speed
  std::uint64_t ahead(std::uint64_t step) const;       // trajectories under way or waiting
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
  double worked_until(double granted_s, double now_s) const;  // without the pauses since
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
  std::map<WorkerId, Worker> workers_;  // that asked for work and were not lost
  FleetPaces paces_;                    // of these
  std::map<WorkerId, Lapses> lapses_;   // of workers that have any
  std::optional<double> fresh_s_;       // in which the learner does all the steps that may use what is granted now
  std::deque<std::pair<double, double>> pauses_;  // of excuse(): when they ended, and how long they were
  BoundSteps bound_;
  std::vector<SetAside> newly_set_aside_;
  std::vector<Idler> newly_idle_;
  std::optional<Notes> notes_;
};

}  // namespace echoline::replay_buffer
