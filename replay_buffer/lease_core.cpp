#include "replay_buffer/lease_core.hpp"

#include <algorithm>
#include <utility>

#include "base/result.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::size_t kPausesKept = 64;
constexpr std::size_t kDetailBytesMax = 512;  // per failure, as stored

}  // namespace

LeaseCore::LeaseCore(const LeaseOptions& options, WaitingGroups& waiting) : options_(options), waiting_(waiting) {}

// ---- journal ----

void LeaseCore::load(LiveLease lease) { leases_.add(std::move(lease)); }
void LeaseCore::load_pooled(GroupId group) { pool_.put(group); }
void LeaseCore::load_lapses(WorkerId worker, Lapses lapses) { lapses_[worker] = lapses; }

void LeaseCore::load_failure(GroupId group, WorkerId worker, std::uint32_t failures, bool lost) {
  GroupPool::Failures all = pool_.failures(group);
  if (failures > 0) all.failures[worker] = failures;
  if (lost) all.lost.insert(worker);
  pool_.put_failures(group, std::move(all));
}

void LeaseCore::begin() {
  ECHO_CHECK(!notes_, "begin() was called before");
  notes_.emplace(Notes{{}, {}, totals_, newly_set_aside_.size(), newly_idle_.size()});
}

void LeaseCore::commit() { notes_.reset(); }

void LeaseCore::rollback() {
  Notes notes = std::move(*notes_);
  notes_.reset();
  for (auto back = notes.undo.rbegin(); back != notes.undo.rend(); ++back) (*back)();
  totals_ = notes.totals;
  newly_set_aside_.resize(notes.set_aside);
  newly_idle_.resize(notes.idle);
}

void LeaseCore::note(LeaseChange change) {
  if (notes_) notes_->changes.push_back(std::move(change));
}

// ---- basic changes ----

void LeaseCore::lease(LiveLease lease) {
  note(change::Leased{lease});
  undo([this, id = lease.record.id] { leases_.remove(id); });
  leases_.add(std::move(lease));
}

// Ends a live lease; its group returns to the pool unless it was settled.
LiveLease LeaseCore::end(LeaseId id, LeaseState state, std::optional<double> settled_s) {
  LiveLease lease = leases_.remove(id);
  note(change::Ended{id, state, settled_s});
  if (notes_) undo([this, lease] { leases_.add(lease); });
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
      ECHO_CHECK(false, "lease {} does not end by being live", id);
  }
  put_in_pool(lease.record.group);
  return lease;
}

void LeaseCore::put_in_pool(GroupId group) {
  if (pool_.contains(group)) return;
  note(change::Pooled{group});
  undo([this, group] { pool_.erase(group); });
  pool_.put(group);
}

void LeaseCore::take_from_pool(GroupId group) {
  if (!pool_.contains(group)) return;
  note(change::Unpooled{group});
  undo([this, group] { pool_.put(group); });
  pool_.erase(group);
}

void LeaseCore::put_failures(GroupId group, GroupPool::Failures failures) {
  if (notes_) undo([this, group, before = pool_.failures(group)] { pool_.put_failures(group, before); });
  pool_.put_failures(group, std::move(failures));
}

void LeaseCore::note_failure(GroupId group, WorkerId worker, bool lost) {
  GroupPool::Failures all = pool_.failures(group);
  if (lost)
    all.lost.insert(worker);
  else
    ++all.failures[worker];
  const auto failures = all.failures.find(worker);
  note(change::Failed{group, worker, failures == all.failures.end() ? 0 : failures->second, all.lost.contains(worker)});
  put_failures(group, std::move(all));
}

void LeaseCore::forget_failures(GroupId group) {
  if (pool_.failures(group).empty()) return;
  note(change::FailuresForgotten{group});
  put_failures(group, {});
}

// Sets a group aside if it has failed too often. The group is in the pool.
void LeaseCore::judge(GroupId group, std::string_view reason, const std::string& detail) {
  const GroupPool::Failures& known = pool_.failures(group);
  if (set_aside_after(known.count(), static_cast<std::uint32_t>(known.lost.size()))) put_aside(group, reason, detail);
}

