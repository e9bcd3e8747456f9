// The replay buffer: idempotent adds, whole fresh groups in order, consumption, rewind, pruning, limits, bad files.
#include <sqlite3.h>

#include <fstream>
#include <thread>

#include "base/random.hpp"
#include "tests/replay_buffer/fixtures.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::uint32_t kGroupSize = 3, kBudget = 2;  // kBudget: S, in learner steps

class Buffer : public testing::Test {
 protected:
  void SetUp() override { reopen(options_for(kGroupSize, kBudget)); }
  void reopen(const BufferOptions& options) {
    buffer_.reset();
    buffer_ = must(ReplayBuffer::open(folder_.file(), options));
  }
  AddOutcome add(std::uint64_t group, std::uint64_t version) {
    return must(buffer_->add(group_of(group, version, kGroupSize)));
  }
  std::vector<std::uint64_t> sampled(std::uint64_t step, std::uint32_t groups) {
    std::vector<std::uint64_t> group_ids;
    const auto batch = must(buffer_->sample(step, groups));
    if (batch)
      for (const Group& group : batch->groups) group_ids.push_back(group.id.value);
    return group_ids;
  }
  using Ids = std::vector<std::uint64_t>;
  TemporaryFolder folder_;
  std::unique_ptr<ReplayBuffer> buffer_;
};

TEST_F(Buffer, StoresOnceAndGivesBackTheSameBytes) {
  const auto group = group_of(5, 1, kGroupSize);
  EXPECT_EQ(must(buffer_->add(group)).stored, 3u);
  reopen(options_for(kGroupSize, kBudget));
  const AddOutcome again = must(buffer_->add(group));
  EXPECT_EQ(again.stored, 0u);
  EXPECT_EQ(again.duplicates, 3u);
  const auto batch = must(buffer_->sample(1, 1));
  ASSERT_TRUE(batch);
  EXPECT_EQ(batch->step, 1u);
  ASSERT_EQ(batch->groups[0].trajectories.size(), 3u);
  for (std::uint32_t member = 0; member < kGroupSize; ++member)
    EXPECT_EQ(batch->groups[0].trajectories[member].SerializeAsString(), group[member].SerializeAsString());
  EXPECT_EQ(must(buffer_->counts(1)).stored, 3u);
}

TEST_F(Buffer, SamplesWholeGroupsOnly) {
  auto group = group_of(1, 0, kGroupSize);
  const Trajectory last = group.back();
  group.pop_back();
  must(buffer_->add(group));
  EXPECT_EQ(sampled(0, 1), Ids{});
  EXPECT_EQ(must(buffer_->counts(0)).incomplete_groups, 1u);
  EXPECT_FALSE(buffer_->consume(0, std::vector{GroupId{1}}));
  must(buffer_->add(std::vector{last}));
  EXPECT_EQ(sampled(0, 1), Ids{1});
  EXPECT_EQ(sampled(0, 2), Ids{});  // no batch rather than a smaller one
  EXPECT_EQ(buffer_->sample(0, 0).error().code, Code::kInvalid);
}

TEST_F(Buffer, OldestVersionFirstThenGroupIdAndOnlyFreshOnes) {
  add(9, 3), add(2, 4), add(7, 3), add(1, 5), add(4, 1);
  EXPECT_EQ(sampled(3, 5), (Ids{4, 7, 9, 2, 1}));
  EXPECT_EQ(sampled(5, 4), (Ids{7, 9, 2, 1}));  // 5 - 3 <= 2, 5 - 1 > 2
  EXPECT_EQ(sampled(5, 5), Ids{});
  EXPECT_EQ(sampled(6, 2), (Ids{2, 1}));
  EXPECT_EQ(sampled(0, 5), (Ids{4, 7, 9, 2, 1}));  // newer than the step: fresh
}

TEST_F(Buffer, TheOldestTokenDecides) {
  auto group = group_of(1, 6, kGroupSize);
  group[1].clear_spans();
  for (const auto& [begin, end, version] : {std::tuple{0u, 1u, 3u}, std::tuple{1u, 3u, 6u}}) {
    auto* span = group[1].add_spans();
    span->set_begin(begin), span->set_end(end), span->set_version(version);
  }
  must(buffer_->add(group));
  EXPECT_EQ(sampled(6, 1), Ids{});
  EXPECT_EQ(must(buffer_->sample(5, 1))->groups[0].version, Version{3});
}

