// The desk between workers and training, with real storage and no network: leases, durable acceptance, batches, resume.
#include "learner/rollout_desk.hpp"

#include <gtest/gtest.h>

#include <cstdlib>

#include "data_plane/trajectory.hpp"

namespace echoline::learner {
namespace {

constexpr Duration kWait = std::chrono::seconds(10);

class DeskTest : public ::testing::Test {
 protected:
  DeskTest() {
    std::string name = (std::filesystem::temp_directory_path() / "echoline-desk-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    options_.file = folder_ / "replay.sqlite";
    options_.prompts_per_step = 2;
    options_.group_size = 2;
    options_.staleness_budget = 2;
    options_.lookahead_steps = 1;
    options_.steps_total = 4;
    adapter_ = *data_plane::make_adapter("arithmetic", "{}", 1);
    digest_[0] = std::byte{7};
  }
  ~DeskTest() override {
    desk_.reset();
    std::filesystem::remove_all(folder_);
  }

  void open(std::uint64_t step) {
    desk_.reset();
    DeskEvents events;
    events.send = [this](WorkerId, std::string bytes) {
      const std::lock_guard lock(mutex_);
      received_.push_back(*data_plane::parse_learner_message(bytes));
      changed_.notify_all();
    };
    events.accepted = [this](WorkerId, std::uint64_t rollouts) {
      const std::lock_guard lock(mutex_);
      accepted_ += rollouts;
    };
    events.misbehaved = [this](WorkerId, const std::string& reason) {
      const std::lock_guard lock(mutex_);
      misbehaved_ = reason;
      changed_.notify_all();
    };
    auto desk = RolloutDesk::open(options_, *adapter_, step, std::move(events));
    ASSERT_TRUE(desk) << desk.error().message();
    desk_ = std::move(*desk);
    desk_->published(Version{step}, digest_);
  }

  schema::LearnerMessage next_message() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kWait, [this] { return !received_.empty(); }));
    if (received_.empty()) return {};
    schema::LearnerMessage message = std::move(received_.front());
    received_.erase(received_.begin());
    return message;
  }

  std::string digest_bytes() const { return {reinterpret_cast<const char*>(digest_.data()), digest_.size()}; }

  schema::WorkGrant ask(std::uint64_t version, std::uint32_t groups) {
    schema::WorkerMessage message;
    message.mutable_request()->set_version(version);
    message.mutable_request()->set_policy_digest(digest_bytes());
    message.mutable_request()->set_groups_max(groups);
    desk_->receive(WorkerId{1}, message.SerializeAsString());
    return next_message().grant();
  }

  schema::SubmissionAck hand_in(const schema::Lease& lease) {
    schema::WorkerMessage message;
    schema::Submission& submission = *message.mutable_submission();
    submission.set_lease(lease.id());
    for (std::uint32_t member = 0; member < lease.rollouts(); ++member) {
      schema::Trajectory& t = *submission.add_trajectories();
      t.set_id(std::to_string(lease.id()) + "/" + std::to_string(member));
      t.set_problem_id(lease.problem().id());
      t.set_group(lease.group());
      t.set_member(member);
      t.add_prompt_tokens(1);
      t.add_response_tokens(2);
      t.add_logprobs(-0.5f);
      t.add_spans()->set_end(1);
      t.mutable_spans(0)->set_version(lease.version());
      t.set_reward(member);
      t.set_policy_digest(lease.policy_digest());
      t.set_lease(lease.id());
      t.set_worker(1);
    }
    desk_->receive(WorkerId{1}, message.SerializeAsString());
    return next_message().ack();
  }

  std::filesystem::path folder_;
  DeskOptions options_;
  std::unique_ptr<data_plane::Adapter> adapter_;
  overlay::Digest digest_{};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<schema::LearnerMessage> received_;
  std::uint64_t accepted_ = 0;
  std::string misbehaved_;
  std::unique_ptr<RolloutDesk> desk_;
};

TEST_F(DeskTest, LeasesBecomeABatchOnceHandedIn) {
  open(0);
  const schema::WorkGrant grant = ask(0, 2);
  ASSERT_EQ(grant.leases_size(), 2);
  EXPECT_EQ(grant.leases(0).problem().id(), (*adapter_->problem(grant.leases(0).group())).id());
  EXPECT_TRUE(hand_in(grant.leases(0)).accepted());
  auto early = desk_->wait_batch(0, std::chrono::milliseconds(1));
  ASSERT_TRUE(early);
  EXPECT_FALSE(early->has_value());  // one group of two
  EXPECT_TRUE(hand_in(grant.leases(1)).accepted());
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  EXPECT_EQ((*batch)->groups.size(), 2u);
  EXPECT_TRUE(desk_->consume(0, **batch));
  EXPECT_EQ(accepted_, 4u);
  EXPECT_EQ(desk_->counts()->buffer.consumed, 4u);
}

TEST_F(DeskTest, HandsOutNoMoreThanTheLookaheadAndTheRunAllow) {
  open(0);
  EXPECT_EQ(ask(0, 64).leases_size(), 4);  // two steps of two groups
  const schema::WorkGrant nothing = ask(0, 64);
  EXPECT_EQ(nothing.leases_size(), 0);
  EXPECT_GT(nothing.retry_after_ms(), 0u);
  open(3);  // the last of four steps
  EXPECT_EQ(ask(3, 64).leases_size(), 2);
}

TEST_F(DeskTest, RefusesAnUnknownVersionAndAForeignDigest) {
  open(0);
  EXPECT_EQ(ask(9, 1).leases_size(), 0);
  digest_[0] = std::byte{8};
  schema::WorkerMessage message;
  message.mutable_request()->set_policy_digest(digest_bytes());
  message.mutable_request()->set_groups_max(1);
  desk_->receive(WorkerId{1}, message.SerializeAsString());
  std::unique_lock lock(mutex_);
  ASSERT_TRUE(changed_.wait_for(lock, kWait, [this] { return !misbehaved_.empty(); }));
  EXPECT_NE(misbehaved_.find("digest"), std::string::npos);
}

TEST_F(DeskTest, GarbageIsMisbehaviour) {
  open(0);
  desk_->receive(WorkerId{1}, "\xff\xff\xff");
  std::unique_lock lock(mutex_);
  EXPECT_TRUE(changed_.wait_for(lock, kWait, [this] { return !misbehaved_.empty(); }));
}

TEST_F(DeskTest, ALostWorkersGroupsAreLeasedAgain) {
  open(0);
  const schema::WorkGrant first = ask(0, 4);
  ASSERT_EQ(first.leases_size(), 4);
  desk_->worker_lost(WorkerId{1});
  const schema::WorkGrant second = ask(0, 4);
  ASSERT_EQ(second.leases_size(), 4);
  EXPECT_EQ(second.leases(0).group(), first.leases(0).group());
  EXPECT_NE(second.leases(0).id(), first.leases(0).id());
  EXPECT_FALSE(hand_in(first.leases(0)).accepted());
}

TEST_F(DeskTest, AcknowledgedWorkSurvivesAReopenAndARewind) {
  open(0);
  const schema::WorkGrant grant = ask(0, 3);
  ASSERT_EQ(grant.leases_size(), 3);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(hand_in(grant.leases(i)).accepted());
  auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  ASSERT_TRUE(desk_->consume(0, **batch));
  open(0);  // from a checkpoint before step 0 was trained
  batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  EXPECT_EQ(desk_->counts()->buffer.stored, 6u);
  EXPECT_EQ(desk_->counts()->buffer.consumed, 0u);
}

}  // namespace
}  // namespace echoline::learner
