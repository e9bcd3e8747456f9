// Keeps the groups that wait for another lease, for LeaseCore.
#include "replay_buffer/group_pool.hpp"

#include <utility>

namespace echoline::replay_buffer {
namespace {

// From this number of lost workers on, the group itself may be the cause: the engine may crash at its prompt.
constexpr std::size_t kSuspectLossesMin = 2;

}  // namespace

std::uint32_t GroupPool::Failures::failure_count() const {
  std::uint32_t sum = 0;
  for (const auto& [worker, count] : count_by_worker) sum += count;
  return sum;
}

bool GroupPool::is_suspect(GroupId group) const { return failures(group).workers_lost.size() >= kSuspectLossesMin; }

void GroupPool::put(GroupId group) { (is_suspect(group) ? suspects_ : ordinary_).insert(group); }

void GroupPool::erase(GroupId group) {
  ordinary_.erase(group);
  suspects_.erase(group);
}

const GroupPool::Failures& GroupPool::failures(GroupId group) const {
  static const Failures kNone;
  const auto it = failures_.find(group);
  return it == failures_.end() ? kNone : it->second;
}

void GroupPool::set_failures(GroupId group, Failures failures) {
  const bool is_pooled = contains(group);
  erase(group);  // put() below decides again whether it is a suspect
  if (failures.empty())
    failures_.erase(group);
  else
    failures_[group] = std::move(failures);
  if (is_pooled) put(group);
}

std::optional<GroupId> GroupPool::first_suspect() const {
  return suspects_.empty() ? std::nullopt : std::optional(*suspects_.begin());
}

std::vector<GroupId> GroupPool::leasable(std::size_t count, WorkerId worker, std::uint32_t failures_max) const {
  std::vector<GroupId> groups;
  for (auto it = ordinary_.begin(); it != ordinary_.end() && groups.size() < count; ++it) {
    const std::map<WorkerId, std::uint32_t>& count_by_worker = failures(*it).count_by_worker;
    const auto of_worker = count_by_worker.find(worker);
    if (of_worker == count_by_worker.end() || of_worker->second <= failures_max) groups.push_back(*it);
  }
  return groups;
}

}  // namespace echoline::replay_buffer
