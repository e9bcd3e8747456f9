#include "replay_buffer/waiting_groups.hpp"

namespace echoline::replay_buffer {

void WaitingGroups::put(GroupId group, const WaitingGroup& waiting) {
  remove(group);
  groups_.emplace(group, waiting);
  OfVersion& of = by_version_[waiting.version];
  (is_whole(waiting) && waiting.scored ? of.ready : of.others).insert(group);
  of.trajectories += waiting.members;
  if (is_whole(waiting)) of.whole += waiting.members;
}

void WaitingGroups::remove(GroupId group) {
  const auto it = groups_.find(group);
  if (it == groups_.end()) return;
  const WaitingGroup waiting = it->second;
  groups_.erase(it);
  const auto version = by_version_.find(waiting.version);
  OfVersion& of = version->second;
  of.ready.erase(group);
  of.others.erase(group);
  of.trajectories -= waiting.members;
  if (is_whole(waiting)) of.whole -= waiting.members;
  if (of.ready.empty() && of.others.empty()) by_version_.erase(version);
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

std::map<Version, std::uint64_t> WaitingGroups::whole(Version oldest) const {
  std::map<Version, std::uint64_t> found;
  for (auto it = by_version_.lower_bound(oldest); it != by_version_.end(); ++it)
    if (it->second.whole > 0) found.emplace_hint(found.end(), it->first, it->second.whole);
  return found;
}

std::optional<std::vector<GroupId>> WaitingGroups::batch(Version oldest, std::size_t count) const {
  const auto first = by_version_.lower_bound(oldest);
  std::size_t ready = 0;  // counted first: while the learner waits, each submission asks for a batch
  for (auto it = first; it != by_version_.end() && ready < count; ++it) ready += it->second.ready.size();
  if (ready < count) return std::nullopt;
  std::vector<GroupId> chosen;
  chosen.reserve(count);
  for (auto it = first; it != by_version_.end() && chosen.size() < count; ++it)
    for (auto group = it->second.ready.begin(); group != it->second.ready.end() && chosen.size() < count; ++group)
      chosen.push_back(*group);
  return chosen;
}

std::vector<GroupId> WaitingGroups::before(Version oldest) const {
  std::vector<GroupId> found;
  for (auto it = by_version_.begin(); it != by_version_.end() && it->first < oldest; ++it) {
    std::set<GroupId> all = it->second.ready;
    all.insert(it->second.others.begin(), it->second.others.end());
    found.insert(found.end(), all.begin(), all.end());
  }
  return found;
}

}  // namespace echoline::replay_buffer
