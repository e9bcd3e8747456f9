// The parts of the rollout desk on one thread, with real storage and a clock that the test moves.
#include "learner/desk_logic.hpp"

#include <gmock/gmock.h>

#include "tests/learner/desk.hpp"

namespace echoline::learner {
namespace {

using testing::ElementsAre;

constexpr WorkerId kAda{1}, kBob{2};

class DeskLogicTest : public DeskTest {
 protected:
  DeskLogicTest() {
    events_.send = [this](WorkerId, const std::string& bytes) {
      sent_.push_back(*data_plane::parse_learner_message(bytes));
    };
    events_.accepted = [](WorkerId, std::uint64_t, double) {};
    events_.set_aside = [this](const GroupSetAside& group) { set_aside_.push_back(group); };
    events_.drained = [this](WorkerId worker) { drained_.push_back(worker.value); };
  }
  DeskContext context() {
    return {options_,
            events_,
            leases_,
            database_,
            inbox_,
            hand_over_,
            wanted_,
            [] {},
            [this](WorkerId worker, const std::string&) { expelled_.push_back(worker); },
            Door(door_, *adapter_, phrasing_)};
  }
  // A fixture with its own storage, for one part.
  DeskContext stored_context() {
    DeskContext desk = context();
    replay_buffer::BufferOptions buffer;
    buffer.group_size = options_.pacing.group_size;
    buffer.staleness_budget = options_.pacing.staleness.budget;
    desk.buffer = *replay_buffer::ReplayBuffer::open(options_.file, buffer);
    desk.ledger = *replay_buffer::JobLedger::open(*desk.buffer, {.pacing = options_.pacing, .lease = options_.lease});
    return desk;
  }
  void open_logic() {
    auto logic = DeskLogic::open(context(), 0);
    ASSERT_TRUE(logic) << logic.error().message();
    logic_ = std::move(*logic);
    logic_->policies().published(Version{0}, digest_bytes());
  }
  // Handles the message now, and returns the answer.
  schema::LearnerMessage send(WorkerId worker, const schema::WorkerMessage& message) {
    const std::string bytes = message.SerializeAsString();
    EXPECT_TRUE(inbox_.admit(worker, bytes.size(), false).taken);
    logic_->defer(Incoming{worker, bytes});
    logic_->run_due();
    logic_->check();
    return sent_.empty() ? schema::LearnerMessage() : std::exchange(sent_, {}).front();
  }
  schema::WorkGrant request(WorkerId worker, std::uint32_t groups) {
    schema::WorkerMessage message;
    message.mutable_request()->set_policy_digest(digest_bytes());
    message.mutable_request()->set_groups_max(groups);
    return send(worker, message).grant();
  }
  bool submit(WorkerId worker, const schema::Lease& lease) {
    schema::WorkerMessage message;
    *message.mutable_submission() = made(lease, worker);
    return send(worker, message).ack().accepted();
  }

