// The parts of the agent: each alone, with its invariants and its changes of state.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/ending.hpp"
#include "worker/inbox.hpp"
#include "worker/vitals.hpp"
#include "worker/work.hpp"

namespace echoline::worker {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const TimePoint kNow = TimePoint(seconds(100));

schema::Submission submission(std::uint64_t lease, int rollouts) {
  schema::Submission message;
  message.set_lease(lease);
  for (int i = 0; i < rollouts; ++i) message.add_trajectories();
  return message;
}
schema::WorkGrant grant(std::initializer_list<std::uint32_t> rollouts) {
  schema::WorkGrant message;
  for (const std::uint32_t n : rollouts) {
    schema::Lease& lease = *message.add_leases();
    lease.set_id(n);
    lease.set_rollouts(n);
  }
  return message;
}

TEST(Work, CountsTheRolloutsOfLeasesAndResults) {
  WorkQueue work(std::nullopt);
  EXPECT_EQ(work.next_due(), kNever);
  schema::WorkGrant granted = grant({3, 4});
  work.add_leases(granted);
  work.check();
  EXPECT_TRUE(work.has_leases());
  EXPECT_EQ(work.rollouts(), 7u);
  const auto leases = work.take_leases();
  ASSERT_EQ(leases.size(), 2u);
  EXPECT_EQ(leases.front().id(), 3u);
  EXPECT_EQ(work.rollouts(), 0u) << "they are in the groups now";
  work.add_result(kNow, submission(3, 3), kNow);
  work.add_result(kNow, submission(4, 4), kNow + milliseconds(1));
  work.check();
  EXPECT_THAT(work.lease_ids_of_results(), ElementsAre(3, 4));
  const auto first = work.take_due_result(kNow);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->submission.lease(), 3u);
  EXPECT_EQ(first->rollouts, 3u);
  EXPECT_FALSE(work.take_due_result(kNow));
  EXPECT_EQ(work.rollouts(), 4u);
  granted = grant({5});
  work.add_leases(granted);
  work.clear();
  work.check();
  EXPECT_EQ(work.rollouts(), 0u);
  EXPECT_FALSE(work.has_leases() || work.has_results());
}

TEST(Work, HoldsResultsToTheSpeed) {
  WorkQueue work(2);
  work.add_result(kNow, submission(1, 2), kNow);
  work.add_result(kNow, submission(2, 2), kNow);
  work.check();
  EXPECT_EQ(work.next_due(), kNow + seconds(1));
  EXPECT_FALSE(work.take_due_result(kNow + milliseconds(999)));
  EXPECT_TRUE(work.take_due_result(kNow + seconds(1)));
  EXPECT_EQ(work.next_due(), kNow + seconds(2));
}

TEST(InstallationQueue, OnlyTheNewestIsActivated) {
  InstallationQueue policies;
  EXPECT_DEATH(policies.begin_installation(kNow), "0 policies wait");
  for (std::uint64_t v = 1; v <= 3; ++v) {
    overlay::Publication publication;
    publication.version = Version{v};
    policies.add(publication, kNow);
  }
  EXPECT_FALSE(policies.begin_installation(kNow + seconds(1)).activate);
  EXPECT_DEATH(policies.begin_installation(kNow), "2 policies wait") << "one is being installed";
  policies.on_installed(kNow + seconds(3));
  policies.check();
  EXPECT_FALSE(policies.begin_installation(kNow + seconds(3)).activate);
  policies.on_failed();
  const auto newest = policies.begin_installation(kNow + seconds(4));
  EXPECT_EQ(newest.version, Version{3});
  EXPECT_TRUE(newest.activate);
  policies.on_installed(kNow + seconds(5));
  policies.check();
  EXPECT_TRUE(policies.empty());
  EXPECT_EQ(policies.counts().installed, 2u) << "a failed installation does not count";
  EXPECT_EQ(policies.counts().total_wait, seconds(5));
  EXPECT_EQ(policies.counts().total_install_time, seconds(3));
}

