// The groups that wait in the replay buffer for training, and the choice of a learner step's groups. Uses no database.
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
  Version version;            // oldest version of any token
  std::uint32_t members = 0;  // trajectories that are present
  bool scored = true;         // false: it waits for the learner's scores
  friend bool operator==(const WaitingGroup&, const WaitingGroup&) = default;
};

// Use from one thread at a time. A change takes O(log n).
class WaitingGroups {
 public:
  explicit WaitingGroups(std::uint32_t group_size) : group_size_(group_size) {}

  void put(GroupId group, const WaitingGroup& waiting);  // adds or replaces
  void remove(GroupId group);                            // without effect if the group does not wait
  const WaitingGroup* find(GroupId group) const;         // null if the group does not wait

  // Trajectories of versions from `oldest` on, including those of incomplete groups.
  std::uint64_t trajectories(Version oldest) const;
  // Trajectories of complete groups by version, from `oldest` on.
  std::map<Version, std::uint64_t> complete_trajectories(Version oldest) const;
  // The groups of the next batch: `count` complete and scored ones, oldest version first, then by id; absent if there
  // are fewer.
  std::optional<std::vector<GroupId>> next_batch(Version oldest, std::size_t count) const;
  // Groups of versions before `oldest`, by version, then by id.
  std::vector<GroupId> older_than(Version oldest) const;
  std::size_t size() const { return groups_.size(); }

 private:
  struct ByVersion {
    std::set<GroupId> ready, not_ready;  // `ready`: complete and scored, so a batch may take it
    std::uint64_t trajectories = 0, complete_trajectories = 0;
  };
  bool is_complete(const WaitingGroup& group) const { return group.members == group_size_; }

  std::uint32_t group_size_;
  std::unordered_map<GroupId, WaitingGroup> groups_;
  std::map<Version, ByVersion> by_version_;
};

}  // namespace echoline::replay_buffer