void LeaseCore::put_aside(GroupId group, std::string_view reason, const std::string& detail) {
  take_from_pool(group);
  forget_failures(group);
  newly_set_aside_.push_back({group, std::string(reason), detail.substr(0, kDetailBytesMax)});
  note(change::PutAside{newly_set_aside_.back()});
}

void LeaseCore::put_lapses(WorkerId worker, Lapses lapses) {
  const auto it = lapses_.find(worker);
  undo([this, worker, before = it == lapses_.end() ? Lapses{} : it->second] {
    if (before.weight == 0)
      lapses_.erase(worker);
    else
      lapses_[worker] = before;
  });
  note(change::Lapsed{worker, lapses});
  if (lapses.weight == 0)
    lapses_.erase(worker);
  else
    lapses_[worker] = lapses;
}

// A batch of leases ended without any result, or its worker was lost with it.
void LeaseCore::lapsed(WorkerId worker, LapseKind kind) {
  const auto it = lapses_.find(worker);
  Lapses lapses = it == lapses_.end() ? Lapses{} : it->second;
  ++lapses.batches;
  lapses.weight = lapse_weight(lapses.weight, kind);
  put_lapses(worker, lapses);
  if (lapses.weight >= kLapsesMax)
    newly_idle_.push_back(
        {worker, fmt::format("it took {} batches of work and returned none of them in time", lapses.batches)});
}

LeaseCore::Worker& LeaseCore::worker_of(WorkerId id) {
  const auto [it, is_new] = workers_.try_emplace(id);
  if (is_new) it->second.trusted = first_groups(options_.lease, options_.pacing);
  return it->second;
}

void LeaseCore::keep_pace(WorkerId id, double granted_s, double now_s, std::uint64_t tokens) {
  Worker& worker = worker_of(id);
  if (notes_)
    undo([this, id, before = worker] {
      workers_[id] = before;
      paces_.set(id, before.pace);
    });
  worker.pace.handed_in(granted_s, worked_until(granted_s, now_s), tokens);
  paces_.set(id, worker.pace);
}

// The time at which work granted then would have been submitted without later pauses.
double LeaseCore::worked_until(double granted_s, double now_s) const {
  for (const auto& [ended, late_s] : pauses_)
    if (ended > granted_s) now_s -= late_s;
  return std::max(now_s, granted_s);
}

Version LeaseCore::version_min(std::uint64_t step) const {
  return oldest_admissible(step, options_.pacing.staleness.budget);
}

// Overdue leases do not count as stock, because no step waits for them and others may generate in their place.
std::uint64_t LeaseCore::ahead(std::uint64_t step) const {
  return leases_.not_overdue() + waiting_.trajectories(version_min(step));
}

// A worker without measurements counts as the average of the measured ones.
std::uint64_t LeaseCore::may_hold(const Worker& worker) const {
  const CountedRates& rates = paces_.rates();
  const double measured = static_cast<double>(rates.size()), sum = rates.sum();
  const double average = measured > 0 ? sum / measured : 1;
  const double all = sum + (static_cast<double>(workers_.size()) - measured) * average;
  const std::uint64_t groups =
      (std::uint64_t{options_.pacing.staleness.lookahead_steps()} + 1) * options_.pacing.groups_per_step();
  const double own = rate_that_counts(worker.pace.groups_per_s().value_or(average), rates.median());
  return groups_held_max(groups, own, all);
}

