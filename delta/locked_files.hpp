// Files under a lock, so that none is read while a delta is applied to it in place, by this program at least. Internal
// to this folder.
#pragma once
#include <filesystem>
#include <memory>
#include <string_view>
#include <vector>

#include "base/files.hpp"
#include "base/result.hpp"

namespace echoline::delta {

enum class LockMode { kShared, kExclusive };

// Open files that other processes, and other objects of this class, cannot lock in a way that does not go with this
// one.
class LockedFiles {
 public:
  // Does not wait: kUnavailable when somebody has a lock. Exclusively locked files are open for writing and are no
  // symbolic links. Where the file system has no locks, readers do without.
  static Result<std::shared_ptr<LockedFiles>> take(const std::vector<std::filesystem::path>& files, LockMode mode,
                                                   std::string_view operation);
  int fd(std::size_t file) const { return files_.at(file)->get(); }

 private:
  std::vector<std::unique_ptr<Descriptor>> files_;
};

}  // namespace echoline::delta
