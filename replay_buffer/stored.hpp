// Reads a replay buffer's file while its learner may write it. The file is copied first, so that nothing is locked or
// changed, whether a learner runs, has ended or was killed.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/result.hpp"
#include "data_plane/trajectory.hpp"

namespace echoline::replay_buffer {

class Database;

struct StoredTrajectory {
  data_plane::Trajectory trajectory;
  std::optional<std::uint64_t> consumed_step;  // the learner step that trained on it
  bool stale = false;                          // rejected as too stale
};

struct StoredCounts {
  std::uint64_t trajectories = 0, groups = 0, group_size = 0;
  std::uint64_t pruned = 0;                       // trajectories that were consumed and deleted
  std::map<std::string, std::uint64_t> rejected;  // trajectories by reason, also those deleted since
  std::uint64_t set_aside = 0;                    // groups that no worker could generate
};

// Use from one thread.
class StoredBuffer {
 public:
  // Copies `file` and its write-ahead log into a new folder below `scratch`, and removes the folder once the copy is
  // open. Copies again if a learner wrote during the copy; kUnavailable after many tries. kNotFound without the file,
  // kCorrupt and kInvalid as ReplayBuffer::open, kExhausted if the copy does not fit.
  static Result<std::unique_ptr<StoredBuffer>> open(
      const std::filesystem::path& file, const std::filesystem::path& scratch = std::filesystem::temp_directory_path());
  ~StoredBuffer();

  Result<StoredCounts> counts();
  // Calls `visit` for those of the newest `newest_max` trajectories (0: all) that were not deleted, ordered by group
  // and member. Ends at the first error of `visit` and returns it. Otherwise returns the number of unreadable
  // trajectories.
  Result<std::uint64_t> each(std::uint64_t newest_max, const std::function<Status(StoredTrajectory)>& visit);

 private:
  StoredBuffer() = default;
  std::filesystem::path folder_;  // of the copy; the destructor removes it if open() failed before
  std::unique_ptr<Database> database_;
};

}  // namespace echoline::replay_buffer
