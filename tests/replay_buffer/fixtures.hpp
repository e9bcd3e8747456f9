// Temporary files, and shortcuts to trajectories, groups and submissions, for the replay buffer's tests.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "replay_buffer/buffer.hpp"
#include "replay_buffer/job_ledger.hpp"
#include "tests/data_plane/trajectories.hpp"

namespace echoline::replay_buffer {

// A folder of this process that is removed after the test. kMemory: in /dev/shm if that exists, for tests that are not
// about durability.
class TemporaryFolder {
 public:
  enum class On { kDisk, kMemory };
  explicit TemporaryFolder(On on = On::kDisk) {
    static int next = 0;
    const bool in_memory = on == On::kMemory && std::filesystem::exists("/dev/shm");
    path_ = (in_memory ? std::filesystem::path("/dev/shm") : std::filesystem::temp_directory_path()) /
            fmt::format("echoline_replay_{}_{}", ::getpid(), next++);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::filesystem::path file() const { return path_ / "replay.sqlite"; }

 private:
  std::filesystem::path path_;
};

// The value, or a test failure that shows the error.
template <class T>
T must(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message());
  return std::move(*result);
}
inline void must(const Status& status) {
  if (!status) throw std::runtime_error(status.error().message());
}

inline BufferOptions options_for(std::uint32_t group_size, std::uint32_t staleness_budget) {
  BufferOptions options;
  options.group_size = group_size;
  options.staleness_budget = staleness_budget;
  return options;
}

// A whole group stored without the ledger; ids are "<group>/<member>".
inline std::vector<Trajectory> group_of(std::uint64_t group, std::uint64_t version, std::uint32_t size) {
  std::vector<Trajectory> trajectories;
  for (std::uint32_t member = 0; member < size; ++member)
    trajectories.push_back(data_plane::sound_trajectory(group, member, version, group));
  return trajectories;
}

// An honest worker's submission for a lease.
inline schema::Submission submission_for(const LeaseRecord& lease) {
  schema::Submission submission;
  submission.set_lease(lease.id.value);
  for (std::uint32_t member = 0; member < lease.rollouts; ++member)
    *submission.add_trajectories() = data_plane::sound_trajectory(
        lease.group.value, member, lease.version.value, lease.id.value, lease.worker.value, lease.policy_digest);
  return submission;
}

}  // namespace echoline::replay_buffer
