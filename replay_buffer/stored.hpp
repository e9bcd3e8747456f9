// Reads a replay buffer's file while its learner may write it. It reads a copy, so nothing is locked or changed,
// whether a learner runs, has ended or was killed.
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
  std::optional<std::uint64_t> consumed_step;  // the step that was trained on it
  bool stale = false;                          // rejected as too stale
};

struct StoredCounts {
  std::uint64_t trajectories = 0, groups = 0, group_size = 0;
  std::uint64_t pruned = 0;                       // trajectories that were consumed and deleted
  std::map<std::string, std::uint64_t> rejected;  // trajectories by reason; "stale" ones were deleted too
  std::uint64_t set_aside = 0;                    // groups that no worker could generate
};

// Use from one thread.
class Stored {
 public:
  // Copies `file` and its write-ahead log into a new folder below `scratch`, which is removed once opened. Restarts the
  // copy if a learner writes meanwhile: kUnavailable after many tries. kNotFound without the file, kCorrupt and
  // kInvalid as ReplayBuffer::open, kExhausted if the copy does not fit.
  static Result<std::unique_ptr<Stored>> open(
      const std::filesystem::path& file, const std::filesystem::path& scratch = std::filesystem::temp_directory_path());
  ~Stored();

  Result<StoredCounts> counts();
  // Calls `each` for the newest `most` trajectories (0: all) by group and member. An error of `each` ends it. Returns
  // the number of unreadable ones.
  Result<std::uint64_t> each(std::uint64_t most, const std::function<Status(StoredTrajectory)>& each);

 private:
  Stored() = default;
  std::filesystem::path folder_;  // of the copy
  std::unique_ptr<Database> database_;
};

}  // namespace echoline::replay_buffer
