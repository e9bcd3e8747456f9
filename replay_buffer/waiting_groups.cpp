// Keeps the waiting groups by version, for Store, LeaseCore and the simulator.
#include "replay_buffer/waiting_groups.hpp"

namespace echoline::replay_buffer {

void WaitingGroups::put(GroupId group, const WaitingGroup& waiting) {
  remove(group);  // its earlier state, if there is one
  groups_.emplace(group, waiting);
  ByVersion& entry = by_version_[waiting.version];
  (is_complete(waiting) && waiting.scored ? entry.ready : entry.not_ready).insert(group);
  entry.trajectories += waiting.members;
  if (is_complete(waiting)) entry.complete_trajectories += waiting.members;
}

void WaitingGroups::remove(GroupId group) {
  const auto it = groups_.find(group);
  if (it == groups_.end()) return;
  const WaitingGroup waiting = it->second;
  groups_.erase(it);
  const auto version = by_version_.find(waiting.version);
  ByVersion& entry = version->second;
  entry.ready.erase(group);
  entry.not_ready.erase(group);
  entry.trajectories -= waiting.members;
  if (is_complete(waiting)) entry.complete_trajectories -= waiting.members;
  if (entry.ready.empty() && entry.not_ready.empty()) by_version_.erase(version);
}

const WaitingGroup* WaitingGroups::find(GroupId group) const {
  const auto it = groups_.find(group);
  return it == groups_.end() ? nullptr : &it->second;
}

std::uint64_t WaitingGroups::trajectories(Version oldest) const {
  std::uint64_t sum = 0;
  for (auto it = by_version_.lower_bound(oldest); it != by_version_.end(); ++it) sum += it->second.trajectories;
  return sum;
}

std::map<Version, std::uint64_t> WaitingGroups::complete_trajectories(Version oldest) const {
  std::map<Version, std::uint64_t> by_version;
  for (auto it = by_version_.lower_bound(oldest); it != by_version_.end(); ++it)
    if (it->second.complete_trajectories > 0)
      by_version.emplace_hint(by_version.end(), it->first, it->second.complete_trajectories);
  return by_version;
}

std::optional<std::vector<GroupId>> WaitingGroups::next_batch(Version oldest, std::size_t count) const {
  const auto first = by_version_.lower_bound(oldest);
  // Counts before it collects ids, because most calls find too few groups: while the learner waits for a batch, every
  // submission leads to a call.
  std::size_t ready = 0;
  for (auto it = first; it != by_version_.end() && ready < count; ++it) ready += it->second.ready.size();
  if (ready < count) return std::nullopt;
  std::vector<GroupId> chosen;
  chosen.reserve(count);
  for (auto it = first; it != by_version_.end() && chosen.size() < count; ++it)
    for (auto group = it->second.ready.begin(); group != it->second.ready.end() && chosen.size() < count; ++group)
      chosen.push_back(*group);
  return chosen;
}

std::vector<GroupId> WaitingGroups::older_than(Version oldest) const {
  std::vector<GroupId> groups;
  for (auto it = by_version_.begin(); it != by_version_.end() && it->first < oldest; ++it) {
    std::set<GroupId> of_version = it->second.ready;
    of_version.insert(it->second.not_ready.begin(), it->second.not_ready.end());
    groups.insert(groups.end(), of_version.begin(), of_version.end());
  }
  return groups;
}

}  // namespace echoline::replay_buffer