TEST_F(Buffer, ConsumedAtMostOnce) {
  add(1, 0), add(2, 0);
  must(buffer_->consume(0, std::vector{GroupId{1}}));
  must(buffer_->consume(0, std::vector{GroupId{1}}));  // the same again
  EXPECT_EQ(sampled(0, 1), Ids{2});
  const auto again = buffer_->consume(1, std::vector{GroupId{2}, GroupId{1}});
  ASSERT_FALSE(again);
  EXPECT_NE(again.error().detail.find("group 1 cannot be consumed at step 1: it was consumed at step 0"),
            std::string::npos)
      << again.error().detail;
  EXPECT_EQ(sampled(0, 1), Ids{2});  // the refused call consumed neither
  EXPECT_EQ(must(buffer_->counts(0)).consumed, 3u);
  EXPECT_FALSE(buffer_->consume(1, std::vector{GroupId{77}}));
  EXPECT_FALSE(buffer_->consume(9, std::vector{GroupId{2}}));  // too stale by then
}

TEST_F(Buffer, RewindReturnsGroupsOfLaterSteps) {
  for (std::uint64_t group = 0; group < 6; ++group) add(group, 4);
  for (std::uint64_t step = 4; step < 7; ++step) must(buffer_->consume(step, std::vector{GroupId{step - 4}}));
  EXPECT_EQ(must(buffer_->drop_stale(7)), 9u);
  EXPECT_EQ(must(buffer_->counts(7)).rejected.at("stale"), 9u);
  must(buffer_->rewind(5));  // a checkpoint taken after consume(4)
  reopen(options_for(kGroupSize, kBudget));
  EXPECT_EQ(sampled(5, 5), (Ids{1, 2, 3, 4, 5}));
  EXPECT_EQ(must(buffer_->counts(5)).consumed, 3u);
  EXPECT_EQ(must(buffer_->counts(5)).rejected.count("stale"), 0u);
}

TEST_F(Buffer, PruneKeepsTheCounts) {
  for (std::uint64_t group = 0; group < 5; ++group) add(group, group);
  must(buffer_->consume(0, std::vector{GroupId{0}}));
  EXPECT_EQ(must(buffer_->drop_stale(4)), 3u);  // group 1
  must(buffer_->consume(4, std::vector{GroupId{2}}));
  EXPECT_EQ(must(buffer_->prune(4)), 3u);
  EXPECT_EQ(must(buffer_->prune(4)), 0u);
  EXPECT_EQ(must(buffer_->prune(5)), 6u);
  for (int i = 0; i < 2; ++i) {
    const Counts counts = must(buffer_->counts(4));
    EXPECT_EQ(counts.stored, 6u);
    EXPECT_EQ(counts.consumed, 6u);
    EXPECT_EQ(counts.rejected.at("stale"), 3u);
    EXPECT_EQ(counts.admissible_groups, 2u);
    EXPECT_EQ(counts.admissible_trajectories, 6u);
    reopen(options_for(kGroupSize, kBudget));
  }
}

TEST_F(Buffer, BadInputChangesNothing) {
  add(1, 0);
  auto group = group_of(2, 0, kGroupSize);
  group[2].set_reward(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(buffer_->add(group).error().code, Code::kInvalid);
  group = group_of(2, 0, kGroupSize);
  group[2].set_member(kGroupSize);
  EXPECT_EQ(buffer_->add(group).error().code, Code::kInvalid);
  group = group_of(2, 0, kGroupSize);
  group[2].set_id("1/0");  // an id that a trajectory of group 1 has
  EXPECT_EQ(buffer_->add(group).error().code, Code::kInvalid);
  group = group_of(1, 0, kGroupSize);
  group[0].set_id("other");  // another id for a member that group 1 has
  EXPECT_EQ(buffer_->add(group).error().code, Code::kInvalid);
  EXPECT_EQ(must(buffer_->counts(0)).stored, 3u);
  EXPECT_EQ(must(buffer_->counts(0)).incomplete_groups, 0u);
  EXPECT_EQ(must(buffer_->add({})).stored, 0u);
}

TEST_F(Buffer, LimitsHoldAndPruneMakesRoom) {
  BufferOptions options = options_for(kGroupSize, kBudget);
  options.rows_max = 6;
  reopen(options);
  add(1, 0), add(2, 0);
  const auto full = buffer_->add(group_of(3, 0, kGroupSize));
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().code, Code::kExhausted);
  EXPECT_EQ(must(buffer_->add(group_of(2, 0, kGroupSize))).duplicates, 3u);  // duplicates need no room
  must(buffer_->consume(0, std::vector{GroupId{1}}));
  must(buffer_->prune(1));
  add(3, 0);
  EXPECT_FALSE(buffer_->add(group_of(4, 0, kGroupSize)));
  options.rows_max = 100;
  options.bytes_max = Bytes{group_of(1, 0, 1)[0].ByteSizeLong() * 8};
  reopen(options);
  EXPECT_EQ(buffer_->add(group_of(4, 0, kGroupSize)).error().code, Code::kExhausted);
  must(buffer_->add(group_of(4, 0, 1)));
}