std::vector<LiveLease> LeaseCore::grant(const GrantRequest& request, std::uint64_t step, double now_s) {
  expire(now_s);
  const Pacing& pacing = options_.pacing;
  const std::uint64_t stock = ahead(step), live_of_worker = leases_.of(request.worker).size();
  Worker& worker = worker_of(request.worker);
  if (request.step_seconds) fresh_s_ = (pacing.staleness.budget + 1.0) * *request.step_seconds;
  const std::optional<double> batch_s = worker.pace.batch_seconds();
  worker.too_slow = stock >= pacing.trajectories_per_step && request.step_seconds && batch_s &&
                    !in_time(pacing, step, request.version, *batch_s, *request.step_seconds);
  const std::uint64_t held_max = std::min(worker.trusted, may_hold(worker));
  const std::uint64_t could_take =
      std::min({std::uint64_t{request.groups_max}, std::uint64_t{options_.leases_per_grant_max},
                options_.leases_live_max - std::min<std::uint64_t>(leases_.size(), options_.leases_live_max),
                held_max - std::min(live_of_worker, held_max)});
  const std::uint64_t allowed = room(pacing, step, request.version, stock) / options_.pacing.group_size;
  if (allowed < could_take && !worker.too_slow)
    if (const auto which = binding(pacing, step, request.version)) bound_.note(*which, step);
  worker.turned_away = request.groups_max > 0 && live_of_worker == 0 &&
                       room(pacing, step, request.newest.value_or(request.version), stock) < options_.pacing.group_size;
  std::vector<LiveLease> granted;
  const std::uint64_t wanted = worker.too_slow ? 0 : std::min(could_take, allowed);
  if (wanted == 0) return granted;
  const double lease_s = lease_seconds(options_.lease, worker.pace.seconds_per_token(), paces_.seconds_per_token());
  const double due_s = now_s + patience_seconds(options_.lease, batch_s, paces_.batch_seconds(), fresh_s_);
  for (const GroupId group : take_groups(wanted, request.worker, live_of_worker == 0)) {
    granted.push_back({{LeaseId{totals_.next_lease++}, group, request.worker, request.version, request.policy_digest,
                        options_.pacing.group_size, now_s, now_s + lease_s, LeaseState::kLive, lease_s},
                       due_s});
    lease(granted.back());
  }
  return granted;
}

// Groups from the pool first, lowest id first, then new ones; or a single group with which workers were lost.
std::vector<GroupId> LeaseCore::take_groups(std::uint64_t count, WorkerId worker, bool idle) {
  if (const auto suspect = pool_.suspect(); suspect && idle) {
    take_from_pool(*suspect);
    return {*suspect};
  }
  // If there is no other worker, a worker gets a group again on which it failed.
  std::vector<GroupId> groups = pool_.others(count, worker, workers_.size() > 1 ? 0 : kFailuresMax);
  for (const GroupId group : groups) take_from_pool(group);
  while (groups.size() < count) groups.push_back(GroupId{totals_.next_group++});
  return groups;
}

double LeaseCore::settle(LeaseId id, const StoredResult& result, double now_s) {
  leases_.move_to(now_s);
  const bool first = !paces_.batch_seconds();
  const LiveLease lease = end(id, LeaseState::kSettled, now_s);
  const LeaseRecord& record = lease.record;
  undo([this, group = record.group] { waiting_.remove(group); });
  waiting_.put(record.group, {result.version, record.rollouts, result.scored});
  if (result.scored) forget_failures(record.group);
  Worker& worker = worker_of(record.worker);
  // The first result of a batch reduces its worker's lapses by one.
  if (const auto lapses = lapses_.find(record.worker);
      lapses != lapses_.end() && worker.pace.handed_in_of(record.granted_unix_s) == 0)
    put_lapses(record.worker, {lapses->second.weight - 1, lapses->second.batches});
  keep_pace(record.worker, record.granted_unix_s, now_s, result.tokens_longest);
  const double held_s = std::max(0.0, now_s - std::max(record.granted_unix_s, worker.accounted_until_s));
  worker.accounted_until_s = now_s;
  worker.trusted = groups_trusted(worker.trusted, 1);
  if (first) wait_less_for_newcomers();
  return held_s;
}

