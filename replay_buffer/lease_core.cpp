// LeaseCore grants groups to workers as leases, ends leases, and measures the workers. Used by JobLedger and the
// simulator. Every change is recorded for the journal, with a function that undoes it.
#include "replay_buffer/lease_core.hpp"

#include <algorithm>
#include <utility>

#include "base/result.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::size_t kPausesMax = 64;        // older pauses of the learner are forgotten
constexpr std::size_t kDetailBytesMax = 512;  // per failure, as stored
constexpr std::uint64_t kNoResult = 0;        // instead of the tokens of a result: the lease ended without one

}  // namespace

LeaseCore::LeaseCore(const LeaseOptions& options, WaitingGroups& waiting) : options_(options), waiting_(waiting) {}

// ---- journal ----

void LeaseCore::load(LiveLease lease) { leases_.add(std::move(lease)); }
void LeaseCore::load_pooled(GroupId group) { pool_.put(group); }
void LeaseCore::load_lapses(WorkerId worker, Lapses lapses) { lapses_[worker] = lapses; }

void LeaseCore::load_failure(GroupId group, WorkerId worker, std::uint32_t failures, bool worker_lost) {
  GroupPool::Failures group_failures = pool_.failures(group);
  if (failures > 0) group_failures.count_by_worker[worker] = failures;
  if (worker_lost) group_failures.workers_lost.insert(worker);
  pool_.set_failures(group, std::move(group_failures));
}

void LeaseCore::begin() {
  ECHO_CHECK(!recording_, "begin() was called before");
  recording_.emplace(Recording{.changes = {},
                               .undo = {},
                               .totals = totals_,
                               .set_aside_count = newly_set_aside_.size(),
                               .unproductive_count = newly_unproductive_.size()});
}

void LeaseCore::commit() { recording_.reset(); }

void LeaseCore::rollback() {
  Recording recording = std::move(*recording_);
  recording_.reset();
  for (auto undo = recording.undo.rbegin(); undo != recording.undo.rend(); ++undo) (*undo)();
  totals_ = recording.totals;
  newly_set_aside_.resize(recording.set_aside_count);
  newly_unproductive_.resize(recording.unproductive_count);
}

void LeaseCore::record_change(LeaseChange change) {
  if (recording_) recording_->changes.push_back(std::move(change));
}

// ---- basic changes ----

void LeaseCore::add_lease(LiveLease lease) {
  record_change(change::Leased{lease});
  add_undo([this, id = lease.record.id] { leases_.remove(id); });
  leases_.add(std::move(lease));
}

// Ends a live lease; its group returns to the pool unless it was settled.
LiveLease LeaseCore::end_lease(LeaseId id, LeaseState state, std::optional<double> settled_s) {
  LiveLease lease = leases_.remove(id);
  record_change(change::Ended{id, state, settled_s});
  // Checks recording_ here, not only in add_undo(), because the capture copies the lease.
  if (recording_) add_undo([this, lease] { leases_.add(lease); });
  switch (state) {
    case LeaseState::kSettled:
      ++totals_.settled;
      return lease;
    case LeaseState::kExpired:
      ++totals_.expired;
      break;
    case LeaseState::kReleased:
      ++totals_.released;
      break;
    case LeaseState::kLive:
      ECHO_CHECK(false, "lease {}: kLive is not an end state", id);
  }
  put_in_pool(lease.record.group);
  return lease;
}

void LeaseCore::put_in_pool(GroupId group) {
  if (pool_.contains(group)) return;
  record_change(change::Pooled{group});
  add_undo([this, group] { pool_.erase(group); });
  pool_.put(group);
}

void LeaseCore::take_from_pool(GroupId group) {
  if (!pool_.contains(group)) return;
  record_change(change::Unpooled{group});
  add_undo([this, group] { pool_.put(group); });
  pool_.erase(group);
}

void LeaseCore::set_failures(GroupId group, GroupPool::Failures failures) {
  if (recording_) add_undo([this, group, before = pool_.failures(group)] { pool_.set_failures(group, before); });
  pool_.set_failures(group, std::move(failures));
}

void LeaseCore::record_failure(GroupId group, WorkerId worker, bool worker_lost) {
  GroupPool::Failures group_failures = pool_.failures(group);
  if (worker_lost)
    group_failures.workers_lost.insert(worker);
  else
    ++group_failures.count_by_worker[worker];
  const auto of_worker = group_failures.count_by_worker.find(worker);
  record_change(
      change::FailuresCounted{.group = group,
                              .worker = worker,
                              .failures = of_worker == group_failures.count_by_worker.end() ? 0 : of_worker->second,
                              .worker_lost = group_failures.workers_lost.contains(worker)});
  set_failures(group, std::move(group_failures));
}

