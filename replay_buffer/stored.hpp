// What a replay buffer's file holds, read beside the learner that writes it: from a copy that is made for it, so
// nothing is locked and nothing changes, whether a learner runs, has ended or was killed.
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
  std::optional<std::uint64_t> consumed_step;  // which step was trained on it
  bool stale = false;                          // it was found too stale for any
};

struct StoredCounts {
  std::uint64_t trajectories = 0, groups = 0, group_size = 0;
  std::uint64_t pruned = 0;                       // trajectories that were trained on and deleted since
  std::map<std::string, std::uint64_t> rejected;  // trajectories by reason; "stale" ones were deleted as well
  std::uint64_t set_aside = 0;                    // groups that nobody could generate
};

// One thread.
class Stored {
 public:
  // Copies `file` with its write-ahead log into a folder of its own below `scratch`, which is gone when it has been
  // opened. A learner that writes meanwhile makes it start again: kUnavailable after many tries. kNotFound without the
  // file, kCorrupt and kInvalid as ReplayBuffer::open, kExhausted when the copy does not fit.
  static Result<std::unique_ptr<Stored>> open(
      const std::filesystem::path& file, const std::filesystem::path& scratch = std::filesystem::temp_directory_path());
  ~Stored();

  Result<StoredCounts> counts();
  // The newest `most` trajectories (0: all) by group and member. An error of `each` ends it. How many could not be
  // read.
  Result<std::uint64_t> each(std::uint64_t most, const std::function<Status(StoredTrajectory)>& each);

 private:
  Stored() = default;
  std::filesystem::path folder_;  // of the copy
  std::unique_ptr<Database> database_;
};

}  // namespace echoline::replay_buffer
