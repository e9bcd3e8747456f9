// The leases that the RolloutDesk grants, renews and takes back, and the workers that get no more. A lease permits a
// worker to generate one group of responses. Private to learner/.
#pragma once
#include <atomic>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "learner/attendance.hpp"
#include "learner/discipline.hpp"
#include "learner/set_aside_groups.hpp"
#include "learner/step_batches.hpp"

namespace echoline::learner {

// One thread, the desk's. The methods that change leases return false if the database could not store the change. Then
// the message waits for another try.
class DeskLeases {
 public:
  // The parts must outlive it.
  DeskLeases(DeskContext& desk, OfferedPolicies& policies, Discipline& discipline, SetAsideGroups& set_aside,
             const StepBatches& batches)
      : desk_(desk), policies_(policies), discipline_(discipline), set_aside_(set_aside), batches_(batches) {}

  using Message = std::pair<WorkerId, const schema::WorkerMessage*>;
  // Handles requests and signs of progress in one transaction. Each request is answered once its leases are on disk.
  bool grant_and_renew(std::span<const Message> messages);
  // Ends a lease whose group the worker could not generate.
  bool fail_lease(WorkerId worker, const schema::WorkFailed& failure);
  // Ends leases that the worker returns unfinished, which is no failure.
  bool return_leases(WorkerId worker, const schema::WorkReturned& returned);
  // Ends leases whose time has run out. If the database cannot store that, they stay, and a later call ends them.
  void expire();
  // Extends every live lease by `pause`, in which no message could be handled. False if the database cannot store.
  bool extend_leases(Duration pause);
  // See RolloutDesk.
  Status on_presence_change(const PresenceChange& change);
  // The worker finishes its leases, and gets no new one until it joins again.
  void retire(WorkerId worker) { retired_.insert(worker); }
  bool is_retired(WorkerId worker) const { return retired_.contains(worker); }
  // Returns an error if, for DeskOptions::stuck_max, no lease was live and every worker's policy was unusable. The next
  // batch would then never be completed.
  Status check_completable();

  void check() const;  // aborts if its parts disagree

 private:
  void grant(WorkerId worker, const schema::WorkRequest& request, schema::WorkGrant& answer);
  // Adds leases for groups that can be generated. Sets other groups aside, so that they are never leased again.
  Status add_leases(WorkerId worker, const schema::WorkRequest& request, schema::WorkGrant& answer);
  // Ends the leases of a worker that was lost or is away, and forgets which policy it used.
  Status release_worker(WorkerId worker);
  void renew(WorkerId worker, const schema::WorkProgress& progress);
  // The number of leases that the worker holds.
  std::size_t leases_held(WorkerId worker) const;
  // Ends the lease and records in `policies_` that the worker cannot generate with its policy.
  bool report_unusable_policy(WorkerId worker, const schema::WorkFailed& failure);

  DeskContext& desk_;
  OfferedPolicies& policies_;
  Discipline& discipline_;
  SetAsideGroups& set_aside_;
  const StepBatches& batches_;
  TimePoint stuck_since_ = kNever;  // the time since which no worker can generate; kNever: some can
  std::set<WorkerId> logged_slow_;  // workers that the log has named as too slow
  std::set<WorkerId> retired_;
};

}  // namespace echoline::learner