void LeaseCore::forget_failures(GroupId group) {
  if (pool_.failures(group).empty()) return;
  record_change(change::FailuresForgotten{group});
  set_failures(group, {});
}

// Sets a group of the pool aside if workers failed on it too often.
void LeaseCore::set_aside_if_failed_often(GroupId group, std::string_view reason, const std::string& detail) {
  const GroupPool::Failures& failures = pool_.failures(group);
  if (must_set_aside(failures.failure_count(), static_cast<std::uint32_t>(failures.workers_lost.size())))
    set_group_aside(group, reason, detail);
}

void LeaseCore::set_group_aside(GroupId group, std::string_view reason, const std::string& detail) {
  take_from_pool(group);
  forget_failures(group);
  newly_set_aside_.push_back(
      {.group = group, .reason = std::string(reason), .detail = detail.substr(0, kDetailBytesMax)});
  record_change(change::GroupSetAside{newly_set_aside_.back()});
}

void LeaseCore::set_lapses(WorkerId worker, Lapses lapses) {
  const auto it = lapses_.find(worker);
  add_undo([this, worker, before = it == lapses_.end() ? Lapses{} : it->second] {
    if (before.weight == 0)
      lapses_.erase(worker);
    else
      lapses_[worker] = before;
  });
  record_change(change::Lapsed{worker, lapses});
  if (lapses.weight == 0)
    lapses_.erase(worker);
  else
    lapses_[worker] = lapses;
}

// Counts a lapse of the worker (Lapses). Reports the worker as unproductive from kLapseWeightMax on.
void LeaseCore::record_lapse(WorkerId worker, LapseKind kind) {
  const auto it = lapses_.find(worker);
  Lapses lapses = it == lapses_.end() ? Lapses{} : it->second;
  ++lapses.batches;
  lapses.weight = weight_after_lapse(lapses.weight, kind);
  set_lapses(worker, lapses);
  if (lapses.weight >= kLapseWeightMax)
    newly_unproductive_.push_back(
        {worker, fmt::format("it took {} batches of work and returned none of them in time", lapses.batches)});
}

LeaseCore::Worker& LeaseCore::find_or_add_worker(WorkerId id) {
  const auto [it, is_new] = workers_.try_emplace(id);
  if (is_new) it->second.group_allowance = initial_group_allowance(options_.lease, options_.pacing);
  return it->second;
}

void LeaseCore::record_pace(WorkerId id, double granted_s, double now_s, std::uint64_t tokens) {
  Worker& worker = find_or_add_worker(id);
  if (recording_)
    add_undo([this, id, before = worker] {
      workers_[id] = before;
      paces_.set(id, before.pace);
    });
  worker.pace.record_result(granted_s, result_time_without_pauses(granted_s, now_s), tokens);
  paces_.set(id, worker.pace);
}

// The time at which work granted at `granted_s` would have been submitted without the pauses since then. A worker could
// submit nothing in a pause of the learner, so a pause must not make the worker look slow.
double LeaseCore::result_time_without_pauses(double granted_s, double now_s) const {
  double submitted_s = now_s;
  for (const Pause& pause : pauses_)
    if (pause.ended_s > granted_s) submitted_s -= pause.length_s;
  return std::max(submitted_s, granted_s);
}

Version LeaseCore::version_min(std::uint64_t step) const {
  return oldest_admissible(step, options_.pacing.staleness.budget);
}

// Overdue leases do not count, because no step waits for them and other workers may generate replacements.
std::uint64_t LeaseCore::trajectories_in_stock(std::uint64_t step) const {
  return leases_.trajectories_not_overdue() + waiting_.trajectories(version_min(step));
}

// Groups that the worker may hold by its speed (groups_held_max). A worker without measurements counts as the average
// of the measured ones.
std::uint64_t LeaseCore::groups_held_max_by_pace(const Worker& worker) const {
  const CappedRates& rates = paces_.rates();  // groups/s
  const double workers_measured = static_cast<double>(rates.size()), measured_rate = rates.sum();
  const double average_rate = workers_measured > 0 ? measured_rate / workers_measured : 1;
  const double fleet_rate = measured_rate + (static_cast<double>(workers_.size()) - workers_measured) * average_rate;
  const std::uint64_t stock_max_groups =
      (std::uint64_t{options_.pacing.staleness.lookahead_steps()} + 1) * options_.pacing.groups_per_step();
  const double worker_rate = capped_rate(worker.pace.groups_per_s().value_or(average_rate), rates.median());
  return groups_held_max(stock_max_groups, worker_rate, fleet_rate);
}

