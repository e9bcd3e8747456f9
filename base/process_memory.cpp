// Reads /proc and malloc's counters, for the status of learner and worker.
#include "base/process_memory.hpp"

#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "base/files.hpp"

namespace echoline {

ProcessMemory process_memory() {
  ProcessMemory memory;
  // "size resident shared ...", in pages
  if (const auto text = read_file("/proc/self/statm", 4096); text) {
    const std::size_t space = text->find(' ');
    std::uint64_t pages = 0;
    if (space != std::string::npos) std::from_chars(text->data() + space + 1, text->data() + text->size(), pages);
    memory.resident = Bytes{pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))};
  }
  struct rusage usage {};
  if (::getrusage(RUSAGE_SELF, &usage) == 0)
    memory.resident_max = Bytes{static_cast<std::uint64_t>(usage.ru_maxrss) * 1024};  // reported in KiB
  memory.resident_max = std::max(memory.resident_max, memory.resident);
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
  const struct mallinfo2 info = ::mallinfo2();
  memory.heap = Bytes{info.uordblks + info.hblkhd};  // in arenas, and mapped singly
#endif
  return memory;
}

}  // namespace echoline
