// Tasks that only the learner scores: their form for workers, groups that wait for their scores while workers do not
// wait for the scorer, and a grader's failure, which is never a reward of 0.
#include <gmock/gmock.h>

#include "learner/scorer.hpp"
#include "tests/learner/desk.hpp"
#include "worker/groups.hpp"

namespace echoline::learner {
namespace {

using ::testing::HasSubstr;

// Arithmetic with secrets: the reference contains the answer, which workers must not see.
class SecretTask final : public data_plane::Adapter {
 public:
  SecretTask() : inner_(*data_plane::make_adapter("arithmetic", "{}", 1)) {}
  std::string_view name() const override { return "secret"; }
  Result<schema::Problem> problem(std::uint64_t index) const override {
    ECHO_ASSIGN(schema::Problem problem, inner_->problem(index));
    problem.set_metadata_json("{\"hidden\": true}");
    return problem;
  }
  std::vector<schema::Problem> evaluation() const override { return {}; }
  std::optional<std::string> demonstration(const schema::Problem&) const override { return std::nullopt; }
  data_plane::Repeatable repeatable(const schema::Problem&) const override { return data_plane::Repeatable::kCostly; }
  Result<data_plane::Score> score(const schema::Problem& problem, std::string_view response) const override {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return may_grade; });
    ++gradings;
    if (broken) return fail(Code::kUnavailable, "grade", "no sandbox here");
    return inner_->score(problem, response);
  }
  void set_grading(bool is_allowed, bool is_broken = false) {
    const std::lock_guard lock(mutex);
    may_grade = is_allowed, broken = is_broken;
    changed.notify_all();
  }
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  bool may_grade = true, broken = false;
  mutable int gradings = 0;

 private:
  const std::unique_ptr<data_plane::Adapter> inner_;
};

class ScoringDesk : public DeskTest {
 protected:
  ScoringDesk() {
    options_.pacing.trajectories_per_step = 2 * options_.pacing.group_size;
    auto task = std::make_unique<SecretTask>();
    task_ = task.get();
    adapter_ = std::move(task);
    checker_options_.unscored = [](const schema::Problem&) { return true; };
  }
  ~ScoringDesk() override {
    task_->set_grading(true);
    desk_.reset();
  }

  // An honest worker's submission: the right answer first, and no score.
  schema::Submission text_only(const schema::Lease& lease) {
    schema::Lease with_reference = lease;
    *with_reference.mutable_problem() = *adapter_->problem(lease.group());
    // Not with adapter_: it may wait or fail, and the desk's scorer uses it at the same time.
    std::swap(adapter_, worker_adapter_);
    schema::Submission submission = honest_submission(with_reference);
    std::swap(adapter_, worker_adapter_);
    for (schema::Trajectory& trajectory : *submission.mutable_trajectories())
      trajectory.set_reward(0), trajectory.set_correct(false), trajectory.clear_components();
    return submission;
  }
  schema::SubmissionAck submit_text_and_wait(const schema::Lease& lease) { return submit_and_wait(text_only(lease)); }
  void wait_until(const std::function<bool(const DeskCounts&)>& is_reached) {
    const auto deadline = std::chrono::steady_clock::now() + kWait;
    bool reached = is_reached(*desk_->counts());
    while (!reached && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
      reached = is_reached(*desk_->counts());
    }
    EXPECT_TRUE(reached);
  }

  SecretTask* task_;
  std::unique_ptr<data_plane::Adapter> worker_adapter_ = *data_plane::make_adapter("arithmetic", "{}", 1);
};

TEST_F(ScoringDesk, WorkersSeeAPromptAndTrainingSeesScores) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 2);
  ASSERT_EQ(grant.leases_size(), 2);
  for (const schema::Lease& lease : grant.leases()) {
    EXPECT_TRUE(lease.unscored());
    EXPECT_FALSE(lease.problem().prompt().empty());
    EXPECT_EQ(lease.problem().reference(), "");
    EXPECT_EQ(lease.problem().metadata_json(), "");
    EXPECT_TRUE(submit_text_and_wait(lease).accepted());
  }
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  for (const replay_buffer::Group& group : (*batch)->groups) {
    EXPECT_EQ(group.trajectories[0].reward(), 1);
    EXPECT_TRUE(group.trajectories[0].correct());
    EXPECT_EQ(group.trajectories[0].components().at("exact"), 1);
    EXPECT_EQ(group.trajectories[1].reward(), 0);
  }
  EXPECT_EQ(desk_->counts()->scoring.responses, 4u);
  EXPECT_EQ(desk_->counts()->regrading.counts.responses, 0u) << "there is nothing to compare with";
}

TEST_F(ScoringDesk, GroupsWaitForTheirScoresAndWorkersDoNot) {
  task_->set_grading(false);
  open(0);
  const schema::WorkGrant grant = request_work(0, 2);
  for (const schema::Lease& lease : grant.leases())
    EXPECT_TRUE(submit_text_and_wait(lease).accepted()) << "stored, and acknowledged";
  EXPECT_FALSE(desk_->wait_batch(0, std::chrono::milliseconds(1))->has_value());
  EXPECT_EQ(desk_->counts()->buffer.unscored_groups, 2u);
  EXPECT_EQ(desk_->counts()->buffer.admissible_groups, 0u);
  EXPECT_EQ(request_work(0, 1).leases_size(), 1) << "the desk goes on";
  task_->set_grading(true);
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  EXPECT_EQ(desk_->counts()->buffer.unscored_groups, 0u);
}

