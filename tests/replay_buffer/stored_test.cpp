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

constexpr std::uint32_t kGroup = 3;

std::vector<StoredTrajectory> all_of(StoredBuffer& stored, std::uint64_t most = 0) {
  std::vector<StoredTrajectory> all;
  EXPECT_EQ(must(stored.each(most, [&](StoredTrajectory t) -> Status { return all.push_back(std::move(t)), ok(); })),
            0u);
  return all;
}

TEST(Stored, HasAddedGroupsAndTheirFate) {
  const TemporaryFolder folder;
  auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroup, 2)));
  for (std::uint64_t group : {7, 3, 5}) must(buffer->add(group_of(group, 1, kGroup)));
  must(buffer->consume(1, std::vector{GroupId{3}}));
  const auto before = std::filesystem::file_size(folder.file());
  auto stored = must(StoredBuffer::open(folder.file()));
  const auto all = all_of(*stored);
  ASSERT_EQ(all.size(), 9u) << "of a learner that still has it open";
  EXPECT_EQ(all[0].trajectory.group(), 3u);
  EXPECT_EQ(all[0].trajectory.SerializeAsString(), group_of(3, 1, kGroup)[0].SerializeAsString());
  EXPECT_EQ(all[0].consumed_step, 1u);
  EXPECT_EQ(all[3].trajectory.group(), 5u);
  EXPECT_FALSE(all[3].consumed_step);
  EXPECT_EQ(all_of(*stored, 3).front().trajectory.group(), 5u) << "the newest";
  must(buffer->prune(5));
  const StoredCounts counts = must(must(StoredBuffer::open(folder.file()))->counts());
  EXPECT_EQ(counts.trajectories, 6u);
  EXPECT_EQ(counts.pruned, 3u);
  EXPECT_EQ(counts.group_size, kGroup);
  EXPECT_EQ(all_of(*stored).size(), 9u) << "an open reader keeps its view";
  EXPECT_GE(std::filesystem::file_size(folder.file()), before);
}

TEST(Stored, LeavesNothingBehindAndChangesNothing) {
  const TemporaryFolder folder;
  const auto scratch = folder.file().parent_path() / "scratch";
  std::filesystem::create_directories(scratch);
  must(must(ReplayBuffer::open(folder.file(), options_for(kGroup, 2)))->add(group_of(1, 1, kGroup)));
  const auto text = [&] {
    std::stringstream bytes;
    bytes << std::ifstream(folder.file(), std::ios::binary).rdbuf();
    return bytes.str();
  };
  const std::string before = text();
  {
    const auto stored = must(StoredBuffer::open(folder.file(), scratch));
    EXPECT_TRUE(std::filesystem::is_empty(scratch)) << "however the reader ends";
    EXPECT_EQ(all_of(*stored).size(), 3u);
  }
  EXPECT_TRUE(std::filesystem::is_empty(scratch));
  EXPECT_EQ(text(), before);
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
  { must(ReplayBuffer::open(folder.file(), options_for(kGroup, 2))); }
  const pid_t writer = ::fork();
  if (writer == 0) {
    auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroup, 2)));
    for (std::uint64_t group = 0;; ++group) {
      auto trajectories = group_of(group, 1, kGroup);
      for (auto& t : trajectories) t.set_text(std::string(5'000, static_cast<char>('a' + group % 26)));
      if (!buffer->add(trajectories)) ::_exit(1);
    }
  }
  std::size_t last = 0, copies = 0;
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
    const auto all = all_of(**stored);
    EXPECT_EQ(all.size() % kGroup, 0u) << "groups are added in one transaction";
    EXPECT_GE(all.size(), last);
    for (const StoredTrajectory& t : all)
      EXPECT_EQ(t.trajectory.text(), std::string(5'000, static_cast<char>('a' + t.trajectory.group() % 26)));
    last = all.size();
    ++copies;
  }
  ::kill(writer, SIGKILL);
  int status = 0;
  ::waitpid(writer, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_GE(all_of(*must(StoredBuffer::open(folder.file()))).size(), last);
}

}  // namespace
}  // namespace echoline::replay_buffer