TEST(Vitals, CountTimeWithWork) {
  static int readings;
  readings = 0;
  const auto read = [] {
    ++readings;
    return ProcessMemory{Bytes{7}, Bytes{8}, std::nullopt};
  };
  Vitals vitals;
  vitals.record_work(kNow, true);
  vitals.record_work(kNow + seconds(2), false);
  vitals.record_work(kNow + seconds(5), true);
  vitals.record_work(kNow + seconds(6), true);
  vitals.add_generated(4);
  vitals.check();
  const schema::Vitals report = vitals.report({2, seconds(1), seconds(3)}, kNow, read);
  EXPECT_EQ(report.busy_s(), 3);
  EXPECT_EQ(report.rollouts(), 4u);
  EXPECT_EQ(report.policies(), 2u);
  EXPECT_EQ(report.install_s(), 4);
  EXPECT_EQ(report.resident_bytes(), 7u);
  EXPECT_EQ(report.heap_bytes(), 0u);
  vitals.report({}, kNow + Vitals::kMemoryInterval - milliseconds(1), read);
  EXPECT_EQ(readings, 1);
  vitals.report({}, kNow + Vitals::kMemoryInterval, read);
  EXPECT_EQ(readings, 2);
}

TEST(Progress, GrowsAlsoWhileResultsWait) {
  Progress progress;
  EXPECT_TRUE(progress.is_due(kNow));
  progress.on_reported(kNow);
  EXPECT_FALSE(progress.is_due(kNow + seconds(3) - milliseconds(1)));
  progress.set_interval(seconds(1));
  progress.set_interval(seconds(0));
  progress.on_reported(kNow);
  EXPECT_TRUE(progress.is_due(kNow + seconds(1)));
  EXPECT_EQ(progress.next_count(10, false), 10u);
  EXPECT_EQ(progress.next_count(10, true), 11u);
  EXPECT_EQ(progress.next_count(10, true), 12u);
  EXPECT_EQ(progress.next_count(11, false), 13u);
}

TEST(Ending, AStopRequestLeavesTimeForLeasedWork) {
  Ending ending;
  EXPECT_FALSE(ending.finish_time_is_over(kNow));
  EXPECT_TRUE(ending.begin_finishing(kNow));
  EXPECT_FALSE(ending.begin_finishing(kNow + seconds(1))) << "the learner knows";
  ending.check();
  EXPECT_FALSE(ending.finish_time_is_over(kNow + Ending::kFinishMax - milliseconds(1)));
  EXPECT_TRUE(ending.finish_time_is_over(kNow + Ending::kFinishMax));
  EXPECT_FALSE(ending.has_ended());
  EXPECT_EQ(ending.reason(), "");
}

TEST(Ending, TheLearnersReasonCounts) {
  for (const bool lost_first : {false, true}) {
    Ending ending;
    if (lost_first) ending.on_disconnected("no answer", false);
    ending.on_run_ended("the run is complete");
    EXPECT_TRUE(ending.has_ended());
    EXPECT_FALSE(ending.begin_finishing(kNow));
    if (!lost_first) ending.on_disconnected("closed by the peer", true);
    ending.check();
    EXPECT_EQ(ending.reason(), "the run is complete");
    EXPECT_EQ(ending.ended_cleanly(), !lost_first);
  }
}

TEST(Inbox, SaysThatAPolicyWaitsUntilItIsTaken) {
  Inbox inbox;
  const overlay::WorkerEvents node = inbox.node_events();
  node.joined(WorkerId{7}, "");
  node.publication({});
  EXPECT_TRUE(inbox.policy_waits());
  ASSERT_TRUE(std::holds_alternative<event::Joined>(*inbox.pop(Duration(0))));
  EXPECT_TRUE(inbox.policy_waits());
  ASSERT_TRUE(std::holds_alternative<event::PolicyArrived>(*inbox.pop(Duration(0))));
  EXPECT_FALSE(inbox.policy_waits());
  for (int i = 0; i < 3; ++i) node.part({});
  ASSERT_TRUE(std::holds_alternative<event::PartsArrived>(*inbox.pop(Duration(0))));
  EXPECT_FALSE(inbox.pop(Duration(0))) << "one event for all parts";
  EXPECT_EQ(inbox.take_parts().size(), 3u);
  EXPECT_THAT(inbox.take_parts(), IsEmpty());
}

TEST(Inbox, SaysThatEventsAreLost) {
  Inbox inbox;
  for (std::size_t i = 0; i < Inbox::kEventsMax; ++i) inbox.post(event::Message{});
  inbox.wake();
  EXPECT_TRUE(inbox.check_overflow()) << "a wake-up may be lost: the inbox is not empty";
  inbox.post(event::Message{});
  EXPECT_THAT(inbox.check_overflow().error().message(),
              HasSubstr("4096 messages and policies from the learner wait unread"));
}

}  // namespace
}  // namespace echoline::worker