std::vector<LiveLease> LeaseCore::grant(const GrantRequest& request, std::uint64_t step, double now_s) {
  expire(now_s);
  const Pacing& pacing = options_.pacing;
  const std::uint64_t stock = trajectories_in_stock(step), groups_held = leases_held(request.worker);
  Worker& worker = find_or_add_worker(request.worker);
  if (request.step_seconds) version_usable_s_ = (pacing.staleness.budget + 1.0) * *request.step_seconds;
  const std::optional<double> batch_s = worker.pace.batch_seconds();
  // Only if the stock covers the step, because otherwise the step needs even a slow worker's results.
  worker.too_slow = stock >= pacing.trajectories_per_step && request.step_seconds && batch_s &&
                    !can_finish_in_time(pacing, step, request.version, *batch_s, *request.step_seconds);
  const std::uint64_t live_more_max =
      options_.leases_live_max - std::min<std::uint64_t>(leases_.size(), options_.leases_live_max);
  // The groups that this worker could take now.
  const std::uint64_t groups_wanted =
      std::min({std::uint64_t{request.groups_max}, std::uint64_t{options_.leases_per_grant_max}, live_more_max,
                worker.group_allowance - std::min(groups_held, worker.group_allowance)});
  // The groups of these that its share of the stock allows.
  const std::uint64_t held_max_by_pace = groups_held_max_by_pace(worker);
  const std::uint64_t groups_takeable =
      std::min(groups_wanted, held_max_by_pace - std::min(groups_held, held_max_by_pace));
  // The groups that pacing allows.
  const std::uint64_t groups_allowed = room(pacing, step, request.version, stock) / options_.pacing.group_size;
  if (groups_allowed < groups_takeable && !worker.too_slow)
    if (const auto limit = limiting_bound(pacing, step, request.version)) limited_steps_.record(*limit, step);
  // The worker holds nothing and would get nothing even with the newest version, so it is idle by no fault of its own.
  const std::uint64_t newest_allowed =
      room(pacing, step, request.newest.value_or(request.version), stock) / options_.pacing.group_size;
  worker.turned_away = request.groups_max > 0 && groups_held == 0 && newest_allowed == 0;
  std::vector<LiveLease> granted;
  const std::uint64_t group_count = worker.too_slow ? 0 : std::min(groups_takeable, groups_allowed);
  count_without_work(worker, now_s);  // the time until now, with the previous share
  worker.share_without_work = 0;
  if (groups_wanted > 0 && !worker.too_slow) {
    const double asked = request.groups_max, held = static_cast<double>(groups_held);
    // Work that only its old version keeps it from is not missing: with the newest version it could get it.
    // `obtainable` never exceeds groups_wanted.
    const std::uint64_t obtainable = std::max(group_count, std::min(groups_takeable, newest_allowed));
    worker.share_without_work = request.free_share.value_or(asked / (asked + held)) *
                                static_cast<double>(groups_wanted - obtainable) / static_cast<double>(groups_wanted);
  }
  if (group_count == 0) return granted;
  // A step waits for the result until due_s. If it has not come after lease_s, the group returns to the pool.
  const double lease_s = lease_seconds(options_.lease, worker.pace.seconds_per_token(), paces_.seconds_per_token());
  const double due_s = now_s + patience_seconds(options_.lease, batch_s, paces_.batch_seconds(), version_usable_s_);
  for (const GroupId group : take_groups(group_count, request.worker, groups_held == 0)) {
    LeaseRecord record{.id = LeaseId{totals_.next_lease++},
                       .group = group,
                       .worker = request.worker,
                       .version = request.version,
                       .policy_digest = request.policy_digest,
                       .rollouts = options_.pacing.group_size,
                       .granted_unix_s = now_s,
                       .expires_unix_s = now_s + lease_s,
                       .state = LeaseState::kLive,
                       .lease_s = lease_s};
    granted.push_back({.record = std::move(record), .due_s = due_s, .progress = 0, .overdue = false});
    add_lease(granted.back());
  }
  return granted;
}

