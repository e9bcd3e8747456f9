// The parts of the rollout desk and of the service, each alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/random.hpp"
#include "learner/attendance.hpp"
#include "learner/batch_request.hpp"
#include "learner/database_backlog.hpp"
#include "learner/desk_inbox.hpp"
#include "learner/offered_policies.hpp"
#include "learner/roster.hpp"
#include "provisioner/offer_links.hpp"

namespace echoline::learner {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

constexpr WorkerId kAda{1}, kBob{2}, kEve{3};

TEST(DeskInbox, AWorkerWithTooManyUnreadBytesIsExpelled) {
  DeskInbox inbox(Bytes{100});  // so 16 MiB may wait of each
  EXPECT_TRUE(inbox.admit(kAda, 16u << 20, false).is_accepted);
  const auto refused = inbox.admit(kAda, 1, false);
  EXPECT_FALSE(refused.is_accepted);
  EXPECT_THAT(refused.expel_reason, HasSubstr("2 messages of it, 16777217 bytes, wait to be read"));
  EXPECT_TRUE(inbox.admit(kBob, 1, false).is_accepted) << "another worker's flood";
  inbox.release(kAda, 16u << 20);
  EXPECT_TRUE(inbox.admit(kAda, 1, false).is_accepted);
  inbox.check();
}

TEST(DeskInbox, ManySmallMessagesAreTooMuchAsWell) {
  DeskInbox inbox(Bytes{100});
  for (std::size_t i = 0; i < DeskInbox::kMessagesMax; ++i) ASSERT_TRUE(inbox.admit(kAda, 1, false).is_accepted);
  EXPECT_FALSE(inbox.admit(kAda, 1, false).is_accepted);
  inbox.check();
}

TEST(DeskInbox, WhileTheDeskIsHeldUpNoWorkerIsToBlame) {
  DeskInbox inbox(Bytes{100});
  EXPECT_TRUE(inbox.admit(kAda, 16u << 20, true).is_accepted);
  const auto left_out = inbox.admit(kAda, 1, true);
  EXPECT_FALSE(left_out.is_accepted);
  EXPECT_THAT(left_out.expel_reason, IsEmpty());
  EXPECT_EQ(inbox.take_overflowed(), std::set{kAda});
  EXPECT_TRUE(inbox.take_overflowed().empty()) << "each is named once";
}

TEST(DeskInbox, ABarredWorkerIsReadNoMore) {
  DeskInbox inbox(Bytes{100});
  inbox.block(kEve, "it lies");
  inbox.block(kEve, "again");
  EXPECT_TRUE(inbox.is_blocked(kEve));
  EXPECT_FALSE(inbox.is_blocked(kAda));
  const auto refused = inbox.admit(kEve, 1, true);
  EXPECT_FALSE(refused.is_accepted);
  EXPECT_EQ(refused.expel_reason, "it lies");
}

struct RecordedPolicies {
  std::vector<PolicyUnusable> unusable;
  OfferedPolicies policies{2, [this](const PolicyUnusable& policy) { unusable.push_back(policy); }};
};

TEST(OfferedPolicies, LeasesNamePublishedVersionsThatAreFreshEnough) {
  RecordedPolicies t;
  EXPECT_FALSE(t.policies.newest());
  t.policies.begin_publishing(Version{0});
  EXPECT_EQ(t.policies.newest(), Version{0});
  EXPECT_EQ(t.policies.digest_of(Version{0}), nullptr) << "its last byte has not left";
  for (std::uint64_t v = 0; v < 6; ++v) {
    t.policies.finish_publishing(Version{v}, "digest " + std::to_string(v));
    t.policies.check();
  }
  EXPECT_EQ(t.policies.newest_published(), Version{5});
  EXPECT_EQ(t.policies.digest_of(Version{1}), nullptr);
  ASSERT_NE(t.policies.digest_of(Version{2}), nullptr);
  EXPECT_EQ(*t.policies.digest_of(Version{2}), "digest 2");
}

TEST(OfferedPolicies, TwoWorkersMakeAVersionUnusableAndOneOnlyForItself) {
  RecordedPolicies t;
  t.policies.finish_publishing(Version{0}, "d");
  EXPECT_FALSE(t.policies.report_unusable(kAda, "NaN")) << "it has not asked";
  for (const WorkerId worker : {kAda, kBob, kEve}) t.policies.record_request(worker, Version{0});
  const auto first = t.policies.report_unusable(kAda, "NaN");
  ASSERT_TRUE(first);
  EXPECT_TRUE(first->is_workers_first);
  EXPECT_FALSE(t.policies.check_unusable(Version{0}));
  EXPECT_TRUE(t.policies.check_unusable_for(kAda, Version{0}));
  EXPECT_FALSE(t.policies.check_unusable_for(kBob, Version{0}));
  EXPECT_FALSE(t.policies.report_unusable(kAda, "NaN again")->is_workers_first);
  EXPECT_FALSE(t.policies.check_unusable(Version{0})) << "one worker that repeats itself";
  EXPECT_TRUE(t.policies.report_unusable(kBob, "Inf")->is_workers_first);
  EXPECT_TRUE(t.policies.check_unusable(Version{0}));
  EXPECT_TRUE(t.policies.check_unusable(Version{0}));
  ASSERT_EQ(t.unusable.size(), 1u) << "told once";
  EXPECT_EQ(t.unusable[0].workers, (std::vector{kAda, kBob}));
  EXPECT_EQ(t.unusable[0].detail, "Inf");
  EXPECT_TRUE(t.policies.check_unusable_for(kEve, Version{0}));
  t.policies.check();
}

TEST(OfferedPolicies, TheOnlyWorkerIsEnough) {
  RecordedPolicies t;
  t.policies.finish_publishing(Version{0}, "d");
  t.policies.record_request(kAda, Version{0});
  t.policies.record_request(kBob, Version{0});
  t.policies.report_unusable(kAda, "NaN");
  EXPECT_FALSE(t.policies.check_unusable(Version{0}));
  t.policies.forget_worker(kBob);
  EXPECT_TRUE(t.policies.check_unusable(Version{0}));
}

TEST(BatchRequest, OnlyTheStepThatIsWaitedForIsAnswered) {
  BatchRequest batch_request;
  EXPECT_FALSE(batch_request.requested_step());
  EXPECT_FALSE(batch_request.answer(3, std::optional<replay_buffer::Batch>())) << "no step was requested";
  batch_request.request(4);
  EXPECT_EQ(batch_request.requested_step(), 4u);
  EXPECT_FALSE(batch_request.answer(3, std::optional<replay_buffer::Batch>()));
  std::thread desk([&] { EXPECT_TRUE(batch_request.answer(4, std::optional(replay_buffer::Batch{}))); });
  const auto answer = batch_request.wait(std::chrono::seconds(60));
  desk.join();
  ASSERT_TRUE(answer);
  EXPECT_TRUE(answer->has_value());
  EXPECT_FALSE(batch_request.requested_step());
}

TEST(BatchRequest, StopEndsTheWaiting) {
  BatchRequest batch_request;
  batch_request.request(0);
  batch_request.stop();
  const auto answer = batch_request.wait(std::chrono::seconds(60));
  ASSERT_TRUE(answer);
  EXPECT_FALSE(answer->has_value());
}

TEST(LeaseClock, AJumpOfTheWallClockEndsNoLease) {
  class Jumping final : public Clock {
   public:
    TimePoint now() const override { return now_; }
    double unix_seconds() const override { return unix_s_; }
    TimePoint now_{};
    double unix_s_ = 1000;
  } clock;
  LeaseClock leases(&clock);
  clock.now_ += std::chrono::seconds(5);
  clock.unix_s_ = 9e9;
  EXPECT_EQ(leases.unix_seconds(), 1005);
  EXPECT_EQ(leases.unix_seconds_at_last_tick(), 1000);
  leases.tick(clock.now_);
  EXPECT_EQ(leases.unix_seconds_at_last_tick(), 1005);
  EXPECT_DEATH(leases.tick(TimePoint{}), "went back");
}

struct BacklogFixture {
  static Error error(Code code) { return fail(code, "write", "x"); }
  ManualClock clock;
  LeaseClock leases{&clock};
  std::vector<std::string> reports;
  DatabaseBacklog backlog{leases, std::chrono::seconds(1), std::chrono::minutes(1), [this](const Error* e) {
                            reports.push_back(e ? std::string(to_string(e->code)) : "stores");
                          }};
};

TEST(DatabaseBacklog, WaitingItemsAreHandledInOrderOnceTheDatabaseStores) {
  BacklogFixture e;
  EXPECT_FALSE(e.backlog.stall_if_database_error(e.error(Code::kInvalid))) << "an error of another kind";
  bool disk_is_full = true;
  std::vector<std::string> handled;
  e.backlog.push_back(Incoming{kAda, "a"});
  e.backlog.push_back(DatabaseWrite{[&]() -> Status {
    if (disk_is_full) return e.error(Code::kExhausted);
    handled.push_back("write");
    return ok();
  }});
  e.backlog.push_back(Incoming{kAda, "b"});
  const auto process_backlog = [&] {
    e.backlog.process_backlog(8, [&](std::vector<Incoming> messages) {
      for (const Incoming& message : messages) handled.push_back(message.bytes);
    });
    e.backlog.check();
  };
  process_backlog();
  EXPECT_THAT(handled, testing::ElementsAre("a"));
  EXPECT_EQ(e.backlog.state(), DatabaseBacklog::State::kStalled);
  e.backlog.push_back(Incoming{kAda, "c"});
  process_backlog();
  EXPECT_EQ(e.backlog.backlog_size(), 3u);
  EXPECT_FALSE(e.backlog.is_retry_due());
  e.clock.advance(std::chrono::seconds(1));
  EXPECT_TRUE(e.backlog.is_retry_due());
  disk_is_full = false;
  e.backlog.on_retry_succeeded();
  e.backlog.finish_catching_up();
  EXPECT_EQ(e.backlog.state(), DatabaseBacklog::State::kCatchingUp) << "the backlog is not empty";
  process_backlog();
  e.backlog.finish_catching_up();
  EXPECT_EQ(e.backlog.state(), DatabaseBacklog::State::kStoring);
  EXPECT_THAT(handled, testing::ElementsAre("a", "write", "b", "c"));
  EXPECT_EQ(e.reports.size(), 2u) << "one hold-up";
  EXPECT_EQ(e.reports.back(), "stores");
}

// Every order of six steps: only the moves of the table happen, and an abandoned database stays abandoned.
TEST(DatabaseBacklog, EveryOrderOfFailuresAndRetriesKeepsItsStatesApart) {
  using State = DatabaseBacklog::State;
  for (int order = 0; order < 4096; ++order) {
    BacklogFixture e;
    for (int step = 0, actions_left = order; step < 6; ++step, actions_left /= 4) {
      const State before = e.backlog.state();
      switch (actions_left % 4) {
        case 0:
          (void)e.backlog.stall_on_error(e.error(Code::kExhausted));
          EXPECT_EQ(e.backlog.state(), before == State::kGivenUp ? before : State::kStalled);
          break;
        case 1:
          (void)e.backlog.stall_on_error(e.error(Code::kIo));
          e.clock.advance(std::chrono::minutes(1));
          break;
        case 2:
          if (e.backlog.is_retry_due()) e.backlog.on_retry_succeeded();
          break;
        default:
          e.backlog.finish_catching_up();
          EXPECT_NE(e.backlog.state(), State::kCatchingUp) << "there is no backlog";
      }
      e.backlog.check();
      EXPECT_TRUE(before != State::kGivenUp || e.backlog.state() == State::kGivenUp);
    }
  }
  BacklogFixture e;
  EXPECT_DEATH(e.backlog.on_retry_succeeded(), "moves from state 0 to 2");
}

TEST(Attendance, EveryListenerGetsEveryChangeInTheSameOrder) {
  using Kind = PresenceChange::Kind;
  Attendance attendance;
  std::vector<std::pair<int, Kind>> received;
  const auto listener = [&](int number) {
    return [&received, number](const PresenceChange& change) { received.emplace_back(number, change.kind); };
  };
  const auto take_received = [&] { return std::exchange(received, {}); };
  attendance.add_listener(listener(1));
  attendance.on_joined(kAda, "a", 0);
  attendance.on_joined(kBob, "b", 0);
  attendance.on_away(kBob, "silent");
  (void)take_received();
  attendance.add_listener(listener(2));
  EXPECT_THAT(take_received(), testing::ElementsAre(std::pair(2, Kind::kJoined))) << "Ada alone is present";
  attendance.on_joined(kBob, "b", 0);
  EXPECT_THAT(take_received(), testing::ElementsAre(std::pair(1, Kind::kBack), std::pair(2, Kind::kBack)));
  attendance.on_drained(kAda);
  EXPECT_THAT(take_received(), IsEmpty()) << "it was not told to drain";
  attendance.on_leaving(kAda);
  attendance.on_drained(kAda);
  attendance.on_lost(kAda, "gone");
  EXPECT_EQ(take_received().size(), 6u);
  attendance.on_leaving(kAda);
  attendance.on_drained(kAda);
  attendance.on_away(kAda, "gone");
  EXPECT_THAT(take_received(), IsEmpty()) << "it is lost";
  EXPECT_EQ(attendance.alive_count(), 1u);
  attendance.close();
  attendance.on_lost(kBob, "the run has ended");
  EXPECT_EQ(attendance.alive_count(), 1u) << "the end of the run makes workers leave";
  attendance.check();
}

struct RosterFixture {
  RunConfig config;
  provisioner::Plan plan = [] {
    provisioner::Plan planned;
    planned.rows.resize(1);
    planned.rows[0].offer.id = "planned";
    planned.rows[0].offer.place = "Oslo, NO";
    planned.rows[0].offer.up = BitRate::from_mbit_per_s(40);
    planned.rows[0].offer.gpu_usd_per_hour = 0.25;
    planned.rows[0].offer.storage_usd_per_hour = 0.0;
    return planned;
  }();
  Roster roster{config, plan};
  void join(WorkerId worker, const std::string& offer) {
    roster.on_presence_change({PresenceChange::Kind::kJoined, worker, offer}, TimePoint{});
  }
};

// The same links as in plans and simulations (RunSim.PlanAndRunTakeTheSameLinks).
TEST(Roster, LinksAreThoseOfTheOfferOrAssumedAndCapped) {
  RosterFixture e;
  e.config.paths.worker_rate = BitRate::from_mbit_per_s(50);
  e.config.fleet.assume.down = BitRate::from_mbit_per_s(30);
  e.join(kAda, "planned");
  e.join(kBob, "by hand");
  const std::vector<chains::WorkerLink> links = e.roster.links_of(std::vector{kAda, kBob});
  const auto ada = provisioner::links_of(e.plan.rows[0].offer, e.config.fleet, e.config.paths);
  EXPECT_EQ(links[0].up, ada.up);
  EXPECT_EQ(links[0].down, ada.down);
  EXPECT_EQ(ada.up, BitRate::from_mbit_per_s(40)) << "stated";
  EXPECT_EQ(ada.down, BitRate::from_mbit_per_s(30)) << "assumed";
  EXPECT_EQ(links[1].up, BitRate::from_mbit_per_s(50)) << "its rate is unknown, so the cap applies";
  e.config.paths.worker_rate = BitRate::from_mbit_per_s(20);
  EXPECT_EQ(e.roster.links_of(std::vector{kAda})[0].up, BitRate::from_mbit_per_s(20));
}

// The overlay plans with these until a worker is measured. It enforces none of them.
TEST(Roster, ExpectedLinksAreThoseOfTheOffer) {
  RosterFixture e;
  EXPECT_EQ(e.roster.expected_links("planned").up, BitRate::from_mbit_per_s(40));
  EXPECT_FALSE(e.roster.expected_links("planned").down) << "not stated";
  EXPECT_FALSE(e.roster.expected_links("by hand").up);
  e.config.fleet.assume.down = BitRate::from_mbit_per_s(30);
  EXPECT_EQ(e.roster.expected_links("planned").down, BitRate::from_mbit_per_s(30));
  e.config.paths.worker_rate = BitRate::from_mbit_per_s(20);
  EXPECT_EQ(e.roster.expected_links("planned").up, BitRate::from_mbit_per_s(20));
}

TEST(Roster, AWorkersPriceIsThatOfItsOffer) {
  RosterFixture e;
  e.join(kAda, "planned");
  e.join(kBob, "by hand");
  EXPECT_EQ(e.roster.entries()[0].price_usd_per_hour, 0.25);
  EXPECT_FALSE(e.roster.entries()[1].price_usd_per_hour) << "no offer is known of it";
}

TEST(Roster, AVersionIsEverywhereOnceAllThatArePresentHaveIt) {
  RosterFixture e;
  for (const WorkerId worker : {kAda, kBob}) e.join(worker, "");
  e.roster.record_acknowledgement(kAda, Version{3}, {});
  EXPECT_FALSE(e.roster.all_present_have(Version{3}));
  e.roster.on_presence_change({PresenceChange::Kind::kAway, kBob}, TimePoint{});
  EXPECT_TRUE(e.roster.all_present_have(Version{3}));
}

TEST(Roster, LinksAreThoseOfTheOfferThatWasRented) {
  RosterFixture e;
  e.join(kAda, "planned");
  const std::vector workers{kAda};
  EXPECT_EQ(e.roster.links_of(workers)[0].up, BitRate::from_mbit_per_s(40));
  provisioner::Offer rented = e.plan.rows[0].offer;
  rented.up = BitRate::from_mbit_per_s(10);
  e.roster.add_rented_offer(rented);
  EXPECT_EQ(e.roster.links_of(workers)[0].up, BitRate::from_mbit_per_s(10));
}

// Random events in random order, also of workers that never joined.
TEST(Roster, ItsPartsAgreeAfterRandomEvents) {
  Random random(7, 0);
  RosterFixture e;
  TimePoint now{};
  for (int i = 0; i < 3000; ++i) {
    const WorkerId worker{1 + random.below(6)};
    now += std::chrono::milliseconds(random.below(500));
    switch (random.below(7)) {
      case 0:
        e.roster.on_presence_change({PresenceChange::Kind::kBack, worker, "planned"}, now);
        break;
      case 1:
        e.roster.on_presence_change({PresenceChange::Kind::kAway, worker}, now);
        break;
      case 2:
        e.roster.on_presence_change({PresenceChange::Kind::kLost, worker}, now);
        break;
      case 3:
        e.roster.record_accepted(worker, random.below(10), 0.5);
        break;
      case 4:
        e.roster.take_heartbeat(worker, schema::Vitals(), now);
        break;
      case 5:
        e.roster.record_turned_away(worker);
        break;
      default:
        e.roster.record_acknowledgement(worker, Version{random.below(9)}, {});
    }
    e.roster.check();
  }
}

}  // namespace
}  // namespace echoline::learner