TEST_F(ScoringDesk, ARestartedLearnerScoresWaitingGroups) {
  task_->set_grading(false);
  open(0);
  const schema::WorkGrant grant = request_work(0, 2);
  for (const schema::Lease& lease : grant.leases()) EXPECT_TRUE(submit_text_and_wait(lease).accepted());
  EXPECT_EQ(desk_->counts()->buffer.unscored_groups, 2u);
  // Grading ends before the desk has closed, or its result is dropped.
  std::thread grader([&] { task_->set_grading(true); });
  desk_.reset();
  grader.join();
  open(0);
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  EXPECT_EQ((*batch)->groups[0].trajectories[0].reward(), 1);
}

TEST_F(ScoringDesk, AGraderThatFailsReturnsTheGroupAndGivesNoReward) {
  task_->set_grading(true, /*is_broken=*/true);
  open(0);
  const schema::WorkGrant first = request_work(0, 1);
  ASSERT_EQ(first.leases_size(), 1);
  EXPECT_TRUE(submit_text_and_wait(first.leases(0)).accepted());
  wait_until([](const DeskCounts& counts) { return counts.buffer.rejected.contains("scoring failed"); });
  DeskCounts counts = *desk_->counts();
  EXPECT_EQ(counts.buffer.rejected.at("scoring failed"), 2u);
  EXPECT_EQ(counts.buffer.stored, 0u);
  EXPECT_EQ(counts.scoring.failed_groups, 1u);
  EXPECT_EQ(misbehaved(), "") << "through no fault of its worker";
  const schema::WorkGrant second = request_work(0, 1, WorkerId{2});
  ASSERT_EQ(second.leases_size(), 1);
  EXPECT_EQ(second.leases(0).group(), first.leases(0).group()) << "another worker tries";
  schema::Submission again = text_only(second.leases(0));
  for (schema::Trajectory& trajectory : *again.mutable_trajectories()) trajectory.set_worker(2);
  EXPECT_TRUE(submit_and_wait(again, WorkerId{2}).accepted());
  wait_until([](const DeskCounts& c) { return !c.leases.set_aside.empty(); });
  EXPECT_EQ(desk_->counts()->leases.set_aside.at("scoring failed"), 1u);
  const std::lock_guard lock(mutex_);
  ASSERT_EQ(set_aside_.size(), 1u);
  EXPECT_THAT(set_aside_[0].detail, HasSubstr("no sandbox here"));
}

TEST_F(ScoringDesk, AnUnrequestedScoreIsRefused) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 1);
  schema::Submission submission = text_only(grant.leases(0));
  submission.mutable_trajectories(1)->set_reward(1);
  EXPECT_EQ(submit_and_wait(submission).reason(), "malformed");
  const schema::WorkGrant again = request_work(0, 1);
  submission = text_only(again.leases(0));
  submission.mutable_trajectories(1)->set_text("95");
  EXPECT_EQ(submit_and_wait(submission).reason(), "wrong score");
}

// The worker's side: it does not score, and needs no adapter.
TEST(ScoringWorker, HandsInText) {
  const auto tokenizer = *model::Tokenizer::characters(model::kCharacterAlphabet);
  schema::RunSpec spec;
  spec.set_model_config_json(model::preset("tiny-64")->to_json());
  spec.set_tokenizer_json(tokenizer.to_json());
  spec.add_eos(static_cast<std::uint32_t>(*tokenizer.end_of_text()));
  spec.set_prompt_json(R"({"text": "{prompt}"})");
  spec.set_response_tokens_max(8);
  const auto task = worker::make_task(std::move(spec));
  ASSERT_TRUE(task) << task.error().message();
  EXPECT_EQ(task->adapter, nullptr);
  worker::Groups groups(*task, WorkerId{2});
  schema::Lease lease;
  lease.set_id(4), lease.set_rollouts(2), lease.set_version(1), lease.set_policy_digest("d"), lease.set_unscored(true);
  lease.mutable_problem()->set_id("secret/1"), lease.mutable_problem()->set_prompt("1+1=");
  auto begun = groups.begin(lease, TimePoint());
  ASSERT_TRUE(std::holds_alternative<std::vector<worker::Sequence>>(begun));
  for (const worker::Sequence& sequence : std::get<0>(begun)) {
    worker::Response response{.tokens = *tokenizer.encode("2"), .logprobs = {}, .spans = {}, .ended = true};
    response.tokens.push_back(*tokenizer.end_of_text());
    response.logprobs.assign(2, -0.5f);
    response.spans = {{Version{1}, 2}};
    groups.on_outcome({.id = sequence.id, .response = std::move(response)});
  }
  auto advance = groups.advance();
  ASSERT_EQ(advance.ended.size(), 1u);
  const auto& submission = std::get<schema::Submission>(advance.ended[0].result);
  EXPECT_EQ(submission.trajectories(0).text(), "2");
  EXPECT_EQ(submission.trajectories(0).reward(), 0);
  EXPECT_TRUE(submission.trajectories(0).components().empty());
  lease.set_id(5), lease.set_unscored(false);
  EXPECT_TRUE(std::holds_alternative<schema::WorkFailed>(groups.begin(lease, TimePoint())))
      << "a worker without the adapter cannot score";
}

}  // namespace
}  // namespace echoline::learner