// Takes groups from the pool, lowest id first, then new ones. A suspect (GroupPool) is leased alone, to a worker that
// holds no lease, so that no other group is lost with it.
std::vector<GroupId> LeaseCore::take_groups(std::uint64_t count, WorkerId worker, bool holds_nothing) {
  if (const auto suspect = pool_.first_suspect(); suspect && holds_nothing) {
    take_from_pool(*suspect);
    return {*suspect};
  }
  // A worker does not get a group on which it failed, unless it is the only worker.
  const std::uint32_t failures_max = workers_.size() > 1 ? 0 : kFailuresMax;
  std::vector<GroupId> groups = pool_.leasable(count, worker, failures_max);
  for (const GroupId group : groups) take_from_pool(group);
  while (groups.size() < count) groups.push_back(GroupId{totals_.next_group++});
  return groups;
}

double LeaseCore::settle(LeaseId id, const StoredResult& result, double now_s) {
  leases_.advance_to(now_s);
  const bool is_first_result_of_fleet = !paces_.batch_seconds();
  const LiveLease lease = end_lease(id, LeaseState::kSettled, now_s);
  const LeaseRecord& record = lease.record;
  add_undo([this, group = record.group] { waiting_.remove(group); });
  waiting_.put(record.group, {.version = result.version, .members = record.rollouts, .scored = result.scored});
  if (result.scored) forget_failures(record.group);
  Worker& worker = find_or_add_worker(record.worker);
  // The first result of a batch reduces the weight of its worker's lapses by one. Weights in lapses_ are positive.
  if (const auto lapses = lapses_.find(record.worker);
      lapses != lapses_.end() && worker.pace.results_of_batch(record.granted_unix_s) == 0)
    set_lapses(record.worker, {.weight = lapses->second.weight - 1, .batches = lapses->second.batches});
  record_pace(record.worker, record.granted_unix_s, now_s, result.tokens_longest);
  const double newly_held_seconds = std::max(0.0, now_s - std::max(record.granted_unix_s, worker.counted_until_s));
  worker.counted_until_s = now_s;
  worker.group_allowance = group_allowance_after_results(worker.group_allowance, 1);
  if (is_first_result_of_fleet) shorten_waits_for_unmeasured_workers();
  return newly_held_seconds;
}

// The first measurements show how long the work takes, so unmeasured workers are not awaited much longer.
void LeaseCore::shorten_waits_for_unmeasured_workers() {
  if (!paces_.batch_seconds()) return;
  const double patience_s = patience_seconds(options_.lease, std::nullopt, paces_.batch_seconds(), version_usable_s_);
  for (const auto& [id, worker] : workers_) {
    if (worker.pace.batch_seconds()) continue;
    record_change(change::WaitsShortened{id, patience_s});
    for (const LeaseId held : leases_.leases_of(id)) {
      const LiveLease& lease = *leases_.find(held);
      const double due_s = lease.record.granted_unix_s + patience_s;
      if (lease.overdue || due_s >= lease.due_s) continue;
      add_undo([this, held, before = lease.due_s] { leases_.set_due(held, before); });
      leases_.set_due(held, due_s);
    }
  }
}

void LeaseCore::refuse(LeaseId id, std::uint64_t tokens_longest, double now_s) {
  leases_.advance_to(now_s);
  const bool is_late = now_s > leases_.find(id)->record.expires_unix_s;
  const LiveLease lease = end_lease(id, is_late ? LeaseState::kExpired : LeaseState::kReleased);
  // Only a late result shows that the worker is slower than its measured pace, by which the lease was too short.
  if (is_late) record_pace(lease.record.worker, lease.record.granted_unix_s, now_s, tokens_longest);
}

void LeaseCore::record_late_result(WorkerId worker, double granted_s, std::uint64_t tokens_longest, double now_s) {
  leases_.advance_to(now_s);
  record_pace(worker, granted_s, now_s, tokens_longest);
}

std::uint64_t LeaseCore::renew(WorkerId worker, std::span<const LeaseId> ids, std::uint64_t progress, double now_s) {
  std::uint64_t renewals = 0;
  for (const LeaseId id : ids) {
    const LiveLease* lease = leases_.find(id);
    if (lease == nullptr || lease->record.worker != worker || now_s > lease->record.expires_unix_s ||
        lease->progress >= progress)
      continue;
    const LeaseRecord& record = lease->record;
    const double expires_s =
        std::max(record.expires_unix_s, renewed_expiry(options_.lease, record.granted_unix_s, now_s, record.lease_s));
    record_change(change::Renewed{id, progress, expires_s});
    add_undo([this, id, progress_before = lease->progress, expires_s_before = record.expires_unix_s] {
      leases_.renew(id, progress_before, expires_s_before);
    });
    leases_.renew(id, progress, expires_s);
    ++renewals;
  }
  return renewals;
}

