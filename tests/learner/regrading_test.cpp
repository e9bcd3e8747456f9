// Rewards of tasks with long grading: the choice of responses that are graded again, the evidence that convicts a
// worker, and that no worker waits for it.
#include "learner/regrading.hpp"

#include <gmock/gmock.h>

#include <set>

#include "tests/learner/desk.hpp"

namespace echoline::learner {
namespace {

using ::testing::HasSubstr;
using Verdict = Regraded::Verdict;

Regraded graded_in(double seconds, Verdict verdict = Verdict::kSame) {
  return {.verdict = verdict, .detail = "reward 1, expected 0", .seconds = seconds};
}

TEST(RegradingRules, LooksAtEverythingWhileThatTakesATwentiethOfAStep) {
  RegradingRules regrading(1);
  EXPECT_EQ(regrading.graded_fraction(), 1);
  regrading.on_step_measured(10, 100);
  EXPECT_EQ(regrading.graded_fraction(), 1) << "its grading time is unknown";
  regrading.record_result(WorkerId{1}, graded_in(0.005));
  EXPECT_EQ(regrading.graded_fraction(), 1) << "0.5 s of 10 s";
  regrading.on_step_measured(10, 1000);
  EXPECT_NEAR(regrading.graded_fraction(), 0.1, 1e-9) << "5 s of 10 s";
  for (int i = 0; i < 300; ++i) regrading.record_result(WorkerId{1}, graded_in(0.05));
  EXPECT_NEAR(regrading.graded_fraction(), 0.01, 1e-3);
  regrading.on_step_measured(100, 1000);
  EXPECT_NEAR(regrading.graded_fraction(), 0.1, 1e-2);
}

TEST(RegradingRules, AWorkerWithSlowResponsesDoesNotHideOthers) {
  RegradingRules regrading(1);
  regrading.on_step_measured(10, 100);
  const WorkerId slow{1}, quick{2};
  for (std::uint64_t i = 0; i < RegradingRules::kFirstResponses; ++i) {
    EXPECT_TRUE(regrading.should_grade(slow) && regrading.should_grade(quick));
    regrading.record_result(slow, graded_in(30)), regrading.record_result(quick, graded_in(0.001));
  }
  EXPECT_EQ(regrading.graded_fraction(quick), 1);
  EXPECT_LT(regrading.graded_fraction(slow), 0.001);
  EXPECT_LT(regrading.graded_fraction(WorkerId{3}), 0.01) << "of an unknown worker, after its first responses";
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(regrading.should_grade(quick));
}

TEST(RegradingRules, ChoosesAnUnpredictableShare) {
  const auto chosen_with = [](std::uint64_t secret) {
    RegradingRules regrading(secret);
    regrading.on_step_measured(10, 1000);
    regrading.record_result(WorkerId{9}, graded_in(0.005));
    std::set<int> numbers;
    for (int i = 0; i < 10'000; ++i)
      if (regrading.should_grade(WorkerId{1})) numbers.insert(i);
    EXPECT_EQ(regrading.counts().chosen, numbers.size());
    return numbers;
  };
  const std::set<int> first_choice = chosen_with(1), second_choice = chosen_with(2);
  EXPECT_NEAR(static_cast<double>(first_choice.size()), 1000, 150);
  for (int i = 0; i < static_cast<int>(RegradingRules::kFirstResponses); ++i)
    EXPECT_TRUE(first_choice.contains(i)) << "the first ones always";
  std::size_t in_both = 0;
  for (const int number : first_choice) in_both += second_choice.contains(number);
  EXPECT_LT(in_both, 200u) << "a tenth of a tenth, and the first ones";
}

TEST(RegradingRules, ThreeDifferencesExpelAWorkerAfterCloserChecks) {
  RegradingRules regrading(1);
  regrading.on_step_measured(1, 1000);
  regrading.record_result(WorkerId{9}, graded_in(10));  // a share of nearly nothing
  const WorkerId liar{1}, other{2};
  for (std::uint64_t i = 0; i < RegradingRules::kFirstResponses; ++i)
    EXPECT_TRUE(regrading.should_grade(liar) && regrading.should_grade(other));
  EXPECT_FALSE(regrading.record_result(liar, graded_in(1, Verdict::kDifferent)));
  for (int i = 0; i < 50; ++i) EXPECT_TRUE(regrading.should_grade(liar));
  EXPECT_FALSE(regrading.should_grade(other));
  EXPECT_FALSE(regrading.record_result(liar, graded_in(1, Verdict::kDifferent)));
  const auto reason = regrading.record_result(liar, graded_in(1, Verdict::kDifferent));
  ASSERT_TRUE(reason);
  EXPECT_THAT(*reason, HasSubstr("graded 3 of its responses"));
  EXPECT_THAT(*reason, HasSubstr("reward 1, expected 0"));
  EXPECT_FALSE(regrading.record_result(liar, graded_in(1, Verdict::kDifferent))) << "once";
  EXPECT_FALSE(regrading.should_grade(liar));
  ASSERT_EQ(regrading.counts().expelled.size(), 1u);
  EXPECT_EQ(regrading.counts().expelled[0].worker, liar);
}

TEST(RegradingRules, AmbiguousVerdictsConvictNoWorker) {
  RegradingRules regrading(1);
  const WorkerId slow{1}, unlucky{2};
  for (int i = 0; i < 1000; ++i)
    for (const Verdict verdict : {Verdict::kLate, Verdict::kUnsettled, Verdict::kImpossible})
      EXPECT_FALSE(regrading.record_result(slow, graded_in(1, verdict)));
  EXPECT_EQ(regrading.counts().late, 1000u);
  EXPECT_EQ(regrading.counts().unsettled, 1000u);
  EXPECT_EQ(regrading.counts().impossible, 1000u);
  // One difference in more than a hundred responses may be chance.
  for (int i = 0; i < 20; ++i) {
    EXPECT_FALSE(regrading.record_result(unlucky, graded_in(1, Verdict::kDifferent)));
    for (std::uint64_t right = 0; right < RegradingRules::kForgivenAfter; ++right)
      EXPECT_FALSE(regrading.record_result(unlucky, graded_in(1)));
  }
}

// Arithmetic whose grading claims to take long, with faults set by the test.
class CostlyTask final : public data_plane::Adapter {
 public:
  CostlyTask() : inner_(*data_plane::make_adapter("arithmetic", "{}", 1)) {}
  std::string_view name() const override { return "costly"; }
  Result<schema::Problem> problem(std::uint64_t index) const override { return inner_->problem(index); }
  std::vector<schema::Problem> evaluation() const override { return {}; }
  std::optional<std::string> demonstration(const schema::Problem&) const override { return std::nullopt; }
  data_plane::Repeatable repeatable(const schema::Problem&) const override { return data_plane::Repeatable::kCostly; }
  Result<data_plane::Score> score(const schema::Problem& problem, std::string_view response) const override {
    ECHO_ASSIGN(data_plane::Score score, inner_->score(problem, response));
    const int grading = ++gradings;
    if (on_grading) on_grading(grading);
    return change ? change(grading, std::move(score)) : score;
  }
  mutable std::atomic<int> gradings = 0;
  std::function<void(int grading)> on_grading;
  std::function<Result<data_plane::Score>(int grading, data_plane::Score)> change;

 private:
  const std::unique_ptr<data_plane::Adapter> inner_;
};

class RegradingDesk : public DeskTest {
 protected:
  RegradingDesk() {
    options_.pacing.trajectories_per_step = 8 * options_.pacing.group_size;
    options_.pacing.steps_total = 64;
    auto task = std::make_unique<CostlyTask>();
    task_ = task.get();
    adapter_ = std::move(task);
  }
  // Ends the desk here, because its regrader uses the adapter.
  ~RegradingDesk() override { desk_.reset(); }

  void wait_until(const std::function<bool(const Regrader::State&)>& is_reached) {
    for (int i = 0; i < 10'000 && !is_reached(desk_->counts()->regrading); ++i) std::this_thread::yield();
    EXPECT_TRUE(is_reached(desk_->counts()->regrading)) << desk_->counts()->regrading.counts.graded;
  }
  // The reason for expelling a worker, once the desk has one.
  std::string wait_for_blame() {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kWait, [this] { return !misbehaved_.empty(); });
    }
    return misbehaved();
  }
  void wait_until_graded(std::uint64_t responses) {
    wait_until([&](const Regrader::State& state) { return state.counts.graded >= responses; });
  }
  static schema::Submission with_full_reward(schema::Submission submission) {
    for (schema::Trajectory& trajectory : *submission.mutable_trajectories())
      trajectory.set_reward(1), trajectory.set_correct(true), (*trajectory.mutable_components())["exact"] = 1;
    return submission;
  }

  CostlyTask* task_;
};

TEST_F(RegradingDesk, AWorkerThatClaimsMoreIsExpelledAndNothingOfItIsTrainedOn) {
  open(0);
  const WorkerId honest{1}, liar{2};
  const schema::WorkGrant honest_grant = request_work(0, 2, honest), liar_grant = request_work(0, 3, liar);
  ASSERT_EQ(honest_grant.leases_size(), 2);
  ASSERT_EQ(liar_grant.leases_size(), 3);
  for (const schema::Lease& lease : honest_grant.leases())
    EXPECT_TRUE(submit_and_wait(honest_submission(lease, honest), honest).accepted());
  for (const schema::Lease& lease : liar_grant.leases())
    EXPECT_TRUE(submit_and_wait(with_full_reward(honest_submission(lease, liar)), liar).accepted())
        << "acknowledgements do not wait for the graders";
  wait_until_graded(10);
  EXPECT_THAT(wait_for_blame(), HasSubstr("expected 0 (wrong)"));
  const DeskCounts counts = *desk_->counts();
  EXPECT_EQ(counts.regrading.counts.different, 3u) << "the second response of each group is wrong";
  EXPECT_EQ(counts.regrading.counts.responses, 10u);
  EXPECT_EQ(counts.regrading.share, 1);
  EXPECT_EQ(counts.buffer.rejected.at("wrong score"), 6u);
  EXPECT_EQ(counts.buffer.stored, 4u) << "the honest worker's groups";
  EXPECT_EQ(task_->gradings, 10 + 3 + 5 * 2) << "two gradings of each difference, and the test's own";
  // Its groups are leased to other workers.
  const schema::WorkGrant again = request_work(0, 1, honest);
  ASSERT_EQ(again.leases_size(), 1);
  EXPECT_EQ(again.leases(0).group(), liar_grant.leases(0).group());
}

TEST_F(RegradingDesk, ASlowWorkerIsNotExpelled) {
  open(0);
  const WorkerId slow{3};
  const schema::WorkGrant grant = request_work(0, 6, slow);
  ASSERT_EQ(grant.leases_size(), 6);
  for (const schema::Lease& lease : grant.leases()) {
    schema::Submission submission = honest_submission(lease, slow);
    schema::Trajectory& right = *submission.mutable_trajectories(0);  // but the worker had no time to see that
    right.set_reward(0), right.set_correct(false), right.set_late(true);
    (*right.mutable_components())["exact"] = 0;
    EXPECT_TRUE(submit_and_wait(submission, slow).accepted());
  }
  wait_until_graded(12);
  EXPECT_EQ(misbehaved(), "");
  const RegradingCounts counts = desk_->counts()->regrading.counts;
  EXPECT_EQ(counts.late, 6u);
  EXPECT_EQ(counts.different, 0u);
  EXPECT_EQ(desk_->counts()->buffer.stored, 12u);
}

TEST_F(RegradingDesk, AFasterWorkerThanTheLearnerIsNotExpelled) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 6);
  std::vector<schema::Submission> submissions;
  for (const schema::Lease& lease : grant.leases()) submissions.push_back(honest_submission(lease));
  task_->change = [](int, data_plane::Score score) -> Result<data_plane::Score> {
    if (score.correct) score = {0, {{"exact", 0}}, false, true};
    return score;
  };
  for (const schema::Submission& submission : submissions) EXPECT_TRUE(submit_and_wait(submission).accepted());
  wait_until_graded(12);
  EXPECT_EQ(misbehaved(), "");
  EXPECT_EQ(desk_->counts()->regrading.counts.late, 6u);
}

