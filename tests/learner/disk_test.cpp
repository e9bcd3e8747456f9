// A learner whose own disk is full or fails: it waits, loses nothing that was acknowledged, and blames no worker.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>

#include "base/files.hpp"
#include "learner/checkpoint_folder.hpp"
#include "learner/disk_patience.hpp"
#include "learner/run_record.hpp"
#include "tests/learner/desk.hpp"
#include "tests/learner/rows.hpp"
#include "tests/replay_buffer/refusing_disk.hpp"

namespace echoline::learner {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A clock that the test advances; the desk's thread reads it.
class TestClock final : public Clock {
 public:
  TimePoint now() const override { return TimePoint(Duration(now_.load())); }
  double unix_seconds() const override { return 1.7e9 + seconds(Duration(now_.load())); }
  void advance(Duration by) { now_ += by.count(); }

 private:
  std::atomic<Duration::rep> now_ = 0;
};

class DiskDeskTest : public DeskTest {
 protected:
  DiskDeskTest() {
    options_.clock = &clock_;
    options_.retry_every = Duration(0);
    options_.database_patience = std::chrono::minutes(1);
  }
  void submit(const schema::Lease& lease) {
    schema::WorkerMessage message;
    *message.mutable_submission() = honest_submission(lease);
    desk_->receive(WorkerId{1}, message.SerializeAsString());
  }
  // Waits until the disk has refused `writes` more writes of the desk.
  void wait_until_refused(int writes) {
    const int refused_goal = disk_.refused() + writes;
    while (disk_.refused() < refused_goal) (void)desk_->wait_batch(0, std::chrono::milliseconds(1));
  }
  std::size_t messages_received() {
    const std::lock_guard lock(mutex_);
    return received_.size();
  }
  TestClock clock_;
  replay_buffer::RefusingDisk disk_;
};

TEST_F(DiskDeskTest, AFullDiskHoldsTheDeskUpAndNoWorkerIsBlamed) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 2);
  ASSERT_EQ(grant.leases_size(), 2);
  disk_.be_full();
  submit(grant.leases(0));
  wait_until_refused(3);
  EXPECT_TRUE(desk_->is_database_stalled());
  EXPECT_EQ(messages_received(), 0u) << "an unstored submission is not acknowledged";
  // A worker that asks meanwhile waits. No worker is blamed for the time that the disk is full, even beyond a lease.
  schema::WorkerMessage request;
  request.mutable_request()->set_version(0);
  request.mutable_request()->set_policy_digest(digest_bytes());
  request.mutable_request()->set_groups_max(1);
  desk_->receive(WorkerId{2}, request.SerializeAsString());
  for (int i = 0; i < 20; ++i) {
    clock_.advance(std::chrono::hours(1));
    wait_until_refused(1);
  }
  EXPECT_EQ(messages_received(), 0u);
  EXPECT_EQ(misbehaved(), "");
  disk_.accept();
  EXPECT_TRUE(next_message().ack().accepted());
  EXPECT_EQ(next_message().grant().leases_size(), 1);
  EXPECT_FALSE(desk_->is_database_stalled());
  EXPECT_TRUE(submit_and_wait(grant.leases(1)).accepted()) << "its lease has not ended";
  EXPECT_EQ(misbehaved(), "");
  EXPECT_EQ(desk_->counts()->leases.expired, 0u);
  EXPECT_EQ(accepted_, 4u);
}

// The consumption of a batch waits as well, and the caller retries.
TEST_F(DiskDeskTest, ConsumingCanBeRepeated) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 2);
  ASSERT_TRUE(submit_and_wait(grant.leases(0)).accepted());
  ASSERT_TRUE(submit_and_wait(grant.leases(1)).accepted());
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && *batch);
  disk_.fail_syncs(ENOSPC);
  EXPECT_EQ(desk_->consume(0, **batch).error().code, Code::kExhausted);
  EXPECT_EQ(desk_->prune(1).error().code, Code::kExhausted);
  disk_.accept();
  EXPECT_TRUE(desk_->consume(0, **batch));
  EXPECT_EQ(desk_->counts()->buffer.consumed, 4u);
}