bool LeaseCore::on_group_failed(WorkerId worker, LeaseId id, std::string_view reason, const std::string& detail) {
  const LiveLease* lease = leases_.find(id);
  if (lease == nullptr || lease->record.worker != worker) return false;
  const GroupId group = lease->record.group;
  end_lease(id, LeaseState::kReleased);
  on_result_unscorable(group, worker, reason, detail);
  return true;
}

void LeaseCore::on_result_unscorable(GroupId group, WorkerId worker, std::string_view reason,
                                     const std::string& detail) {
  record_failure(group, worker, /*worker_lost=*/false);
  set_aside_if_failed_often(group, reason, detail);
}

std::uint64_t LeaseCore::return_leases(WorkerId worker, std::span<const LeaseId> ids) {
  std::uint64_t returned = 0;
  for (const LeaseId id : ids) {
    const LiveLease* lease = leases_.find(id);
    if (lease == nullptr || lease->record.worker != worker) continue;
    end_lease(id, LeaseState::kReleased);
    ++returned;
  }
  return returned;
}

std::uint64_t LeaseCore::return_all_leases(WorkerId worker) {
  const std::set<LeaseId>& held = leases_.leases_of(worker);
  return return_leases(worker, std::vector(held.begin(), held.end()));
}

bool LeaseCore::set_aside(LeaseId id, std::string_view reason, const std::string& detail) {
  const LiveLease* lease = leases_.find(id);
  if (lease == nullptr) return false;
  const GroupId group = lease->record.group;
  end_lease(id, LeaseState::kReleased);
  set_group_aside(group, reason, detail);
  return true;
}

void LeaseCore::regenerate(GroupId group) {
  // A group added without the core is not leased.
  if (group.value < totals_.next_group) put_in_pool(group);
}

std::uint64_t LeaseCore::release_worker(WorkerId worker, double now_s) {
  leases_.advance_to(now_s);
  const std::set<LeaseId>& held = leases_.leases_of(worker);
  const std::vector<LeaseId> ids(held.begin(), held.end());
  if (!ids.empty()) {
    record_lapse(worker, LapseKind::kLost);
    // If the worker returns, no step waits for it for a while, as after an overdue lease: its time with the oldest
    // lease counts as the wait.
    const double held_s = std::max(0.0, now_s - leases_.find(ids.front())->record.granted_unix_s);
    leases_.leave_out(worker, now_s + LeaseTable::kLeftOutFactor * held_s);
  }
  for (const LeaseId id : ids) {
    const LiveLease lease = end_lease(id, LeaseState::kReleased);
    record_failure(lease.record.group, worker, /*worker_lost=*/true);
    set_aside_if_failed_often(lease.record.group, "worker lost", "the connection of every worker that had it broke");
  }
  if (const auto it = workers_.find(worker); it != workers_.end()) {
    if (recording_)
      add_undo([this, worker, before = it->second] {
        workers_[worker] = before;
        paces_.set(worker, before.pace);
      });
    workers_.erase(it);
    paces_.remove(worker);
  }
  return ids.size();
}

std::uint64_t LeaseCore::release_all() {
  std::uint64_t released = 0;
  for (; const LiveLease* lease = leases_.first_to_expire(); ++released)
    end_lease(lease->record.id, LeaseState::kReleased);
  return released;
}

std::uint64_t LeaseCore::renew_or_expire(double now_s, const std::function<bool(WorkerId)>& is_alive) {
  for (const LeaseId id : leases_.expired_before(now_s)) {
    const LiveLease* lease = leases_.find(id);
    if (!is_alive(lease->record.worker)) continue;
    // A term may be shorter than the time since the last call, so one renewal may not suffice.
    for (double expired_s; (expired_s = lease->record.expires_unix_s) < now_s;) {
      renew(lease->record.worker, std::span(&id, 1), lease->progress + 1, expired_s);
      if (!(lease->record.expires_unix_s > expired_s)) break;  // the lease has reached its maximum term
    }
  }
  return expire(now_s);
}