TEST_F(RegradingDesk, AClaimedTimeoutExcusesNoWrongScore) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 3);
  for (const schema::Lease& lease : grant.leases()) {
    schema::Submission submission = with_full_reward(honest_submission(lease));
    for (schema::Trajectory& trajectory : *submission.mutable_trajectories()) trajectory.set_late(true);
    submit_and_wait(submission);
  }
  EXPECT_THAT(wait_for_blame(), HasSubstr("wrong score"));
}

TEST_F(RegradingDesk, ANondeterministicGraderConvictsNoWorker) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 6);
  std::vector<schema::Submission> submissions;
  for (const schema::Lease& lease : grant.leases()) submissions.push_back(honest_submission(lease));
  task_->change = [](int grading, data_plane::Score score) -> Result<data_plane::Score> {
    score.reward = 0.001 * grading;
    return score;
  };
  for (const schema::Submission& submission : submissions) EXPECT_TRUE(submit_and_wait(submission).accepted());
  wait_until_graded(12);
  EXPECT_EQ(misbehaved(), "");
  EXPECT_EQ(desk_->counts()->regrading.counts.unsettled, 12u);
}

TEST_F(RegradingDesk, WithoutAWorkingGraderWorkersScoresStand) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 2);
  std::vector<schema::Submission> submissions;
  for (const schema::Lease& lease : grant.leases()) submissions.push_back(with_full_reward(honest_submission(lease)));
  task_->change = [](int grading, data_plane::Score) -> Result<data_plane::Score> {
    if (grading % 2 == 0) throw std::runtime_error("a grader that throws");
    return fail(Code::kUnavailable, "grade", "no sandbox here");
  };
  for (const schema::Submission& submission : submissions) EXPECT_TRUE(submit_and_wait(submission).accepted());
  wait_until_graded(4);
  EXPECT_EQ(misbehaved(), "");
  EXPECT_EQ(desk_->counts()->regrading.counts.impossible, 4u);
}

