// The indexes of live leases, for LeaseCore.
#include "replay_buffer/lease_table.hpp"

#include <algorithm>

#include "base/result.hpp"

namespace echoline::replay_buffer {
namespace {

void add_trajectories(std::map<Version, std::uint64_t>& counts, Version version, std::uint64_t trajectories) {
  counts[version] += trajectories;
}

void subtract_trajectories(std::map<Version, std::uint64_t>& counts, Version version, std::uint64_t trajectories) {
  const auto it = counts.find(version);
  it->second -= trajectories;
  if (it->second == 0) counts.erase(it);
}

}  // namespace

void LeaseTable::add(LiveLease lease) {
  const LeaseRecord& record = lease.record;
  // The overdue lease keeps its worker left out, so no end time is needed (0). remove() sets one.
  if (lease.overdue && !left_out_workers_.contains(record.worker)) leave_out(record.worker, /*until_s=*/0);
  by_expiry_.emplace(record.expires_unix_s, record.id);
  by_worker_[record.worker].insert(record.id);
  add_trajectories(trajectories_by_version_, record.version, record.rollouts);
  if (lease.overdue) {
    LeftOut& left_out = left_out_workers_.at(record.worker);
    ++left_out.overdue_leases;
    left_out_until_.erase({left_out.until_s, record.worker});  // it has only workers without overdue leases
  } else {
    by_due_.emplace(lease.due_s, record.id);
    trajectories_not_overdue_ += record.rollouts;
    if (!left_out_workers_.contains(record.worker)) add_awaited(lease);
  }
  const LeaseId id = record.id;
  const bool is_new = leases_.emplace(id, std::move(lease)).second;
  ECHO_CHECK(is_new, "lease {} is live already", id);
}

LiveLease LeaseTable::remove(LeaseId id) {
  const auto it = leases_.find(id);
  ECHO_CHECK(it != leases_.end(), "lease {} is not live", id);
  LiveLease lease = std::move(it->second);
  leases_.erase(it);
  const LeaseRecord& record = lease.record;
  by_expiry_.erase({record.expires_unix_s, id});
  const auto leases_of_worker = by_worker_.find(record.worker);
  leases_of_worker->second.erase(id);
  if (leases_of_worker->second.empty()) by_worker_.erase(leases_of_worker);
  subtract_trajectories(trajectories_by_version_, record.version, record.rollouts);
  if (lease.overdue) {
    LeftOut& left_out = left_out_workers_.at(record.worker);
    // Leaves the worker out for kLeftOutFactor times as long as steps waited in vain for this lease: from its grant
    // until it was due.
    const double waited_s = lease.due_s - record.granted_unix_s;
    left_out.until_s = std::max(left_out.until_s, now_s_ + kLeftOutFactor * waited_s);
    --left_out.overdue_leases;
    if (left_out.overdue_leases == 0) left_out_until_.emplace(left_out.until_s, record.worker);
  } else {
    by_due_.erase({lease.due_s, id});
    trajectories_not_overdue_ -= record.rollouts;
    if (!left_out_workers_.contains(record.worker)) subtract_awaited(lease);
  }
  return lease;
}

const LiveLease* LeaseTable::find(LeaseId id) const {
  const auto it = leases_.find(id);
  return it == leases_.end() ? nullptr : &it->second;
}

const LiveLease* LeaseTable::first_to_expire() const {
  return by_expiry_.empty() ? nullptr : find(by_expiry_.begin()->second);
}

std::vector<LeaseId> LeaseTable::expired_before(double now_s) const {
  std::vector<LeaseId> expired;
  for (const auto& [expires_s, id] : by_expiry_) {
    if (expires_s >= now_s) break;
    expired.push_back(id);
  }
  return expired;
}

const std::set<LeaseId>& LeaseTable::leases_of(WorkerId worker) const {
  static const std::set<LeaseId> kNone;
  const auto it = by_worker_.find(worker);
  return it == by_worker_.end() ? kNone : it->second;
}

void LeaseTable::renew(LeaseId id, std::uint64_t progress, double expires_s) {
  LiveLease& lease = leases_.at(id);
  by_expiry_.erase({lease.record.expires_unix_s, id});
  lease.progress = progress;
  lease.record.expires_unix_s = expires_s;
  by_expiry_.emplace(expires_s, id);
}

void LeaseTable::set_due(LeaseId id, double due_s) {
  LiveLease& lease = leases_.at(id);
  ECHO_CHECK(!lease.overdue, "lease {} is overdue", id);
  by_due_.erase({lease.due_s, id});
  lease.due_s = due_s;
  by_due_.emplace(due_s, id);
}

void LeaseTable::delay_all(double extend_by_s) {
  by_expiry_.clear();
  by_due_.clear();
  for (auto& [id, lease] : leases_) {
    lease.due_s += extend_by_s;
    lease.record.expires_unix_s += extend_by_s;
    by_expiry_.emplace(lease.record.expires_unix_s, id);
    if (!lease.overdue) by_due_.emplace(lease.due_s, id);
  }
}

void LeaseTable::add_awaited(const LiveLease& lease) {
  add_trajectories(awaited_trajectories_, lease.record.version, lease.record.rollouts);
}

void LeaseTable::subtract_awaited(const LiveLease& lease) {
  subtract_trajectories(awaited_trajectories_, lease.record.version, lease.record.rollouts);
}

void LeaseTable::leave_out(WorkerId worker, double until_s) {
  const auto [it, is_new] = left_out_workers_.try_emplace(worker);
  LeftOut& left_out = it->second;
  if (is_new)
    for (const LeaseId id : leases_of(worker)) subtract_awaited(leases_.at(id));
  else if (left_out.overdue_leases == 0)
    left_out_until_.erase({left_out.until_s, worker});
  left_out.until_s = std::max(left_out.until_s, until_s);
  if (left_out.overdue_leases == 0) left_out_until_.emplace(left_out.until_s, worker);
}

void LeaseTable::advance_to(double now_s) {
  now_s_ = std::max(now_s_, now_s);
  while (!by_due_.empty() && by_due_.begin()->first < now_s) {
    const LeaseId id = by_due_.begin()->second;
    LiveLease lease = remove(id);  // removed and added again, because `overdue` decides which indexes have the lease
    lease.overdue = true;
    add(std::move(lease));
  }
  while (!left_out_until_.empty() && left_out_until_.begin()->first <= now_s) {
    const WorkerId worker = left_out_until_.begin()->second;
    left_out_until_.erase(left_out_until_.begin());
    left_out_workers_.erase(worker);
    for (const LeaseId id : leases_of(worker)) add_awaited(leases_.at(id));
  }
}

void LeaseTable::check() const {
  std::map<Version, std::uint64_t> by_version, awaited;
  std::unordered_map<WorkerId, std::uint32_t> overdue;
  std::uint64_t not_overdue = 0;
  for (const auto& [id, lease] : leases_) {
    const LeaseRecord& record = lease.record;
    ECHO_CHECK(
        record.id == id && leases_of(record.worker).contains(id) && by_expiry_.contains({record.expires_unix_s, id}),
        "an index lacks lease {}", id);
    ECHO_CHECK(by_due_.contains({lease.due_s, id}) == !lease.overdue, "by_due_ is wrong about lease {}", id);
    by_version[record.version] += record.rollouts;
    if (lease.overdue) {
      ++overdue[record.worker];
      continue;
    }
    not_overdue += record.rollouts;
    if (!left_out_workers_.contains(record.worker)) awaited[record.version] += record.rollouts;
  }
  ECHO_CHECK(by_version == trajectories_by_version_ && awaited == awaited_trajectories_ &&
                 not_overdue == trajectories_not_overdue_,
             "the trajectories of {} leases are counted wrongly", leases_.size());
  ECHO_CHECK(by_expiry_.size() == leases_.size(), "{} expiries of {} leases", by_expiry_.size(), leases_.size());
  std::size_t scheduled = 0;  // workers with an entry in left_out_until_
  for (const auto& [worker, left_out] : left_out_workers_) {
    ECHO_CHECK(left_out.overdue_leases == overdue[worker], "the overdue leases of worker {} are counted wrongly",
               worker);
    if (left_out.overdue_leases == 0) scheduled += left_out_until_.contains({left_out.until_s, worker});
  }
  ECHO_CHECK(scheduled == left_out_until_.size(), "{} workers wait to be included again, expected {}",
             left_out_until_.size(), scheduled);
}

}  // namespace echoline::replay_buffer
