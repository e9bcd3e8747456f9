#include "replay_buffer/group_pool.hpp"

#include <utility>

namespace echoline::replay_buffer {
namespace {

constexpr std::size_t kSuspectLosses = 2;

}  // namespace

std::uint32_t GroupPool::Failures::count() const {
  std::uint32_t sum = 0;
  for (const auto& [worker, times] : failures) sum += times;
  return sum;
}

bool GroupPool::is_suspect(GroupId group) const { return failures(group).lost.size() >= kSuspectLosses; }

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

void GroupPool::put_failures(GroupId group, Failures failures) {
  const bool pooled = contains(group);
  erase(group);
  if (failures.empty())
    failures_.erase(group);
  else
    failures_[group] = std::move(failures);
  if (pooled) put(group);
}

std::optional<GroupId> GroupPool::suspect() const {
  return suspects_.empty() ? std::nullopt : std::optional(*suspects_.begin());
}

std::vector<GroupId> GroupPool::others(std::size_t count, WorkerId worker, std::uint32_t failures_max) const {
  std::vector<GroupId> found;
  for (auto it = ordinary_.begin(); it != ordinary_.end() && found.size() < count; ++it) {
    const auto& known = failures(*it).failures;
    const auto own = known.find(worker);
    if (own == known.end() || own->second <= failures_max) found.push_back(*it);
  }
  return found;
}

}  // namespace echoline::replay_buffer
