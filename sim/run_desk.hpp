// The rollout desk of a simulated run. It turns the requests and results of workers into events of a
// replay_buffer::LeaseCore, and takes batches from replay_buffer::WaitingGroups, as learner/rollout_desk does in a real
// run. Private to sim/.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "replay_buffer/lease_core.hpp"
#include "replay_buffer/step_pace.hpp"

namespace echoline::sim {

struct DeskOptions {
  replay_buffer::Pacing pacing;
  replay_buffer::LeaseLength lease;
  bool equal_shares = false;  // of every batch each worker makes as much as every other, however fast it is
  bool any_age = false;       // work is handed out, and trained on without waiting, whatever becomes too stale of it
};

struct DeskGroup {
  GroupId id;
  WorkerId worker;
  Version version;
  double granted_s = 0;
  std::uint32_t tokens = 0, longest = 0;  // of all its responses; of one
  bool mixed = false;                     // a newer policy has finished it
};

// Times are seconds of virtual time.
class RunDesk {
 public:
  explicit RunDesk(const DeskOptions& options);

  std::vector<replay_buffer::LiveLease> grant(WorkerId worker, Version version, std::uint64_t groups_max,
                                              Version newest, double now_s);
  // No worker can be given anything for a policy of this version now.
  bool closed(Version version, double now_s) { return core_.closed(version, step_, now_s); }
  // The group of a lease that the worker got. Returns for how long it had leases that no earlier result accounts for;
  // absent where the group is refused, because the lease has ended or the group is too stale.
  std::optional<double> submit(LeaseId lease, const DeskGroup& group, double now_s);
  void give_back(WorkerId worker, LeaseId lease);
  void release_worker(WorkerId worker, double now_s);
  // Ends overdue leases, but renews those of workers that `is_alive`: they tell of progress in time.
  void expire(double now_s, const std::function<bool(WorkerId)>& is_alive);

  // The batch of the step, oldest first; absent while there is none, or where training now would strand work under way.
  // It waits in the buffer until it is consumed.
  std::optional<std::vector<DeskGroup>> batch(std::uint64_t groups, double now_s);
  // The batch was trained on, so the step has ended, and what is too stale for the next one is dropped.
  void consume(const std::vector<DeskGroup>& batch, double now_s);

  std::uint64_t step() const { return step_; }
  std::uint64_t waiting() const {
    return waiting_.size() * options_.pacing.group_size;
  }  // rollouts, those of the batch in training included
  std::uint64_t in_flight() const { return core_.live() * options_.pacing.group_size; }
  // Rollouts by age at the step.
  std::map<std::uint64_t, std::uint64_t> waiting_by_age() const, in_flight_by_age() const;
  std::uint64_t set_aside() const { return set_aside_; }
  // Rollouts by reason: generated and not trained on; of leases that ended without a result.
  const std::map<std::string, std::uint64_t>& rejected() const { return rejected_; }
  // The rollouts that were refused as too stale, by their age at that time.
  const std::map<std::uint64_t, std::uint64_t>& stale_by_age() const { return stale_by_age_; }
  const std::map<std::string, std::uint64_t>& unfinished() const { return unfinished_; }
  const replay_buffer::BoundSteps& bound() const { return core_.bound(); }

 private:
  std::uint64_t share_left(WorkerId worker) const;
  void reject_stale(Version version);
  Version version_min() const;
  void unfinished(std::string_view why, std::uint64_t leases) {
    unfinished_[std::string(why)] += leases * options_.pacing.group_size;
  }

  DeskOptions options_;
  replay_buffer::WaitingGroups waiting_;
  replay_buffer::LeaseCore core_;
  replay_buffer::StepPace step_pace_;
  std::uint64_t step_ = 0;
  std::unordered_map<GroupId, DeskGroup> groups_;  // those that wait
  std::map<WorkerId, std::uint64_t> given_;  // groups, since the last batch was consumed; of workers that were not lost
  std::uint64_t set_aside_ = 0;
  std::map<std::string, std::uint64_t> rejected_, unfinished_;
  std::map<std::uint64_t, std::uint64_t> stale_by_age_;
};

}  // namespace echoline::sim
