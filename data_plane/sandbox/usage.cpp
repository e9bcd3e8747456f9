// Implements UsageMeter for sandboxed_program.cpp.
#include "data_plane/sandbox/usage.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <charconv>

namespace echoline::sandbox {
namespace {

constexpr std::uint64_t kInodeBytes = 1024;  // the kernel's cost per file of /tmp, about

struct CloseFolder {
  void operator()(DIR* folder) const { ::closedir(folder); }
};

// Reads the start of a file of /proc; a short file is read whole.
std::string_view read_start(int folder, const char* name, char* block, std::size_t size) {
  const Fd file(::openat(folder, name, O_RDONLY | O_CLOEXEC));
  if (!file) return {};
  const ssize_t bytes_read = ::read(file.get(), block, size);
  return bytes_read > 0 ? std::string_view(block, static_cast<std::size_t>(bytes_read)) : std::string_view();
}

// Removes the text up to the end of its first number, and returns that number.
std::uint64_t next_number(std::string_view& text) {
  std::size_t begin = 0;
  while (begin < text.size() && (text[begin] < '0' || text[begin] > '9')) ++begin;
  std::uint64_t value = 0;
  const auto end = std::from_chars(text.data() + begin, text.data() + text.size(), value).ptr;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

// Anonymous memory of the process in bytes. Pages that processes share after a fork count for each of them.
std::uint64_t anonymous_bytes(int process, std::uint64_t page_bytes) {
  char block[256];
  std::string_view text = read_start(process, "statm", block, sizeof block);
  next_number(text);  // skips the size of the address space
  const std::uint64_t resident = next_number(text), shared = next_number(text);
  return resident > shared ? (resident - shared) * page_bytes : 0;
}

// Anonymous memory of the process in bytes, where a shared page counts by 1 / number of the processes that share it
// (proportional set size).
std::uint64_t proportional_anonymous_bytes(int process) {
  char block[4096];
  std::string_view text = read_start(process, "smaps_rollup", block, sizeof block);
  const auto line = text.find("\nPss_Anon:");
  if (line == std::string_view::npos)
    return anonymous_bytes(process, static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)));
  text.remove_prefix(line);
  return next_number(text) * 1024;  // the file has KiB
}

// CPU ticks of the process and of its children that ended.
std::uint64_t cpu_ticks(int process) {
  char block[1024];
  std::string_view text = read_start(process, "stat", block, sizeof block);
  const auto name_end = text.rfind(')');  // the name may contain spaces and brackets
  if (name_end == std::string_view::npos) return 0;
  text.remove_prefix(name_end);
  std::uint64_t sum = 0;
  // Fields 14 to 17 of /proc/<pid>/stat are utime, stime, cutime and cstime.
  // The first number after the name is field 4, because field 3 is a letter. A negative field is read without its sign.
  constexpr int kFirstNumber = 4, kFirstTime = 14, kLastTime = 17;
  for (int field = kFirstNumber; field <= kLastTime; ++field) {
    const std::uint64_t value = next_number(text);
    if (field >= kFirstTime) sum += value;
  }
  return sum;
}

}  // namespace

bool UsageMeter::open() {
  if (processes_) return true;
  Fd processes(::open(fmt::format("/proc/{}/root/proc", first_pid_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  Fd scratch(::open(fmt::format("/proc/{}/root/tmp", first_pid_).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  struct stat inside {
  }, outside{};
  if (!processes || !scratch || ::fstat(processes.get(), &inside) != 0 || ::stat("/proc", &outside) != 0) return false;
  if (inside.st_dev == outside.st_dev) return false;  // the process still has this machine's root
  processes_ = std::move(processes);
  scratch_ = std::move(scratch);
  return true;
}

std::optional<Usage> UsageMeter::measure(Bytes exact_above) {
  if (!open()) return std::nullopt;
  const int listing_fd = ::openat(processes_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, CloseFolder> folder(listing_fd >= 0 ? ::fdopendir(listing_fd) : nullptr);
  struct statvfs scratch {};
  if (!folder || ::fstatvfs(scratch_.get(), &scratch) != 0) return std::nullopt;
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto ticks_per_second = static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK));
  const std::uint64_t scratch_bytes =
      (scratch.f_blocks - scratch.f_bfree) * scratch.f_frsize + (scratch.f_files - scratch.f_ffree) * kInodeBytes;
  std::uint64_t memory_bytes = scratch_bytes, proportional_memory_bytes = scratch_bytes, all_ticks = 0;
  std::vector<Fd> processes;
  while (const dirent* entry = ::readdir(folder.get())) {
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    Fd process(::openat(processes_.get(), entry->d_name, O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!process) continue;
    memory_bytes += anonymous_bytes(process.get(), page_bytes);
    all_ticks += cpu_ticks(process.get());
    processes.push_back(std::move(process));
  }
  if (memory_bytes > exact_above.count)
    for (const Fd& process : processes) proportional_memory_bytes += proportional_anonymous_bytes(process.get());
  return Usage{.memory = {memory_bytes > exact_above.count ? proportional_memory_bytes : memory_bytes},
               .cpu = std::chrono::nanoseconds(std::chrono::seconds(1)) / ticks_per_second * all_ticks};
}

}  // namespace echoline::sandbox
