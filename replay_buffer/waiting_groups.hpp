// The groups that wait in the replay buffer to be trained on, and which of them a learner step takes. Without a
// database.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/ids.hpp"

namespace echoline::replay_buffer {

struct WaitingGroup {
  Version version;            // the oldest in any token of any member
  std::uint32_t members = 0;  // trajectories that are there
  bool scored = true;
  friend bool operator==(const WaitingGroup&, const WaitingGroup&) = default;
};

// One thread at a time. A change takes O(log n).
class WaitingGroups {
 public:
  explicit WaitingGroups(std::uint32_t group_size) : group_size_(group_size) {}

  void put(GroupId group, const WaitingGroup& waiting);  // new, or instead of what was known of it
  void remove(GroupId group);                            // nothing where it does not wait
  const WaitingGroup* find(GroupId group) const;         // null where it does not wait

  // Trajectories of versions from `oldest` on, those of incomplete groups included.
  std::uint64_t trajectories(Version oldest) const;
  // Trajectories of whole groups by version, from `oldest` on.
  std::map<Version, std::uint64_t> whole(Version oldest) const;
  // The groups of the next batch: `count` that are whole and scored, oldest version first, then by id; absent where
  // there are fewer.
  std::optional<std::vector<GroupId>> batch(Version oldest, std::size_t count) const;
  // Groups of versions before `oldest`, by version, then by id.
  std::vector<GroupId> before(Version oldest) const;
  std::size_t size() const { return groups_.size(); }

 private:
  struct OfVersion {
    std::set<GroupId> ready, others;  // whole and scored; not yet
    std::uint64_t trajectories = 0, whole = 0;
  };
  bool is_whole(const WaitingGroup& group) const { return group.members == group_size_; }

  std::uint32_t group_size_;
  std::unordered_map<GroupId, WaitingGroup> groups_;
  std::map<Version, OfVersion> by_version_;
};

}  // namespace echoline::replay_buffer
