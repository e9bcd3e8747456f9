// Cgroups of version 2 for sandboxes, on machines that let this process make them. Private to this folder.
#pragma once
#include "data_plane/sandbox/launch.hpp"

namespace echoline::sandbox {

// With a cgroup, the kernel itself enforces the limits of memory and processes at once, and counts the memory that it
// needs for the program. Without one, UsageMeter's measurements every 10 ms must do.
class ControlGroups {
 public:
  // Makes a group for all sandboxes, in the nearest ancestor of this process's group that delegates the memory and pids
  // controllers and is writable. `mount`: the cgroup mount; `own_group_file`: /proc/self/cgroup. Nothing if there is no
  // such group, as in most containers.
  static std::optional<ControlGroups> make(const std::filesystem::path& mount = "/sys/fs/cgroup",
                                           const std::filesystem::path& own_group_file = "/proc/self/cgroup");
  ~ControlGroups();
  ControlGroups(ControlGroups&&) noexcept;
  ControlGroups& operator=(ControlGroups&&) = delete;

  struct Group {
    std::filesystem::path folder;
    Fd procs;  // cgroup.procs, for entering
  };
  // Makes a group with these limits; nothing if the kernel refuses.
  std::optional<Group> make_group(const Limits& limits);
  // Whether the kernel has killed a process of the group for its memory use.
  static bool ran_out_of_memory(const Group& group);
  // Call when the group has no process any more.
  static void remove(const Group& group);

  const std::filesystem::path& folder() const { return folder_; }

 private:
  explicit ControlGroups(std::filesystem::path folder) : folder_(std::move(folder)) {}
  std::filesystem::path folder_;
  std::uint64_t groups_made_ = 0;  // number of groups made, for their names
};

}  // namespace echoline::sandbox