TEST_F(Buffer, RefusesOtherFilesWithAdvice) {
  const auto open_with = [&](std::uint32_t group_size) {
    return ReplayBuffer::open(folder_.file(), options_for(group_size, kBudget));
  };
  EXPECT_EQ(open_with(kGroupSize).error().code, Code::kUnavailable);  // open already
  add(1, 0);
  buffer_.reset();
  EXPECT_NE(open_with(4).error().message().find("holds groups of 3, the run asks for 4"), std::string::npos);
  const auto execute = [&](const char* sql) {
    sqlite3* db = nullptr;
    ASSERT_EQ(sqlite3_open(folder_.file().c_str(), &db), SQLITE_OK);
    ASSERT_EQ(sqlite3_exec(db, sql, nullptr, nullptr, nullptr), SQLITE_OK);
    sqlite3_close(db);
  };
  execute("PRAGMA user_version = 7");
  EXPECT_NE(open_with(kGroupSize).error().message().find("schema version 7, this release reads 4"), std::string::npos);
  execute("PRAGMA application_id = 1");
  EXPECT_NE(open_with(kGroupSize).error().message().find("another program"), std::string::npos);
  EXPECT_EQ(ReplayBuffer::open("/nowhere/at/all", options_for(1, 1)).error().code, Code::kIo);
  EXPECT_EQ(ReplayBuffer::open(folder_.file(), options_for(0, 1)).error().code, Code::kInvalid);
}

TEST_F(Buffer, AGroupThatDoesNotReadBackIsDroppedAndNotTheRun) {
  for (std::uint64_t group = 1; group <= 3; ++group) add(group, 0);
  buffer_.reset();
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(folder_.file().c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db, "UPDATE trajectory SET body = x'ffff' WHERE group_id = 1 AND member = 1", nullptr, nullptr,
                         nullptr),
            SQLITE_OK);
  sqlite3_close(db);
  buffer_ = must(ReplayBuffer::open(folder_.file(), options_for(kGroupSize, kBudget)));
  const auto batch = must(buffer_->sample(0, 2));
  ASSERT_TRUE(batch);
  EXPECT_EQ(batch->ids(), (std::vector{GroupId{2}, GroupId{3}}));
  EXPECT_EQ(must(buffer_->counts(0)).rejected.at("unreadable"), std::uint64_t{kGroupSize});
  EXPECT_EQ(must(buffer_->counts(0)).stored, 2u * kGroupSize);
  must(buffer_->discard(GroupId{3}, "not trainable"));
  EXPECT_FALSE(must(buffer_->sample(0, 2)));
  EXPECT_EQ(must(buffer_->counts(0)).rejected.at("not trainable"), std::uint64_t{kGroupSize});
}

TEST_F(Buffer, CorruptFilesAreErrorsNeverCrashes) {
  for (std::uint64_t group = 0; group < 40; ++group) add(group, 0);
  buffer_.reset();
  std::string intact_bytes;
  {
    std::ifstream file(folder_.file(), std::ios::binary);
    intact_bytes.assign(std::istreambuf_iterator<char>(file), {});
  }
  const auto open_content = [&](const std::string& content) {
    std::ofstream(folder_.file(), std::ios::binary | std::ios::trunc) << content;
    return ReplayBuffer::open(folder_.file(), options_for(kGroupSize, kBudget));
  };
  const auto garbage = open_content(std::string(8192, 'x'));
  ASSERT_FALSE(garbage);
  EXPECT_EQ(garbage.error().code, Code::kCorrupt);
  EXPECT_NE(garbage.error().message().find("move it"), std::string::npos);
  EXPECT_EQ(open_content(intact_bytes.substr(0, intact_bytes.size() / 2)).error().code, Code::kCorrupt);
  Random random(5);
  int refused = 0;
  for (int i = 0; i < 60; ++i) {
    std::string spoiled = intact_bytes;
    for (int spoiled_bytes = 0; spoiled_bytes < 40; ++spoiled_bytes)
      spoiled[random.below(spoiled.size())] = static_cast<char>(random.below(256));
    auto buffer = open_content(spoiled);
    if (!buffer) {
      ++refused;
      EXPECT_TRUE(buffer.error().code == Code::kCorrupt || buffer.error().code == Code::kInvalid ||
                  buffer.error().code == Code::kIo)
          << buffer.error().message();
      continue;
    }
    (void)(*buffer)->sample(0, 40).has_value();  // any result will do, if it does not crash
  }
  EXPECT_GT(refused, 10);
}

TEST_F(Buffer, OneThreadOwnsIt) {
  add(1, 0);
  EXPECT_DEATH(std::thread([&] { (void)buffer_->counts(0).has_value(); }).join(), "belongs to one thread");
}

}  // namespace
}  // namespace echoline::replay_buffer