std::uint64_t LeaseCore::expire(double now_s) {
  leases_.advance_to(now_s);
  std::vector<LiveLease> ended;
  // Worker and time of grant -> number of the batch's leases that expire now.
  std::map<std::pair<WorkerId, double>, std::uint64_t> batches;
  for (const LiveLease* lease; (lease = leases_.first_to_expire()) != nullptr && lease->record.expires_unix_s < now_s;)
    ended.push_back(end_lease(lease->record.id, LeaseState::kExpired));
  std::ranges::sort(ended, {}, [](const LiveLease& lease) { return lease.record.id; });  // in the order of the grants
  for (const LiveLease& lease : ended) {
    const LeaseRecord& record = lease.record;
    ++batches[{record.worker, record.granted_unix_s}];
    if (workers_.contains(record.worker)) record_pace(record.worker, record.granted_unix_s, now_s, kNoResult);
  }
  for (const auto& [batch, count] : batches) {
    const auto& [id, granted_s] = batch;
    if (const auto worker = workers_.find(id); worker != workers_.end()) {
      // If the worker returned at least as many results of this batch as now expire, it works, and was only given too
      // much: no lapse.
      if (worker->second.pace.results_of_batch(granted_s) >= count) continue;
      // record_pace() has recorded an undo of the whole worker, so this change needs none.
      worker->second.group_allowance = group_allowance_after_lapse(worker->second.group_allowance);
    }
    record_lapse(id, LapseKind::kExpired);
  }
  return ended.size();
}

std::uint64_t LeaseCore::extend_all_leases(double extend_by_s, double now_s) {
  record_change(change::AllExtended{extend_by_s});
  if (recording_)
    add_undo([this, leases = leases_, workers = workers_, pauses = pauses_] {
      leases_ = leases;
      workers_ = workers;
      pauses_ = pauses;
    });
  // Uses up a lease number, so that the journal has a change to write even without live leases: after a pause, the
  // write shows whether the file is writable again.
  ++totals_.next_lease;
  leases_.delay_all(extend_by_s);
  // The pause does not count as time with leases, nor does the time before it since a worker's latest result.
  for (auto& [id, worker] : workers_) worker.counted_until_s = now_s;
  if (pauses_.size() == kPausesMax) pauses_.pop_front();
  pauses_.push_back({.ended_s = now_s, .length_s = extend_by_s});
  return leases_.size();
}

const LiveLease* LeaseCore::find(LeaseId lease) const { return leases_.find(lease); }
std::uint64_t LeaseCore::leases_held(WorkerId worker) const { return leases_.leases_of(worker).size(); }

std::uint64_t LeaseCore::stranded_by_next_step(std::uint64_t step, double now_s) {
  leases_.advance_to(now_s);
  std::map<Version, VersionStock> stock;
  for (const auto& [version, trajectories] : waiting_.complete_trajectories(version_min(step)))
    stock[version].waiting = trajectories;
  // Only the awaited ones of the live leases count, because the caller waits as long as trajectories are stranded.
  for (auto it = leases_.awaited().lower_bound(version_min(step)); it != leases_.awaited().end(); ++it)
    stock[it->first].live = it->second;
  std::vector<VersionStock> ascending;
  for (auto& [version, entry] : stock) {
    entry.version = version;
    ascending.push_back(entry);
  }
  return stranded(options_.pacing, step, ascending);
}

bool LeaseCore::has_no_room(Version version, std::uint64_t step, double now_s) {
  leases_.advance_to(now_s);
  return room(options_.pacing, step, version, trajectories_in_stock(step)) < options_.pacing.group_size;
}

std::optional<double> LeaseCore::too_slow_batch_seconds(WorkerId id) const {
  const auto worker = workers_.find(id);
  return worker != workers_.end() && worker->second.too_slow ? worker->second.pace.batch_seconds() : std::nullopt;
}

bool LeaseCore::was_turned_away(WorkerId id) const {
  const auto worker = workers_.find(id);
  return worker != workers_.end() && worker->second.turned_away;
}

void LeaseCore::count_without_work(Worker& worker, double now_s) {
  worker.seconds_without_work += worker.share_without_work * std::max(0.0, now_s - worker.share_begun_s);
  worker.share_begun_s = now_s;
}

double LeaseCore::take_seconds_without_work(WorkerId id, double now_s) {
  const auto worker = workers_.find(id);
  if (worker == workers_.end()) return 0;
  count_without_work(worker->second, now_s);
  return std::exchange(worker->second.seconds_without_work, 0);
}

std::vector<SetAsideGroup> LeaseCore::newly_set_aside() { return std::exchange(newly_set_aside_, {}); }
std::vector<UnproductiveWorker> LeaseCore::newly_unproductive() { return std::exchange(newly_unproductive_, {}); }

}  // namespace echoline::replay_buffer
