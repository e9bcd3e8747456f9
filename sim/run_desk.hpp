// The rollout desk of a simulated run: it hands out work and takes in results. A lease gives a worker one group of
// rollouts to make until a deadline. Like learner/rollout_desk in a real run, it turns workers' requests and results
// into events of a replay_buffer::LeaseCore, and takes batches from replay_buffer::WaitingGroups. Private to sim/.
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
  bool equal_shares = false;  // every worker makes the same share of each batch, whatever its speed
  bool any_age = false;       // work is leased even if it will be too stale for training
};

// A finished group of rollouts.
struct DeskGroup {
  GroupId id;
  WorkerId worker;
  Version version;
  double granted_s = 0;                   // when it was leased
  std::uint32_t tokens = 0, longest = 0;  // tokens of all responses; of the longest one
  bool mixed_versions = false;            // begun under one policy and finished under a newer one
};

// Times are seconds of virtual time.
class RunDesk {
 public:
  explicit RunDesk(const DeskOptions& options);

  // Leases up to `groups_max` groups to a worker that has policy `version`. `newest`: the newest version that any
  // worker may have. `free_share`: the share of the worker's capacity that has no work.
  std::vector<replay_buffer::LiveLease> grant(WorkerId worker, Version version, std::uint64_t groups_max,
                                              Version newest, double free_share, double now_s);
  // How long, since the last call, the worker has wanted work and got none, in seconds.
  double take_seconds_without_work(WorkerId worker, double now_s) {
    return core_.take_seconds_without_work(worker, now_s);
  }
  // Whether pacing allows no lease for a policy of this version now, for any worker.
  bool has_no_room(Version version, double now_s) { return core_.has_no_room(version, step_, now_s); }
  // Submits the group of a lease. Returns the time in which the worker held leases since its previous result, in
  // seconds. Absent if the group is refused, because its lease has ended or it is too stale.
  std::optional<double> submit(LeaseId lease, const DeskGroup& group, double now_s);
  void on_given_back(WorkerId worker, LeaseId lease);
  void on_worker_lost(WorkerId worker, double now_s);
  // Calls LeaseCore::renew_or_expire(), and counts the rollouts of the leases that ended.
  void renew_or_expire(double now_s, const std::function<bool(WorkerId)>& is_alive);

  // The step's batch, oldest first. Absent if there is none, or if training now would make leased work too stale. The
  // batch stays in the buffer until on_trained_batch().
  std::optional<std::vector<DeskGroup>> next_batch(std::uint64_t groups, double now_s);
  // Ends the step after training on the batch, and drops groups that are too stale for the next one.
  void on_trained_batch(const std::vector<DeskGroup>& batch, double now_s);

  std::uint64_t step() const { return step_; }
  // Rollouts in the buffer, including the batch in training.
  std::uint64_t rollouts_waiting() const { return waiting_.size() * options_.pacing.group_size; }
  std::uint64_t rollouts_in_flight() const { return core_.live() * options_.pacing.group_size; }
  // Rollouts by age: the number of steps since their policy version.
  std::map<std::uint64_t, std::uint64_t> waiting_by_age() const, in_flight_by_age() const;
  // Groups that are not leased again, because several workers were lost with them.
  std::uint64_t groups_set_aside() const { return groups_set_aside_; }
  // Rollouts that were generated but not trained on, by reason.
  const std::map<std::string, std::uint64_t>& rejected() const { return rejected_; }
  // Rollouts that were refused as too stale, by age.
  const std::map<std::uint64_t, std::uint64_t>& stale_by_age() const { return stale_by_age_; }
  // Rollouts of leases without a result, by reason.
  const std::map<std::string, std::uint64_t>& unfinished() const { return unfinished_; }
  const replay_buffer::LimitedStepCounter& work_limits() const { return core_.limited_steps(); }

 private:
  std::uint64_t groups_left_of_share(WorkerId worker) const;
  void reject_stale(Version version);
  Version oldest_trainable_version() const;
  void count_unfinished(std::string_view why, std::uint64_t leases) {
    unfinished_[std::string(why)] += leases * options_.pacing.group_size;
  }

  DeskOptions options_;
  replay_buffer::WaitingGroups waiting_;
  replay_buffer::LeaseCore core_;
  replay_buffer::StepPace step_pace_;
  std::uint64_t step_ = 0;
  std::unordered_map<GroupId, DeskGroup> groups_;  // the groups in waiting_
  // Groups leased since the last batch was consumed, by worker; lost workers are left out.
  std::unordered_map<WorkerId, std::uint64_t> leased_since_batch_;
  std::uint64_t groups_set_aside_ = 0;
  std::map<std::string, std::uint64_t> rejected_, unfinished_;
  std::map<std::uint64_t, std::uint64_t> stale_by_age_;
};

}  // namespace echoline::sim