// The first measurements show how long the work takes, so unmeasured workers are not awaited much longer.
void LeaseCore::wait_less_for_newcomers() {
  if (!paces_.batch_seconds()) return;
  const double patience_s = patience_seconds(options_.lease, std::nullopt, paces_.batch_seconds(), fresh_s_);
  for (const auto& [id, worker] : workers_) {
    if (worker.pace.batch_seconds()) continue;
    note(change::DueSooner{id, patience_s});
    for (const LeaseId held : leases_.of(id)) {
      const LiveLease& lease = *leases_.find(held);
      const double due_s = lease.record.granted_unix_s + patience_s;
      if (lease.overdue || due_s >= lease.due_s) continue;
      undo([this, held, before = lease.due_s] { leases_.put_due(held, before); });
      leases_.put_due(held, due_s);
    }
  }
}

void LeaseCore::refuse(LeaseId id, std::uint64_t tokens_longest, double now_s) {
  leases_.move_to(now_s);
  const bool late = now_s > leases_.find(id)->record.expires_unix_s;
  const LiveLease lease = end(id, late ? LeaseState::kExpired : LeaseState::kReleased);
  if (late) keep_pace(lease.record.worker, lease.record.granted_unix_s, now_s, tokens_longest);
}

void LeaseCore::came_late(WorkerId worker, double granted_s, std::uint64_t tokens_longest, double now_s) {
  leases_.move_to(now_s);
  keep_pace(worker, granted_s, now_s, tokens_longest);
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
        std::max(record.expires_unix_s, renewed(options_.lease, record.granted_unix_s, now_s, record.lease_s));
    note(change::Renewed{id, progress, expires_s});
    undo([this, id, before = lease->progress, expired_s = record.expires_unix_s] {
      leases_.renew(id, before, expired_s);
    });
    leases_.renew(id, progress, expires_s);
    ++renewals;
  }
  return renewals;
}

bool LeaseCore::failed(WorkerId worker, LeaseId id, std::string_view reason, const std::string& detail) {
  const LiveLease* lease = leases_.find(id);
  if (lease == nullptr || lease->record.worker != worker) return false;
  const GroupId group = lease->record.group;
  end(id, LeaseState::kReleased);
  unscorable(group, worker, reason, detail);
  return true;
}

void LeaseCore::unscorable(GroupId group, WorkerId worker, std::string_view reason, const std::string& detail) {
  note_failure(group, worker, /*lost=*/false);
  judge(group, reason, detail);
}

std::uint64_t LeaseCore::give_back(WorkerId worker, std::span<const LeaseId> ids) {
  std::uint64_t returned = 0;
  for (const LeaseId id : ids) {
    const LiveLease* lease = leases_.find(id);
    if (lease == nullptr || lease->record.worker != worker) continue;
    end(id, LeaseState::kReleased);
    ++returned;
  }
  return returned;
}

std::uint64_t LeaseCore::give_back_all(WorkerId worker) {
  const std::set<LeaseId>& held = leases_.of(worker);
  return give_back(worker, std::vector(held.begin(), held.end()));
}

bool LeaseCore::set_aside(LeaseId id, std::string_view reason, const std::string& detail) {
  const LiveLease* lease = leases_.find(id);
  if (lease == nullptr) return false;
  const GroupId group = lease->record.group;
  end(id, LeaseState::kReleased);
  put_aside(group, reason, detail);
  return true;
}

void LeaseCore::regenerate(GroupId group) {
  // A group added without the core is not leased.
  if (group.value < totals_.next_group) put_in_pool(group);
}

