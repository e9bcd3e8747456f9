// The N-th write or sync of the file fails, for rising N until a whole run needs fewer. No acknowledged trajectory is
// lost, and no group is consumed twice.
#include <map>
#include <set>

#include "tests/replay_buffer/fixtures.hpp"
#include "tests/replay_buffer/refusing_disk.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::uint32_t kGroupSize = 2, kBudget = 1000;  // kBudget: no group becomes too stale
constexpr std::uint64_t kGroupsPerStep = 4, kSteps = 30;
constexpr std::size_t kTextBytes = 30'000;
const WorkerId kWorker{1};

class NthFailure : public ::testing::Test {
 protected:
  // Calls until it succeeds. The disk fails once, so the second attempt must succeed.
  template <class Call>
  auto repeat(Call&& call) {
    auto outcome = call();
    if (!outcome) {
      ++errors_;
      EXPECT_EQ(outcome.error().code, Code::kIo) << outcome.error().message();
      outcome = call();
    }
    return must(std::move(outcome));
  }

  void open() {
    ledger_.reset();
    buffer_.reset();
    LedgerOptions options;
    options.pacing = {.staleness = {.budget = kBudget, .publish_every = 1, .lookahead = 1},
                      .trajectories_per_step = 1u << 20};
    buffer_ = repeat([&] { return ReplayBuffer::open(folder_->file(), options_for(kGroupSize, kBudget)); });
    ledger_ = repeat([&] { return JobLedger::open(*buffer_, options); });
  }

  void run() {
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      const auto leases = repeat([&] {
        return ledger_->grant(
            {.worker = kWorker, .version = Version{0}, .policy_digest = "digest", .groups_max = kGroupsPerStep}, step,
            1000);
      });
      std::vector<schema::Submission> submissions;
      for (const LeaseRecord& lease : leases) {
        submissions.push_back(submission_for(lease));
        for (Trajectory& trajectory : *submissions.back().mutable_trajectories())
          trajectory.set_text(std::string(kTextBytes, static_cast<char>('a' + lease.group.value % 26)));
      }
      std::vector<Delivery> deliveries;
      for (const auto& submission : submissions) deliveries.push_back({.worker = kWorker, .submission = &submission});
      for (const Verdict& verdict : repeat([&] { return ledger_->submit(deliveries, step, 1001); }))
        ASSERT_TRUE(verdict.accepted) << verdict.reason << ": " << verdict.detail;
      for (const LeaseRecord& lease : leases) waiting_.insert(lease.group);
      ASSERT_EQ(leases.size(), kGroupsPerStep);
      const auto batch = repeat([&] { return buffer_->sample(step, kGroupsPerStep - 1); });
      ASSERT_TRUE(batch);
      repeat([&]() -> Result<bool> {
        ECHO_TRY(buffer_->consume(step, batch->ids()));
        return true;
      });
      for (const GroupId group : batch->ids())
        EXPECT_EQ(waiting_.erase(group), 1u) << "group " << group.value << " is consumed again";
      consumed_ += batch->groups.size();
      if (step % 8 == 7) repeat([&] { return buffer_->prune(step - 4); });
    }
  }

  void check_file() {
    const Counts counts = must(buffer_->counts(kSteps));
    EXPECT_EQ(counts.consumed, consumed_ * kGroupSize);
    EXPECT_EQ(counts.incomplete_groups, 0u);
    const auto batch = must(buffer_->sample(kSteps, static_cast<std::uint32_t>(waiting_.size())));
    ASSERT_TRUE(batch) << "acknowledged groups are lost";
    std::set<GroupId> stored;
    for (const Group& group : batch->groups) {
      stored.insert(group.id);
      for (const Trajectory& trajectory : group.trajectories)
        EXPECT_EQ(trajectory.text(), std::string(kTextBytes, static_cast<char>('a' + group.id.value % 26)));
    }
    EXPECT_TRUE(stored == waiting_);
  }

  RefusingDisk disk_;
  std::unique_ptr<TemporaryFolder> folder_;
  std::unique_ptr<ReplayBuffer> buffer_;
  std::unique_ptr<JobLedger> ledger_;
  std::set<GroupId> waiting_;  // acknowledged and not consumed
  std::uint64_t consumed_ = 0;
  int errors_ = 0;  // calls that failed
};

TEST_F(NthFailure, LosesNothingAndConsumesNothingTwice) {
  int runs = 0;
  bool has_failed = true;
  for (int n = 1; has_failed; n += 1 + n / 24, ++runs) {
    SCOPED_TRACE(fmt::format("write or sync {} fails", n));
    folder_ = std::make_unique<TemporaryFolder>(TemporaryFolder::On::kMemory);
    waiting_.clear();
    consumed_ = 0;
    disk_.fail_nth(n);
    open();
    ASSERT_NO_FATAL_FAILURE(run());
    ledger_.reset();
    buffer_.reset();  // copies the log into the file
    has_failed = disk_.has_failed_nth();
    disk_.accept();
    open();
    ASSERT_NO_FATAL_FAILURE(check_file());
  }
  fmt::print("{} runs, in {} a call reported the failure\n", runs, errors_);
  EXPECT_GT(runs, 50);
  // The others failed to copy the log into the file. SQLite repeats that when the file is opened again.
  EXPECT_GT(errors_, runs / 4);
}

}  // namespace
}  // namespace echoline::replay_buffer
