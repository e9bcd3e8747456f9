// Cgroups of version 2 for sandboxes, where this process may make them. Private to this folder.
#pragma once
#include "data_plane/sandbox/launch.hpp"

namespace echoline::sandbox {

// The kernel then refuses memory and processes itself, what it uses for them included, where Watch only sees it 10 ms
// later.
class ControlGroups {
 public:
  // One for all, beside our own group or further up, wherever the controllers of memory and processes are handed down
  // and a group can be made. `mounted`: where the groups are; `own`: /proc/self/cgroup. Nothing where there is no such
  // place, as in most containers.
  static std::optional<ControlGroups> make(const std::filesystem::path& mounted = "/sys/fs/cgroup",
                                           const std::filesystem::path& own = "/proc/self/cgroup");
  ~ControlGroups();
  ControlGroups(ControlGroups&&) noexcept;
  ControlGroups& operator=(ControlGroups&&) = delete;

  struct Group {
    std::filesystem::path folder;
    Fd procs;  // to enter by
  };
  // A group with these limits; nothing where the kernel does not want it.
  std::optional<Group> make(const Limits& limits);
  // Whether the kernel has ended a process of the group because of its memory.
  static bool ran_out_of_memory(const Group& group);
  // When no process is in it any more.
  static void remove(const Group& group);

  const std::filesystem::path& folder() const { return folder_; }

 private:
  explicit ControlGroups(std::filesystem::path folder) : folder_(std::move(folder)) {}
  std::filesystem::path folder_;
  std::uint64_t made_ = 0;
};

}  // namespace echoline::sandbox
