// Locks files so that this program reads none while a delta is applied to it in place. Internal to this folder.
#pragma once
#include <filesystem>
#include <memory>
#include <string_view>
#include <vector>

#include "base/files.hpp"
#include "base/result.hpp"

namespace echoline::delta {

enum class LockMode { kShared, kExclusive };

// Open files with locks. Other processes, and other objects of this class, cannot take conflicting locks.
class LockedFiles {
 public:
  // Does not wait, but returns kUnavailable if another process holds a lock. Exclusively locked files are open for
  // writing and must not be symbolic links. Shared locks are left out if the file system has no locks.
  static Result<std::shared_ptr<LockedFiles>> lock(const std::vector<std::filesystem::path>& files, LockMode mode,
                                                   std::string_view operation);
  int fd(std::size_t file) const { return files_.at(file)->get(); }

 private:
  std::vector<std::unique_ptr<Descriptor>> files_;
};

}  // namespace echoline::delta
