// A reader sees whole transactions of the file while a writer has it open, and does not change it.
#include "replay_buffer/stored.hpp"

#include <sys/wait.h>

#include <array>
#include <csignal>
#include <fstream>
#include <set>
#include <sstream>

#include "tests/replay_buffer/fixtures.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::uint32_t kGroupSize = 3, kBudget = 2;

std::vector<StoredTrajectory> read_all(StoredBuffer& stored, std::uint64_t newest_max = 0) {
  std::vector<StoredTrajectory> read;
  const auto keep = [&](StoredTrajectory trajectory) -> Status { return read.push_back(std::move(trajectory)), ok(); };
  EXPECT_EQ(must(stored.each(newest_max, keep)), 0u);
  return read;
}

TEST(Stored, HasAddedGroupsAndTheirFate) {
  const TemporaryFolder folder;
  auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroupSize, kBudget)));
  for (std::uint64_t group : {7, 3, 5}) must(buffer->add(group_of(group, 1, kGroupSize)));
  must(buffer->consume(1, std::vector{GroupId{3}}));
  const auto file_bytes_before = std::filesystem::file_size(folder.file());
  auto stored = must(StoredBuffer::open(folder.file()));
  const auto trajectories = read_all(*stored);
  ASSERT_EQ(trajectories.size(), 9u) << "the learner still has the file open";
  EXPECT_EQ(trajectories[0].trajectory.group(), 3u);
  EXPECT_EQ(trajectories[0].trajectory.SerializeAsString(), group_of(3, 1, kGroupSize)[0].SerializeAsString());
  EXPECT_EQ(trajectories[0].consumed_step, 1u);
  EXPECT_EQ(trajectories[3].trajectory.group(), 5u);
  EXPECT_FALSE(trajectories[3].consumed_step);
  EXPECT_EQ(read_all(*stored, 3).front().trajectory.group(), 5u) << "the newest";
  must(buffer->prune(5));
  const StoredCounts counts = must(must(StoredBuffer::open(folder.file()))->counts());
  EXPECT_EQ(counts.trajectories, 6u);
  EXPECT_EQ(counts.pruned, 3u);
  EXPECT_EQ(counts.group_size, kGroupSize);
  EXPECT_EQ(read_all(*stored).size(), 9u) << "an open reader keeps its view";
  EXPECT_GE(std::filesystem::file_size(folder.file()), file_bytes_before);
}

TEST(Stored, LeavesNothingBehindAndChangesNothing) {
  const TemporaryFolder folder;
  const auto scratch = folder.file().parent_path() / "scratch";
  std::filesystem::create_directories(scratch);
  must(must(ReplayBuffer::open(folder.file(), options_for(kGroupSize, kBudget)))->add(group_of(1, 1, kGroupSize)));
  const auto read_file = [&] {
    std::stringstream bytes;
    bytes << std::ifstream(folder.file(), std::ios::binary).rdbuf();
    return bytes.str();
  };
  const std::string content_before = read_file();
  {
    const auto stored = must(StoredBuffer::open(folder.file(), scratch));
    EXPECT_TRUE(std::filesystem::is_empty(scratch)) << "so nothing is left, however the reader ends";
    EXPECT_EQ(read_all(*stored).size(), 3u);
  }
  EXPECT_TRUE(std::filesystem::is_empty(scratch));
  EXPECT_EQ(read_file(), content_before);
}

TEST(Stored, RefusesOtherFiles) {
  const TemporaryFolder folder;
  EXPECT_EQ(StoredBuffer::open(folder.file()).error().code, Code::kNotFound);
  std::ofstream(folder.file()) << std::string(10'000, 'x');
  EXPECT_EQ(StoredBuffer::open(folder.file()).error().code, Code::kCorrupt);
}

// The writer's log restarts many times. Each copy holds whole groups, more than the copy before. The test ends with the
// writer killed.
TEST(Stored, HoldsWholeTransactionsWhileALearnerWrites) {
  const TemporaryFolder folder;
  { must(ReplayBuffer::open(folder.file(), options_for(kGroupSize, kBudget))); }
  const pid_t writer = ::fork();
  if (writer == 0) {
    auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroupSize, kBudget)));
    for (std::uint64_t group = 0;; ++group) {
      auto trajectories = group_of(group, 1, kGroupSize);
      for (auto& trajectory : trajectories)
        trajectory.set_text(std::string(5'000, static_cast<char>('a' + group % 26)));
      if (!buffer->add(trajectories)) ::_exit(1);
    }
  }
  std::size_t trajectories_before = 0, copies = 0;
  std::set<std::string> logs;  // by their salts
  while ((copies < 5 || logs.size() < 3) && copies < 500) {
    std::array<char, 32> header{};
    std::ifstream(folder.file().string() + "-wal", std::ios::binary).read(header.data(), header.size());
    logs.emplace(header.data(), header.size());
    auto stored = StoredBuffer::open(folder.file());
    if (!stored) {
      EXPECT_EQ(stored.error().code, Code::kUnavailable) << stored.error().message();
      continue;
    }
    const auto read = read_all(**stored);
    EXPECT_EQ(read.size() % kGroupSize, 0u) << "groups are added in one transaction";
    EXPECT_GE(read.size(), trajectories_before);
    for (const StoredTrajectory& one : read)
      EXPECT_EQ(one.trajectory.text(), std::string(5'000, static_cast<char>('a' + one.trajectory.group() % 26)));
    trajectories_before = read.size();
    ++copies;
  }
  ::kill(writer, SIGKILL);
  int status = 0;
  ::waitpid(writer, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_GE(read_all(*must(StoredBuffer::open(folder.file()))).size(), trajectories_before);
}

}  // namespace
}  // namespace echoline::replay_buffer
