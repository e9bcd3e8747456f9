#include "tests/bench/measure.hpp"

#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

namespace echoline::bench {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif
#else
constexpr bool kSanitized = false;
#endif

// A line of /proc/self/status like "VmHWM:   2144 kB", in bytes.
std::optional<std::uint64_t> status_bytes(const std::string& key) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(key + ":")) return std::stoull(line.substr(key.size() + 1)) * 1024;
  return std::nullopt;
}

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::optional<std::uint64_t> peak_bytes_beyond_now(const std::function<void()>& work) {
  if (kSanitized) return std::nullopt;
  int ends[2];
  if (pipe(ends) != 0) return std::nullopt;
  const pid_t child = fork();
  if (child < 0) {
    close(ends[0]);
    close(ends[1]);
    return std::nullopt;
  }
  if (child == 0) {
    malloc_trim(0);  // or freed pages that are still resident would be used again unseen
    // The high-water mark of a forked process starts at its parent's present size; "5" lowers it to its own.
    std::ofstream("/proc/self/clear_refs") << "5";
    const auto before = status_bytes("VmHWM");
    work();
    const auto after = status_bytes("VmHWM");
    const std::int64_t rise = before && after ? static_cast<std::int64_t>(*after - *before) : -1;
    _exit(write(ends[1], &rise, sizeof rise) == sizeof rise ? 0 : 1);
  }
  close(ends[1]);
  std::int64_t rise = -1;
  const bool complete = read(ends[0], &rise, sizeof rise) == sizeof rise;
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!complete || rise < 0) return std::nullopt;
  return static_cast<std::uint64_t>(rise);
}

void copy_dense(const delta::StateView& from, const std::vector<std::span<std::byte>>& to, unsigned threads) {
  const auto part = [&](unsigned self) {
    for (std::size_t t = 0; t < from.size(); ++t) {
      const std::size_t size = from[t].bytes.size();
      const std::size_t first = size / threads * self;
      const std::size_t last = self + 1 == threads ? size : first + size / threads;
      if (last > first) std::memcpy(to[t].data() + first, from[t].bytes.data() + first, last - first);
    }
  };
  std::vector<std::jthread> helpers;
  for (unsigned t = 1; t < threads; ++t) helpers.emplace_back(part, t);
  part(0);
}

}  // namespace echoline::bench
