// The groups that wait for another worker, with the failures of workers on them. Private to this folder.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "base/ids.hpp"

namespace echoline::replay_buffer {

class GroupPool {
 public:
  // How often each worker failed on a group without being lost, and the workers that were lost while they had it.
  struct Failures {
    std::map<WorkerId, std::uint32_t> failures;
    std::set<WorkerId> lost;
    std::uint32_t count() const;
    bool empty() const { return failures.empty() && lost.empty(); }
  };

  void put(GroupId group);
  void erase(GroupId group);
  bool contains(GroupId group) const { return ordinary_.contains(group) || suspects_.contains(group); }
  std::size_t size() const { return ordinary_.size() + suspects_.size(); }

  const Failures& failures(GroupId group) const;  // empty if there are none
  void put_failures(GroupId group, Failures failures);

  // The lowest group with which several workers were lost; it is leased alone.
  std::optional<GroupId> suspect() const;
  // Up to `count` other groups, ascending, without those on which this worker failed more than `failures_max` times.
  std::vector<GroupId> others(std::size_t count, WorkerId worker, std::uint32_t failures_max) const;

 private:
  bool is_suspect(GroupId group) const;
  std::set<GroupId> ordinary_, suspects_;
  std::map<GroupId, Failures> failures_;
};

}  // namespace echoline::replay_buffer