// Messages beyond the limit of one worker are dropped, without blame for the worker.
TEST_F(DiskDeskTest, DroppedSubmissionsAreLeasedToOthers) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 1);
  ASSERT_EQ(grant.leases_size(), 1);
  disk_.be_full();
  schema::WorkerMessage sign_of_life;
  sign_of_life.mutable_progress()->add_leases(grant.leases(0).id());
  for (int i = 0; i < 10'000; ++i) {
    sign_of_life.mutable_progress()->set_progress(static_cast<std::uint64_t>(i + 1));
    desk_->receive(WorkerId{1}, sign_of_life.SerializeAsString());
    if (i == 0) wait_until_refused(2);
  }
  submit(grant.leases(0));
  disk_.accept();
  const schema::WorkGrant other = request_work(0, 1, WorkerId{2});
  EXPECT_EQ(flooded_, 0);
  EXPECT_EQ(misbehaved(), "");
  ASSERT_EQ(other.leases_size(), 1);
  EXPECT_EQ(desk_->counts()->leases.released, 1u);
}

// Other errors than a full disk are retried for a while. Then waiting for a batch ends, so that the run keeps its
// state.
TEST_F(DiskDeskTest, ADatabaseThatFailsForLongIsGivenUp) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 1);
  disk_.fail_writes();
  submit(grant.leases(0));
  wait_until_refused(3);
  EXPECT_TRUE(desk_->wait_batch(0, std::chrono::milliseconds(1))) << "it may pass";
  EXPECT_FALSE(desk_->has_given_up_database());
  clock_.advance(std::chrono::seconds(61));
  const auto batch = [&] {
    for (;;)
      if (auto answer = desk_->wait_batch(0, kWait); !answer) return answer;
  }();
  EXPECT_EQ(batch.error().code, Code::kIo);
  EXPECT_THAT(batch.error().detail, HasSubstr(options_.file.string()));
  EXPECT_TRUE(desk_->has_given_up_database());
  EXPECT_EQ(desk_->consume(0, {}).error().code, Code::kIo);
  EXPECT_EQ(misbehaved(), "");
}

TEST_F(DiskDeskTest, ASyncThatFailsOnceEndsNothing) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 1);
  disk_.fail_syncs(EIO);
  submit(grant.leases(0));
  wait_until_refused(1);
  disk_.accept();
  EXPECT_TRUE(next_message().ack().accepted());
  open(0);
  EXPECT_EQ(desk_->counts()->buffer.stored, 2u);
}

class DiskTest : public ::testing::Test {
 protected:
  DiskTest() {
    std::string name = (std::filesystem::temp_directory_path() / "echoline-run-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~DiskTest() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path folder_;
};

// Limits the size of this process's files, as a full disk would.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limited{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limited);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, SIG_DFL);
  }

 private:
  rlimit before_{};
};

TEST_F(DiskTest, RowsWaitForRoomAndNoneIsLostOrTorn) {
  const std::filesystem::path run = folder_ / "run";
  const auto record = RunRecord::open(run, false);
  ASSERT_TRUE(record);
  (*record)->append_metric("step", {{"step", 1}});
  const auto row_bytes = std::filesystem::file_size(run / "metrics.jsonl");
  {
    const FileSizeLimit half_a_row(row_bytes + row_bytes / 2);
    for (int step = 2; step <= 4; ++step) (*record)->append_metric("step", {{"step", step}});
    EXPECT_EQ((*record)->write_pending_rows().error().code, Code::kExhausted);
    (*record)->write_status({{"step", 4}});  // a failure is only a warning
  }
  EXPECT_TRUE((*record)->write_pending_rows());
  const auto rows = read_json_lines(run / "metrics.jsonl");
  ASSERT_TRUE(rows) << rows.error().message();
  ASSERT_EQ(rows->size(), 4u);
  for (std::size_t i = 0; i < rows->size(); ++i) EXPECT_EQ(rows->at(i).at("step"), i + 1);
}