std::uint64_t LeaseCore::release_worker(WorkerId worker, double now_s) {
  leases_.move_to(now_s);
  const std::set<LeaseId>& held = leases_.of(worker);
  const std::vector<LeaseId> ids(held.begin(), held.end());
  if (!ids.empty()) {
    lapsed(worker, LapseKind::kLost);

    leases_.leave_out(worker, now_s + LeaseTable::kLeftOutFactor *
                                          std::max(0.0, now_s - leases_.find(ids.front())->record.granted_unix_s));
  }
  for (const LeaseId id : ids) {
    const LiveLease lease = end(id, LeaseState::kReleased);
    note_failure(lease.record.group, worker, /*lost=*/true);
    judge(lease.record.group, "worker lost", "the connection of every worker that had it broke");
  }
  if (const auto it = workers_.find(worker); it != workers_.end()) {
    if (notes_)
      undo([this, worker, before = it->second] {
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
  for (; const LiveLease* lease = leases_.first_to_expire(); ++released) end(lease->record.id, LeaseState::kReleased);
  return released;
}

std::uint64_t LeaseCore::expire(double now_s) {
  leases_.move_to(now_s);
  std::vector<LiveLease> ended;
  std::map<std::pair<WorkerId, double>, std::uint64_t> batches;  // worker and time of grant -> leases that end now
  for (const LiveLease* lease; (lease = leases_.first_to_expire()) != nullptr && lease->record.expires_unix_s < now_s;)
    ended.push_back(end(lease->record.id, LeaseState::kExpired));
  std::ranges::sort(ended, {}, [](const LiveLease& lease) { return lease.record.id; });
  for (const LiveLease& lease : ended) {
    const LeaseRecord& record = lease.record;
    ++batches[{record.worker, record.granted_unix_s}];
    if (workers_.contains(record.worker)) keep_pace(record.worker, record.granted_unix_s, now_s, 0);
  }
  for (const auto& [batch, count] : batches) {
    const auto& [id, granted_s] = batch;
    if (const auto worker = workers_.find(id); worker != workers_.end()) {
      if (worker->second.pace.handed_in_of(granted_s) >= count) continue;  // most of the batch arrived
      // keep_pace() has recorded the old value
      worker->second.trusted = groups_trusted_after_lapse(worker->second.trusted);
    }
    lapsed(id, LapseKind::kExpired);
  }
  return ended.size();
}

std::uint64_t LeaseCore::excuse(double late_s, double now_s) {
  note(change::Excused{late_s});
  if (notes_)
    undo([this, leases = leases_, workers = workers_, pauses = pauses_] {
      leases_ = leases;
      workers_ = workers;
      pauses_ = pauses;
    });
  // Makes a journal write something, which shows whether the file is writable, even if no lease is live.
  ++totals_.next_lease;
  leases_.shift(late_s);
  for (auto& [id, worker] : workers_) worker.accounted_until_s = now_s;  // no worker had work for that long
  if (pauses_.size() == kPausesKept) pauses_.pop_front();
  pauses_.emplace_back(now_s, late_s);
  return leases_.size();
}

const LiveLease* LeaseCore::find(LeaseId lease) const { return leases_.find(lease); }
const LiveLease* LeaseCore::first_to_expire() const { return leases_.first_to_expire(); }
std::uint64_t LeaseCore::held(WorkerId worker) const { return leases_.of(worker).size(); }

std::uint64_t LeaseCore::stranded_by_next_step(std::uint64_t step, double now_s) {
  leases_.move_to(now_s);
  std::map<Version, VersionStock> stock;
  for (const auto& [version, trajectories] : waiting_.whole(version_min(step))) stock[version].waiting = trajectories;
  for (auto it = leases_.awaited().lower_bound(version_min(step)); it != leases_.awaited().end(); ++it)
    stock[it->first].live = it->second;
  std::vector<VersionStock> ascending;
  for (auto& [version, entry] : stock) {
    entry.version = version;
    ascending.push_back(entry);
  }
  return stranded(options_.pacing, step, ascending);
}

bool LeaseCore::closed(Version version, std::uint64_t step, double now_s) {
  leases_.move_to(now_s);
  return room(options_.pacing, step, version, ahead(step)) < options_.pacing.group_size;
}

std::optional<double> LeaseCore::too_slow(WorkerId id) const {
  const auto worker = workers_.find(id);
  return worker != workers_.end() && worker->second.too_slow ? worker->second.pace.batch_seconds() : std::nullopt;
}

bool LeaseCore::turned_away(WorkerId id) const {
  const auto worker = workers_.find(id);
  return worker != workers_.end() && worker->second.turned_away;
}

std::vector<SetAside> LeaseCore::newly_set_aside() { return std::exchange(newly_set_aside_, {}); }
std::vector<Idler> LeaseCore::newly_idle() { return std::exchange(newly_idle_, {}); }

}  // namespace echoline::replay_buffer
