// The live leases with their indexes, and which of them a learner step waits for. Private to this folder.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/ids.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::replay_buffer {

// A lease whose result may still come.
struct LiveLease {
  LeaseRecord record;
  double due_s = 0;            // a learner step waits for the result until this time
  std::uint64_t progress = 0;  // as the worker last reported it; only grows
  bool overdue = false;        // due_s has passed
};

// Updates all indexes at each change in O(log n). Times are seconds and never run backwards.
//
// A learner step waits for the result of a lease until it is due; until the lease expires, a result is still accepted.
// A worker with an overdue lease is left out: no step waits for any of its leases. The leases that a step waits for
// are the awaited ones. A step waits for an overdue lease in vain, from its grant until it is due. After its last
// overdue lease has ended, the worker stays left out for kLeftOutFactor times the longest of these waits, so no worker
// takes more than a twentieth of the learner's time.
class LeaseTable {
 public:
  static constexpr double kLeftOutFactor = 20;

  void add(LiveLease lease);
  LiveLease remove(LeaseId id);  // must be live
  const LiveLease* find(LeaseId id) const;
  const LiveLease* first_to_expire() const;                 // null if there is none
  std::vector<LeaseId> expired_before(double now_s) const;  // in order of their expiries
  const std::set<LeaseId>& leases_of(WorkerId worker) const;
  std::size_t size() const { return leases_.size(); }

  void renew(LeaseId id, std::uint64_t progress, double expires_s);
  void set_due(LeaseId id, double due_s);  // the lease must not be overdue
  void delay_all(double extend_by_s);      // adds this to due_s and expiry of all leases; O(n log n)
  // Leases that were due before now become overdue; workers that were left out long enough are included again.
  void advance_to(double now_s);
  // No step waits for this worker's leases before `until_s`.
  void leave_out(WorkerId worker, double until_s);

  // Trajectories of all leases, by version.
  const std::map<Version, std::uint64_t>& by_version() const { return trajectories_by_version_; }
  // Trajectories of the leases for which a step waits, by version.
  const std::map<Version, std::uint64_t>& awaited() const { return awaited_trajectories_; }
  std::uint64_t trajectories_not_overdue() const { return trajectories_not_overdue_; }

  void check() const;  // ends the process if an index disagrees with the leases; O(n)

 private:
  struct LeftOut {
    std::uint32_t overdue_leases = 0;  // live ones
    double until_s = 0;                // when the worker is included again, if no lease is overdue then
  };
  void add_awaited(const LiveLease& lease);
  void subtract_awaited(const LiveLease& lease);

  double now_s_ = 0;
  std::unordered_map<LeaseId, LiveLease> leases_;
  std::set<std::pair<double, LeaseId>> by_expiry_, by_due_;  // by_due_: by due_s, without overdue leases
  std::unordered_map<WorkerId, std::set<LeaseId>> by_worker_;
  std::map<Version, std::uint64_t> trajectories_by_version_, awaited_trajectories_;
  std::uint64_t trajectories_not_overdue_ = 0;
  std::unordered_map<WorkerId, LeftOut> left_out_workers_;
  // Left-out workers without overdue leases, by until_s. The others stay left out while they have overdue ones.
  std::set<std::pair<double, WorkerId>> left_out_until_;
};

}  // namespace echoline::replay_buffer
