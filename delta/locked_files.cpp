// Locks files by flock(); in_place.cpp takes the locks, redo.cpp writes through them.
#include "delta/locked_files.hpp"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>

namespace echoline::delta {

Result<std::shared_ptr<LockedFiles>> LockedFiles::lock(const std::vector<std::filesystem::path>& files, LockMode mode,
                                                       std::string_view operation) {
  const bool is_exclusive = mode == LockMode::kExclusive;
  auto locked = std::make_shared<LockedFiles>();
  for (const std::filesystem::path& file : files) {
    const int fd = ::open(file.c_str(), (is_exclusive ? O_RDWR | O_NOFOLLOW : O_RDONLY) | O_CLOEXEC);
    if (fd < 0) return os_error(operation, file);
    locked->files_.push_back(std::make_unique<Descriptor>(fd));
    if (::flock(fd, (is_exclusive ? LOCK_EX : LOCK_SH) | LOCK_NB) == 0) continue;
    if (errno == EWOULDBLOCK)
      return fail(Code::kUnavailable, operation, "{}: another process {} this file; try again when it has finished",
                  file.string(), is_exclusive ? "reads or changes" : "changes");
    if (is_exclusive) return os_error(operation, file);  // readers do without, for file systems that have no locks
  }
  return locked;
}

}  // namespace echoline::delta
