// The pool: groups whose lease ended without a result, which wait for another worker. Also the failures of workers on
// all groups. Private to this folder.
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
  struct Failures {
    // How often each worker reported that it could not generate the group.
    std::map<WorkerId, std::uint32_t> count_by_worker;
    std::set<WorkerId> workers_lost;      // workers whose connection broke while they had the group
    std::uint32_t failure_count() const;  // sum of `count_by_worker`
    bool empty() const { return count_by_worker.empty() && workers_lost.empty(); }
  };

  void put(GroupId group);
  void erase(GroupId group);
  bool contains(GroupId group) const { return ordinary_.contains(group) || suspects_.contains(group); }
  std::size_t size() const { return ordinary_.size() + suspects_.size(); }

  const Failures& failures(GroupId group) const;  // empty if there are none
  void set_failures(GroupId group, Failures failures);

  // The suspect with the lowest id. A suspect is a group with which several workers were lost; it is leased alone.
  std::optional<GroupId> first_suspect() const;
  // Up to `count` groups other than suspects, ascending, without those on which this worker failed more than
  // `failures_max` times.
  std::vector<GroupId> leasable(std::size_t count, WorkerId worker, std::uint32_t failures_max) const;

 private:
  bool is_suspect(GroupId group) const;
  std::set<GroupId> ordinary_, suspects_;  // the pooled groups
  std::map<GroupId, Failures> failures_;
};

}  // namespace echoline::replay_buffer
