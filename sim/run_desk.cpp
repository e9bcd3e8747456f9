// The rollout desk of a simulated run. run_simulation.cpp calls it for each worker's request or result.
#include "sim/run_desk.hpp"

#include <algorithm>

namespace echoline::sim {
namespace {

using namespace replay_buffer;

constexpr std::uint32_t kAnyAge = 1u << 30;          // a staleness budget that no group exceeds
constexpr std::uint32_t kLeasesLiveMax = 1'000'000;  // no limit in practice

// The age of a policy in learner steps.
std::uint64_t age_of(Version version, std::uint64_t step) { return step - std::min(step, version.value); }

LeaseOptions lease_options(const DeskOptions& options) {
  LeaseOptions core_options{.pacing = options.pacing, .lease = options.lease};
  core_options.leases_live_max = kLeasesLiveMax;
  if (options.any_age) core_options.pacing.staleness.budget = kAnyAge;
  return core_options;
}

}  // namespace

RunDesk::RunDesk(const DeskOptions& options)
    : options_(options), waiting_(options.pacing.group_size), core_(lease_options(options), waiting_) {}

// By the staleness budget, which limits training in any case. With any_age, the core leases older work too.
Version RunDesk::oldest_trainable_version() const { return oldest_admissible(step_, options_.pacing.staleness.budget); }

// Groups that the worker may still lease of its equal share of this step's batch. Any worker may also lease the groups
// in the pool, because they were leased before and came back.
std::uint64_t RunDesk::groups_left_of_share(WorkerId worker) const {
  const std::uint64_t batches =
      step_ == 0 ? options_.pacing.staleness.lookahead_steps() + 1 : 1;  // the first step also fills the buffer
  const std::uint64_t groups_needed = batches * options_.pacing.groups_per_step(), workers = leased_since_batch_.size();
  const std::uint64_t share = (groups_needed + workers - 1) / workers;  // rounded up
  return share - std::min(share, leased_since_batch_.at(worker)) + core_.pooled();
}

std::vector<LiveLease> RunDesk::grant(WorkerId worker, Version version, std::uint64_t groups_max, Version newest,
                                      double free_share, double now_s) {
  std::uint64_t& leased_groups = leased_since_batch_[worker];  // enters a new worker, which then has a share
  if (options_.equal_shares) groups_max = std::min(groups_max, groups_left_of_share(worker));
  const GrantRequest request{.worker = worker,
                             .version = version,
                             .policy_digest = {},
                             .groups_max = static_cast<std::uint32_t>(std::min<std::uint64_t>(groups_max, UINT32_MAX)),
                             .step_seconds = step_pace_.seconds(),
                             .newest = newest,
                             .free_share = free_share};
  auto leases = core_.grant(request, step_, now_s);
  leased_groups += leases.size();
  return leases;
}

std::optional<double> RunDesk::submit(LeaseId id, const DeskGroup& group, double now_s) {
  const LiveLease* lease = core_.find(id);
  const bool has_ended = lease == nullptr || now_s > lease->record.expires_unix_s;
  if (has_ended) {
    if (lease != nullptr)
      core_.refuse(id, group.longest, now_s);
    else
      core_.record_late_result(group.worker, group.granted_s, group.longest, now_s);
    rejected_["refused: lease expired"] += options_.pacing.group_size;
    return std::nullopt;
  }
  DeskGroup stored = group;
  stored.id = lease->record.group;
  stored.version = lease->record.version;
  if (!admissible(step_, stored.version, options_.pacing.staleness.budget)) {
    core_.refuse(id, group.longest, now_s);
    reject_stale(stored.version);
    return std::nullopt;
  }
  const double lease_seconds =
      core_.settle(id, {.version = stored.version, .tokens_longest = group.longest, .scored = true}, now_s);
  groups_[stored.id] = stored;
  return lease_seconds;
}

void RunDesk::on_given_back(WorkerId worker, LeaseId lease) {
  count_unfinished("given back", core_.return_leases(worker, std::span(&lease, 1)));
}

void RunDesk::on_worker_lost(WorkerId worker, double now_s) {
  count_unfinished("worker lost", core_.release_worker(worker, now_s));
  groups_set_aside_ += core_.newly_set_aside().size();
  leased_since_batch_.erase(worker);
}

void RunDesk::renew_or_expire(double now_s, const std::function<bool(WorkerId)>& is_alive) {
  count_unfinished("lease expired", core_.renew_or_expire(now_s, is_alive));
}

std::optional<std::vector<DeskGroup>> RunDesk::next_batch(std::uint64_t groups, double now_s) {
  if (core_.stranded_by_next_step(step_, now_s) > 0) {  // training now would make leased work too stale
    step_pace_.begin_wait(now_s);
    return std::nullopt;
  }
  step_pace_.end_wait(now_s);
  const auto chosen = waiting_.next_batch(oldest_trainable_version(), groups);
  if (!chosen) return std::nullopt;
  std::vector<DeskGroup> batch;
  for (const GroupId group : *chosen) batch.push_back(groups_.at(group));
  return batch;
}

void RunDesk::on_trained_batch(const std::vector<DeskGroup>& batch, double now_s) {
  for (const DeskGroup& group : batch) {
    waiting_.remove(group.id);
    groups_.erase(group.id);
  }
  ++step_;
  step_pace_.end_step(now_s);
  for (auto& [worker, leased_groups] : leased_since_batch_) leased_groups = 0;
  for (const GroupId group : waiting_.older_than(oldest_trainable_version())) {
    reject_stale(waiting_.find(group)->version);
    waiting_.remove(group);
    groups_.erase(group);
  }
}

void RunDesk::reject_stale(Version version) {
  rejected_["stale"] += options_.pacing.group_size;
  stale_by_age_[age_of(version, step_)] += options_.pacing.group_size;
}

std::map<std::uint64_t, std::uint64_t> RunDesk::waiting_by_age() const {
  std::map<std::uint64_t, std::uint64_t> ages;
  for (const auto& [version, trajectories] : waiting_.complete_trajectories(Version{0}))
    ages[age_of(version, step_)] += trajectories;
  return ages;
}

std::map<std::uint64_t, std::uint64_t> RunDesk::in_flight_by_age() const {
  std::map<std::uint64_t, std::uint64_t> ages;
  for (const auto& [version, trajectories] : core_.live_by_version()) ages[age_of(version, step_)] += trajectories;
  return ages;
}

}  // namespace echoline::sim
