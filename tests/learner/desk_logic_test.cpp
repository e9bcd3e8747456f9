// The parts of the rollout desk on one thread, with real storage and a clock that the test moves.
#include "learner/desk_logic.hpp"

#include <gmock/gmock.h>

#include "learner/attendance.hpp"
#include "learner/roster.hpp"
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
            lease_clock_,
            database_,
            inbox_,
            batch_request_,
            run_needs_results_,
            [] {},
            [this](WorkerId worker, const std::string&) { expelled_.push_back(worker); },
            SubmissionChecker(checker_options_, *adapter_, phrasing_)};
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
    logic_->policies().finish_publishing(Version{0}, digest_bytes());
  }
  // Handles the message now, and returns the answer.
  schema::LearnerMessage send(WorkerId worker, const schema::WorkerMessage& message) {
    const std::string bytes = message.SerializeAsString();
    EXPECT_TRUE(inbox_.admit(worker, bytes.size(), false).is_accepted);
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
    *message.mutable_submission() = honest_submission(lease, worker);
    return send(worker, message).ack().accepted();
  }

  ManualClock clock_;
  LeaseClock lease_clock_{&clock_};
  DatabaseBacklog database_{lease_clock_, std::chrono::seconds(1), std::chrono::minutes(1), {}};
  DeskInbox inbox_{Bytes{1000}};
  BatchRequest batch_request_;
  std::atomic<bool> run_needs_results_ = true;
  DeskEvents events_;
  std::vector<schema::LearnerMessage> sent_;
  std::vector<WorkerId> expelled_;
  std::unique_ptr<DeskLogic> logic_;
};

