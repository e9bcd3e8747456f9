// Implements ControlGroups for the sandbox pool.
#include "data_plane/sandbox/control_group.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <atomic>
#include <sstream>

#include "base/files.hpp"

namespace echoline::sandbox {
namespace {

constexpr std::size_t kGroupFileBytesMax = 1u << 20;
constexpr unsigned kBubblewrapProcesses = 2;  // they are in the program's group and count towards its limit

// Whether `name` is one of the words of a file.
bool has_word(const std::filesystem::path& file, std::string_view name) {
  const auto text = read_file(file, kGroupFileBytesMax);
  if (!text) return false;
  std::istringstream words(*text);
  for (std::string word; words >> word;)
    if (word == name) return true;
  return false;
}

bool write_value(const std::filesystem::path& file, const std::string& value) {
  const Fd fd(::open(file.c_str(), O_WRONLY | O_CLOEXEC));
  return fd && ::write(fd.get(), value.data(), value.size()) == static_cast<ssize_t>(value.size());
}

// "0::/user.slice/session" of /proc/self/cgroup, as a path below the mount.
std::optional<std::filesystem::path> own_group(const std::filesystem::path& file) {
  constexpr std::string_view kPrefix = "0::/";
  const auto text = read_file(file, kGroupFileBytesMax);
  if (!text) return std::nullopt;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(kPrefix) && line.find("/..") == std::string::npos) return line.substr(kPrefix.size());
  return std::nullopt;
}

}  // namespace

std::optional<ControlGroups> ControlGroups::make(const std::filesystem::path& mount,
                                                 const std::filesystem::path& own_group_file) {
  static std::atomic<unsigned> folders_made = 0;  // by this process, for their names
  auto group = own_group(own_group_file);
  if (!group) return std::nullopt;
  while (!group->empty()) {
    group = group->parent_path();  // not the group itself: a group with processes cannot delegate controllers
    const auto candidate = mount / *group;
    if (!has_word(candidate / "cgroup.subtree_control", "memory") ||
        !has_word(candidate / "cgroup.subtree_control", "pids"))
      continue;
    const auto folder = candidate / fmt::format("echoline-sandbox-{}-{}", ::getpid(), folders_made++);
    if (::mkdir(folder.c_str(), 0755) != 0) continue;
    ControlGroups groups(folder);
    if (write_value(folder / "cgroup.subtree_control", "+memory +pids")) return groups;
  }
  return std::nullopt;
}

ControlGroups::ControlGroups(ControlGroups&& other) noexcept
    : folder_(std::exchange(other.folder_, {})), groups_made_(other.groups_made_) {}

ControlGroups::~ControlGroups() {
  if (!folder_.empty()) ::rmdir(folder_.c_str());
}

std::optional<ControlGroups::Group> ControlGroups::make_group(const Limits& limits) {
  Group group{.folder = folder_ / std::to_string(groups_made_++), .procs = {}};
  if (::mkdir(group.folder.c_str(), 0755) != 0) return std::nullopt;
  write_value(group.folder / "memory.swap.max", "0");   // the file is missing without swap
  write_value(group.folder / "memory.oom.group", "1");  // above the limit, the kernel kills all its processes
  // The kernel's memory limit is a quarter higher than the one checked by UsageMeter, which can report the amount used.
  const bool limits_set =
      write_value(group.folder / "memory.max", std::to_string(limits.memory.count + limits.memory.count / 4)) &&
      write_value(group.folder / "pids.max", std::to_string(limits.processes + kBubblewrapProcesses));
  group.procs = Fd(::open((group.folder / "cgroup.procs").c_str(), O_WRONLY | O_CLOEXEC));
  if (limits_set && group.procs) return group;
  remove(group);
  return std::nullopt;
}

bool ControlGroups::ran_out_of_memory(const Group& group) {
  const auto text = read_file(group.folder / "memory.events", kGroupFileBytesMax);
  if (!text) return false;
  std::istringstream words(*text);
  std::string name;
  std::uint64_t count = 0;
  while (words >> name >> count)
    if (name == "oom_kill" && count > 0) return true;
  return false;
}

void ControlGroups::remove(const Group& group) { ::rmdir(group.folder.c_str()); }

}  // namespace echoline::sandbox