  ManualClock manual_;
  LeaseClock leases_{&manual_};
  DatabaseEdge database_{leases_, std::chrono::seconds(1), std::chrono::minutes(1), {}};
  DeskInbox inbox_{Bytes{1000}};
  BatchHandOver hand_over_;
  std::atomic<bool> wanted_ = true;
  DeskEvents events_;
  std::vector<schema::LearnerMessage> sent_;
  std::vector<WorkerId> expelled_;
  std::unique_ptr<DeskLogic> logic_;
};

TEST_F(DeskLogicTest, APauseEndsNoLease) {
  open_logic();
  const schema::WorkGrant grant = request(kAda, 1);
  ASSERT_EQ(grant.leases_size(), 1);
  manual_.advance(std::chrono::hours(2));
  logic_->excuse_pauses();
  logic_->run_due();
  EXPECT_EQ(logic_->counts()->leases.live, 1u);
  for (int i = 0; i < 40'000; ++i) {  // as many seconds of ticks
    manual_.advance(std::chrono::seconds(1));
    logic_->excuse_pauses();
    logic_->run_due();
    if (logic_->counts()->leases.live == 0) break;
  }
  EXPECT_EQ(logic_->counts()->leases.expired, 1u) << "elapsed time of the desk ends the lease";
}

TEST_F(DeskLogicTest, ARetiredWorkerFinishesItsGroupsAndGetsNoMore) {
  open_logic();
  const schema::WorkGrant grant = request(kAda, 1);
  logic_->leases().retire(kAda);
  EXPECT_EQ(request(kAda, 1).leases_size(), 0);
  EXPECT_THAT(drained_, ElementsAre());
  EXPECT_TRUE(submit(kAda, grant.leases(0)));
  EXPECT_EQ(request(kAda, 1).leases_size(), 0);
  EXPECT_THAT(drained_, ElementsAre(1));
  logic_->leases().reinstate(kAda);
  EXPECT_EQ(request(kAda, 1).leases_size(), 1);
}

TEST_F(DeskLogicTest, TheStepsBatchIsHandedOverOnceItIsWholeAndWanted) {
  open_logic();
  const schema::WorkGrant grant = request(kAda, 2);
  ASSERT_EQ(grant.leases_size(), 2);
  EXPECT_TRUE(submit(kAda, grant.leases(0)));
  hand_over_.ask(0);
  logic_->run_due();
  EXPECT_EQ(hand_over_.wanted(), 0u) << "one group of two";
  EXPECT_TRUE(submit(kAda, grant.leases(1)));
  const auto batch = hand_over_.wait({});
  ASSERT_TRUE(batch && *batch);
  logic_->check();
  EXPECT_TRUE(logic_->batches().disown(kAda)) << "groups in training stay";
  EXPECT_TRUE(logic_->consume(0, **batch));
  EXPECT_EQ(logic_->batches().step(), 1u);
  EXPECT_EQ(logic_->counts()->buffer.consumed, 4u);
}

TEST_F(DeskLogicTest, OffencesAreStoredAndForgedMessagesExpelAtOnce) {
  {
    DeskContext desk = stored_context();
    Discipline discipline(desk);
    for (int i = 0; i < 4; ++i) discipline.count_malformed(kAda, "it is cut short");
    discipline.count_accepted(kBob);
    EXPECT_THAT(expelled_, ElementsAre());
    discipline.count_malformed(kBob, "another worker's score", true);
    EXPECT_THAT(expelled_, ElementsAre(kBob));
    discipline.check();
  }
  DeskContext desk = stored_context();
  Discipline of_the_next_process(desk);
  of_the_next_process.count_malformed(kAda, "it is cut short");
  EXPECT_THAT(expelled_, ElementsAre(kBob, kAda));
  for (int i = 0; i < 2000; ++i) ASSERT_TRUE(of_the_next_process.may_talk(kBob));
  EXPECT_FALSE(of_the_next_process.may_talk(kBob));
}

TEST_F(DeskLogicTest, ManyGroupsSetAsideInARowEndTheRunUnlessOneSucceeds) {
  options_.pacing.staleness = {1000, 1, 1000};
  options_.pacing.steps_total = 10'000;
  DeskContext desk = stored_context();
  SetAsideGroups groups(desk);
  const auto set_aside = [&](std::uint32_t n) {
    ASSERT_TRUE(desk.ledger->together([&] {
      for (std::uint32_t i = 0; i < n; ++i) {
        const auto leases = desk.ledger->grant({kAda, Version{0}, digest_bytes(), 1, {}, Version{0}}, 0, 1e9);
        ASSERT_TRUE(leases && leases->size() == 1);
        ASSERT_TRUE(desk.ledger->set_aside(leases->front().id, "too large", "x"));
      }
    }));
    groups.report_new();
    groups.check();
  };
  set_aside(SetAsideGroups::kInARowMax - 1);
  groups.group_succeeded();
  set_aside(SetAsideGroups::kInARowMax - 1);
  EXPECT_TRUE(groups.can_generate());
  set_aside(1);
  EXPECT_EQ(groups.can_generate().error().code, Code::kInvalid);
  EXPECT_EQ(set_aside_.size(), 2u * SetAsideGroups::kInARowMax - 1);
}

}  // namespace
}  // namespace echoline::learner