TEST_F(DeskLogicTest, APauseEndsNoLease) {
  open_logic();
  const schema::WorkGrant grant = request(kAda, 1);
  ASSERT_EQ(grant.leases_size(), 1);
  clock_.advance(std::chrono::hours(2));
  logic_->extend_leases_after_pause();
  logic_->run_due();
  EXPECT_EQ(logic_->counts()->leases.live, 1u);
  for (int i = 0; i < 40'000; ++i) {  // as many seconds of ticks
    clock_.advance(std::chrono::seconds(1));
    logic_->extend_leases_after_pause();
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
  EXPECT_TRUE(logic_->leases().on_presence_change({PresenceChange::Kind::kBack, kAda}));
  EXPECT_EQ(request(kAda, 1).leases_size(), 1);
}

TEST_F(DeskLogicTest, TheStepsBatchIsHandedOverOnceItIsWholeAndWanted) {
  open_logic();
  const schema::WorkGrant grant = request(kAda, 2);
  ASSERT_EQ(grant.leases_size(), 2);
  EXPECT_TRUE(submit(kAda, grant.leases(0)));
  batch_request_.request(0);
  logic_->run_due();
  EXPECT_EQ(batch_request_.requested_step(), 0u) << "one group of two";
  EXPECT_TRUE(submit(kAda, grant.leases(1)));
  const auto batch = batch_request_.wait({});
  ASSERT_TRUE(batch && *batch);
  logic_->check();
  EXPECT_TRUE(logic_->batches().discard_groups_of(kAda)) << "groups in training stay";
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
  for (int i = 0; i < 2000; ++i) ASSERT_TRUE(of_the_next_process.count_idle_message(kBob));
  EXPECT_FALSE(of_the_next_process.count_idle_message(kBob));
}

TEST_F(DeskLogicTest, ManyGroupsSetAsideInARowEndTheRunUnlessOneSucceeds) {
  options_.pacing.staleness = {.budget = 1000, .publish_every = 1, .lookahead = 1000};
  options_.pacing.steps_total = 10'000;
  DeskContext desk = stored_context();
  SetAsideGroups groups(desk);
  const auto set_aside = [&](std::uint32_t count) {
    ASSERT_TRUE(desk.ledger->run_in_transaction([&] {
      for (std::uint32_t i = 0; i < count; ++i) {
        const auto leases = desk.ledger->grant({kAda, Version{0}, digest_bytes(), 1, {}, Version{0}}, 0, 1e9);
        ASSERT_TRUE(leases && leases->size() == 1);
        ASSERT_TRUE(desk.ledger->set_aside(leases->front().id, "too large", "x"));
      }
    }));
    groups.report_new();
    groups.check();
  };
  set_aside(SetAsideGroups::kInARowMax - 1);
  groups.on_group_succeeded();
  set_aside(SetAsideGroups::kInARowMax - 1);
  EXPECT_TRUE(groups.can_generate());
  set_aside(1);
  EXPECT_EQ(groups.can_generate().error().code, Code::kInvalid);
  EXPECT_EQ(set_aside_.size(), 2u * SetAsideGroups::kInARowMax - 1);
}

// The overlay, the desk, a machine's provider and the fleet around one worker. Reports wait in queues, as between
// threads.
class PresenceTest : public DeskLogicTest {
 protected:
  enum Step : int { kJoin, kAway, kLost, kLeaving, kAsksForWork, kMachineEnds, kSteps };

  void begin(WorkerId worker) {
    worker_ = worker;
    attendance_.emplace();
    roster_.emplace(config_, plan_);
    provisioner::FleetRules rules;
    rules.pace = {1000, 1, std::chrono::seconds(10)};
    core_.emplace(rules, std::vector<provisioner::FleetOffer>{{"a", "local", "", 100, 1, 0}},
                  std::vector<std::string>{"a"});
    carry_out(core_->tick(clock_.now()));
    attendance_->add_listener(
        [this](const PresenceChange& change) { roster_->on_presence_change(change, clock_.now()); });
    attendance_->add_listener([this](const PresenceChange& change) {
      to_desk_.push_back(DatabaseWrite{[this, change] { return logic_->leases().on_presence_change(change); }});
    });
    attendance_->add_listener([this](const PresenceChange& change) {
      if (auto event = fleet_event(change)) to_fleet_.push_back(*std::move(event));
    });
    events_.leaving = [this](WorkerId worker) { return attendance_->on_leaving(worker); };
    events_.drained = [this](WorkerId worker) { attendance_->on_drained(worker); };
  }
  void carry_out(const std::vector<provisioner::FleetAction>& actions) {
    using namespace provisioner::fleet;
    for (const provisioner::FleetAction& action : actions) {
      if (const auto* book = std::get_if<Book>(&action)) to_fleet_.push_back(Booked{book->offer, ++ticket_});
      if (const auto* start = std::get_if<Start>(&action)) to_fleet_.push_back(Started{start->ticket, {"i"}, {}});
      if (const auto* stop = std::get_if<Stop>(&action)) to_fleet_.push_back(Stopped{stop->ticket});
      if (const auto* drain = std::get_if<Drain>(&action)) attendance_->on_retired(drain->worker);
    }
  }
  void send(schema::WorkerMessage message) {
    const std::string bytes = message.SerializeAsString();
    ASSERT_TRUE(inbox_.admit(worker_, bytes.size(), false).is_accepted);
    to_desk_.push_back(Incoming{worker_, bytes});
  }
  void perform(Step step) {
    schema::WorkerMessage message;
    switch (step) {
      case kJoin:
        return attendance_->on_joined(worker_, "a", 0);
      case kAway:
        return attendance_->on_away(worker_, "silent");
      case kLost:
        return attendance_->on_lost(worker_, "silent for long");
      case kLeaving:
        message.mutable_leaving();
        return send(message);
      case kAsksForWork:
        message.mutable_request()->set_version(9);  // not published: it gets nothing
        return send(message);
      default:
        to_fleet_.push_back(provisioner::fleet::Ending{ticket_, "outbid", true});
    }
  }
  // Delivers what waits in the queues until they are empty.
  void deliver_all() {
    while (!to_desk_.empty() || !to_fleet_.empty()) {
      for (Deferred& work : std::exchange(to_desk_, {})) logic_->defer(std::move(work));
      logic_->process_deferred();
      for (const provisioner::FleetEvent& event : std::exchange(to_fleet_, {}))
        carry_out(core_->handle(event, clock_.now()));
    }
  }
  void expect_agreement() {
    using provisioner::MachineState;
    attendance_->check();
    core_->check();
    roster_->check();
    const auto entries = roster_->entries();
    const Presence presence = entries.empty() ? Presence::kLost : entries.front().presence;
    EXPECT_EQ(attendance_->alive_count(), presence == Presence::kLost ? 0u : 1u);
    const bool is_retired = logic_->leases().is_retired(worker_);
    EXPECT_FALSE(is_retired && presence == Presence::kLost && !entries.empty());
    const provisioner::FleetMachine* machine = core_->machines().find(worker_);
    if (machine == nullptr) return;
    EXPECT_NE(presence, Presence::kLost) << "the fleet counts with a worker that is lost";
    EXPECT_FALSE(is_retired && machine->state == MachineState::kWorking) << "the desk gives it no work";
    EXPECT_FALSE(!is_retired && machine->state == MachineState::kDraining) << "the desk still gives it work";
  }

  WorkerId worker_;
  const RunConfig config_;
  const provisioner::Plan plan_;
  std::optional<Attendance> attendance_;
  std::optional<Roster> roster_;
  std::optional<provisioner::FleetCore> core_;
  provisioner::Ticket ticket_ = 0;
  std::vector<Deferred> to_desk_;
  std::vector<provisioner::FleetEvent> to_fleet_;
};

TEST_F(PresenceTest, DeskRosterAndFleetAgreeInEveryOrderOfEvents) {
  constexpr int kLength = 5;
  open_logic();
  int orders = 1;
  for (int i = 0; i < kLength; ++i) orders *= kSteps;
  for (int order = 0; order < 2 * orders; ++order) {
    const bool is_delayed = order >= orders;  // nothing is delivered before the last event
    begin(WorkerId{static_cast<std::uint64_t>(order) + 1});
    deliver_all();
    std::string steps;
    for (int i = 0, steps_left = order % orders; i < kLength; ++i, steps_left /= kSteps) {
      steps += std::to_string(steps_left % kSteps);
      perform(static_cast<Step>(steps_left % kSteps));
      if (!is_delayed) deliver_all();
      if (!is_delayed) expect_agreement();
    }
    deliver_all();
    expect_agreement();
    ASSERT_FALSE(HasFailure()) << "steps " << steps << (is_delayed ? ", delivered at the end" : "");
  }
}

}  // namespace
}  // namespace echoline::learner