// Neither acknowledgements nor steps wait for a grader that hangs, and its queue is bounded.
TEST_F(RegradingDesk, AHangingGraderDelaysNoWorker) {
  options_.pacing.trajectories_per_step = 30 * 32;
  options_.pacing.group_size = 32;
  open(0);
  const schema::WorkGrant grant = request_work(0, 40);
  std::vector<schema::Submission> submissions;
  for (const schema::Lease& lease : grant.leases()) submissions.push_back(honest_submission(lease));
  ASSERT_EQ(submissions.size(), 40u);
  std::mutex mutex;
  std::condition_variable changed;
  bool may_grade = false;
  task_->on_grading = [&](int) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return may_grade; });
  };
  for (const schema::Submission& submission : submissions) ASSERT_TRUE(submit_and_wait(submission).accepted());
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  ASSERT_TRUE(desk_->consume(0, **batch));
  const Regrader::State state = desk_->counts()->regrading;
  EXPECT_EQ(state.counts.graded, 0u);
  EXPECT_LE(state.waiting, Regrader::kWaitingOfWorkerMax);
  EXPECT_GE(state.counts.left_out + state.waiting + 1, 32 * submissions.size()) << "one is being graded";
  EXPECT_GT(state.counts.left_out, 0u);
  {
    const std::lock_guard lock(mutex);
    may_grade = true;
  }
  changed.notify_all();
}

// A batch in training does not change, and its step ends normally.
TEST_F(RegradingDesk, ABatchInTrainingIsNotRemoved) {
  options_.pacing.trajectories_per_step = 3 * options_.pacing.group_size;
  open(0);
  const schema::WorkGrant grant = request_work(0, 6);
  ASSERT_EQ(grant.leases_size(), 6);
  std::vector<schema::Submission> submissions;
  for (const schema::Lease& lease : grant.leases()) submissions.push_back(with_full_reward(honest_submission(lease)));
  std::mutex mutex;
  std::condition_variable changed;
  bool may_grade = false;
  task_->on_grading = [&](int) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return may_grade; });
  };
  for (const schema::Submission& submission : submissions) ASSERT_TRUE(submit_and_wait(submission).accepted());
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  {
    const std::lock_guard lock(mutex);
    may_grade = true;
  }
  changed.notify_all();
  EXPECT_NE(wait_for_blame(), "");
  EXPECT_EQ(desk_->counts()->buffer.rejected.at("wrong score"), 6u) << "the other three groups";
  EXPECT_TRUE(desk_->consume(0, **batch));
  EXPECT_EQ(desk_->counts()->buffer.consumed, 6u);
}

}  // namespace
}  // namespace echoline::learner