TEST_F(DiskTest, ADiskThatRefusesIsAnAlarmThatEnds) {
  const std::filesystem::path run = folder_ / "run";
  const auto record = RunRecord::open(run, false);
  ASSERT_TRUE(record);
  const Error full = fail(Code::kExhausted, "replay buffer", "/runs/a/replay.sqlite: the disk is full"),
              failing = fail(Code::kIo, "sync", "/runs/a");
  for (int i = 0; i < 3; ++i) (*record)->set_disk_alarm("replay buffer", 7, &full);
  (*record)->set_disk_alarm("checkpoints", 7, &failing);
  EXPECT_THAT((*record)->alarms(), testing::UnorderedElementsAre("disk_full", "disk_failing"));
  for (int i = 0; i < 3; ++i) (*record)->set_disk_alarm("replay buffer", 8, nullptr);
  EXPECT_THAT((*record)->alarms(), ElementsAre("disk_failing"));
  const auto rows = read_json_lines(run / "events.jsonl");
  ASSERT_EQ(rows->size(), 3u);
  EXPECT_EQ(rows->at(0).at("event"), "alarm");
  EXPECT_EQ(rows->at(0).at("kind"), "disk_full");
  EXPECT_THAT(rows->at(0).at("detail").get<std::string>(), HasSubstr("/runs/a/replay.sqlite: the disk is full"));
  EXPECT_EQ(rows->at(2).at("event"), "disk_recovered");
  EXPECT_EQ(rows->at(2).at("part"), "replay buffer");
}

// A checkpoint that does not fit leaves nothing behind, and the one before stays valid.
TEST_F(DiskTest, ACheckpointWithoutRoomFreesItsFiles) {
  const auto write = [](const std::filesystem::path& folder) -> Status {
    ECHO_TRY(write_file_atomic(folder / "small", "x"));
    ECHO_TRY(write_file_atomic(folder / "large", std::string(10'000, 'x')));
    return write_file_atomic(folder / kCheckpointState, R"({"format":2,"steps":1,"policy_digest":"d"})");
  };
  ASSERT_TRUE(add_checkpoint(folder_, 1, 1, write));
  {
    const FileSizeLimit little(4096);
    const auto full = add_checkpoint(folder_, 2, 1, write);
    ASSERT_FALSE(full);
    EXPECT_EQ(full.error().code, Code::kExhausted);
    EXPECT_THAT(full.error().detail, HasSubstr("large: File too large"));
  }
  EXPECT_FALSE(std::filesystem::exists(folder_ / "writing"));
  EXPECT_EQ(find_policy(folder_)->step, 1);
  ASSERT_TRUE(add_checkpoint(folder_, 2, 1, write));
  EXPECT_EQ(*read_file(folder_ / "LATEST"), "step-000000002\n");
}

TEST_F(DiskTest, AFailingDiskIsWaitedForAWhileAndAFullOneWithoutEnd) {
  using Verdict = DiskPatience::Verdict;
  const auto at = [](int time_s) { return TimePoint(std::chrono::seconds(time_s)); };
  const auto error = [](Code code) { return fail(code, "write", "x"); };
  DiskPatience patience(std::chrono::seconds(60));
  EXPECT_EQ(patience.verdict_after(error(Code::kInvalid), at(0)), Verdict::kNotADiskError);
  EXPECT_EQ(patience.verdict_after(error(Code::kCorrupt), at(0)), Verdict::kGiveUp);
  EXPECT_EQ(patience.verdict_after(error(Code::kIo), at(0)), Verdict::kWait);
  EXPECT_EQ(patience.verdict_after(error(Code::kIo), at(59)), Verdict::kWait);
  EXPECT_EQ(patience.verdict_after(error(Code::kExhausted), at(60)), Verdict::kWait);
  EXPECT_EQ(patience.verdict_after(error(Code::kIo), at(100'000)), Verdict::kWait) << "it was full in between";
  EXPECT_EQ(patience.verdict_after(error(Code::kIo), at(100'060)), Verdict::kGiveUp);
  patience.on_success();
  EXPECT_EQ(patience.verdict_after(error(Code::kUnavailable), at(100'061)), Verdict::kWait);
}

}  // namespace
}  // namespace echoline::learner
