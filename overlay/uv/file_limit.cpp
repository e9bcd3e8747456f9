// Raises the limit on open files. Called at the start of a node.
#include "overlay/uv/file_limit.hpp"

#include <sys/resource.h>

#include <algorithm>

namespace echoline::overlay {
namespace {

constexpr rlim_t kFilesMax = 1u << 20;       // more are of no use
constexpr std::size_t kFilesUnknown = 1024;  // the usual limit, if the system does not tell it

}  // namespace

std::size_t raise_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kFilesUnknown;
  const rlim_t wanted = std::min(limit.rlim_max, std::max(limit.rlim_cur, kFilesMax));
  if (rlimit raised{wanted, limit.rlim_max}; wanted > limit.rlim_cur && ::setrlimit(RLIMIT_NOFILE, &raised) == 0)
    limit.rlim_cur = wanted;
  return static_cast<std::size_t>(std::min(limit.rlim_cur, kFilesMax));
}

}  // namespace echoline::overlay
