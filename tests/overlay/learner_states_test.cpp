// The parts of the learner's protocol, each alone.
#include <gtest/gtest.h>

#include "overlay/learner/broadcast_times.hpp"
#include "overlay/learner/catch_ups.hpp"
#include "overlay/learner/helpers.hpp"
#include "overlay/learner/learner_file.hpp"
#include "overlay/learner/publications.hpp"
#include "overlay/learner/reachability.hpp"
#include "overlay/learner/roster.hpp"
#include "overlay/learner/slow_hops.hpp"
#include "overlay/learner/topology_plan.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {
namespace {

constexpr TimePoint kStart{std::chrono::seconds(10)};
constexpr Duration kSecond = std::chrono::seconds(1);

BroadcastTimes::Broadcast broadcast(std::uint64_t version, std::set<WorkerId> active) {
  BroadcastTimes::Broadcast b;
  b.version = Version{version};
  b.id[0] = static_cast<std::byte>(version);
  b.published = kStart;
  b.active = b.waiting_for = std::move(active);
  return b;
}

Installed ack(std::uint64_t version) { return {Version{version}, {}, 0, {}, {}}; }
double as_all(const BroadcastTimes::Broadcast&) { return 1; }

TEST(BroadcastTimes, EndsWithTheQuorum) {
  BroadcastTimes times(0.5);
  times.begin(broadcast(1, {WorkerId{1}, WorkerId{2}, WorkerId{3}, WorkerId{4}}));
  times.on_acknowledged(WorkerId{2}, ack(1), {}, kStart + kSecond);
  EXPECT_TRUE(times.take_done(as_all, kStart + kSecond).empty());
  times.on_acknowledged(WorkerId{2}, ack(1), {}, kStart + 2 * kSecond);  // again
  EXPECT_TRUE(times.take_done(as_all, kStart + 2 * kSecond).empty());
  times.on_acknowledged(WorkerId{3}, ack(2), {}, kStart + 3 * kSecond);  // a newer version contains it
  times.check();
  const auto done = times.take_done(as_all, kStart + 4 * kSecond);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].ended_at, kStart + 3 * kSecond);
  EXPECT_EQ(done[0].acknowledged, 2u);
  EXPECT_TRUE(times.open_broadcasts().empty());
}

TEST(BroadcastTimes, LeavesOutASingleLateWorker) {
  for (const double expected : {1.0, 5.0}) {
    BroadcastTimes times(0.9);
    times.begin(broadcast(1, {WorkerId{1}, WorkerId{2}, WorkerId{3}}));
    times.on_acknowledged(WorkerId{1}, ack(1), {}, kStart + kSecond);
    times.on_acknowledged(WorkerId{2}, ack(1), {}, kStart + 2 * kSecond);
    times.on_acknowledged(WorkerId{3}, ack(1), {}, kStart + 8 * kSecond);
    const auto done = times.take_done([&](const auto&) { return expected; }, kStart + 8 * kSecond);
    ASSERT_EQ(done.size(), 1u);
    EXPECT_EQ(done[0].ended_at,
              kStart + (expected > 1 ? 8 : 2) * kSecond);  // whether its link explains the delay, or not
    EXPECT_EQ(done[0].acknowledged, expected > 1 ? 3u : 2u);
  }
}

TEST(BroadcastTimes, DoesNotWaitForAWorkerThatLostItsPlace) {
  BroadcastTimes times(1);
  times.begin(broadcast(1, {WorkerId{1}, WorkerId{2}}));
  times.on_acknowledged(WorkerId{1}, ack(1), {}, kStart + kSecond);
  times.remove(WorkerId{2});
  times.check();
  const auto done = times.take_done(as_all, kStart + 5 * kSecond);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].ended_at, kStart + kSecond);
}

TEST(BroadcastTimes, GivesUpAWorkerThatNeverFinishes) {
  BroadcastTimes times(1);
  times.begin(broadcast(1, {WorkerId{1}, WorkerId{2}, WorkerId{3}}));
  times.on_acknowledged(WorkerId{1}, ack(1), {}, kStart + kSecond);
  times.on_acknowledged(WorkerId{2}, ack(1), {}, kStart + 2 * kSecond);
  const TimePoint late =
      kStart + 2 * kSecond + BroadcastTimes::kStragglerFactor * 2 * kSecond + BroadcastTimes::kStragglerPatience;
  EXPECT_TRUE(times.take_given_up(late - Duration{1}).empty());
  const auto done = times.take_given_up(late);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].broadcast.waiting_for, std::set{WorkerId{3}});
  EXPECT_EQ(done[0].acknowledged, 2u);
}

TEST(BroadcastTimes, ForgetsTheOldestBeyondItsLimit) {
  BroadcastTimes times(1);
  for (std::uint64_t v = 1; v <= BroadcastTimes::kBroadcastsMax + 1; ++v) times.begin(broadcast(v, {WorkerId{1}}));
  times.check();
  EXPECT_EQ(times.open_broadcasts().front().version, Version{2});
}

TEST(HelpBudget, AllowsHelpsThatCanBeSentInTime) {
  HelpBudget budget;
  EXPECT_TRUE(budget.begin({100, 100, 10, kSecond, 0}, kStart));
  EXPECT_TRUE(budget.begin({100, 100, 10, kSecond, 0}, kStart));
  EXPECT_TRUE(budget.begin({100, 100, 10, kSecond, 0}, kStart));   // 200 bytes would be pending, and 210 are allowed
  EXPECT_FALSE(budget.begin({100, 100, 10, kSecond, 0}, kStart));  // 300
  EXPECT_TRUE(budget.begin({100, 100, 10, kSecond, 90}, kStart));  // 90 of them have been sent
  EXPECT_FALSE(budget.begin({100, 100, 10, kSecond, 90}, kStart));
  // In that time, 100 could have been sent.
  EXPECT_TRUE(budget.begin({100, 100, 10, kSecond, 90}, kStart + 10 * kSecond));
}

LearnerRules rules() {
  LearnerRules rules;
  rules.heartbeat = kSecond;
  rules.network.heartbeat_timeout = 20 * kSecond;
  rules.network.silence_min = {};
  return rules;
}

TEST(Presence, FallsSilentAfterTheLearnedTimeAndGoesAwayAfterTheAgreedTime) {
  Presence presence;
  presence.join(rules(), kStart);
  EXPECT_EQ(presence.due_state(rules(), kStart + 4 * kSecond - Duration{1}), Presence::State::kHere);
  EXPECT_EQ(presence.due_state(rules(), kStart + 4 * kSecond), Presence::State::kSilent);
  EXPECT_EQ(presence.due_state(rules(), kStart + 20 * kSecond), Presence::State::kAway);
  presence.fall_silent();
  EXPECT_TRUE(presence.on_frame(rules(), kStart + 5 * kSecond));
  EXPECT_FALSE(presence.on_frame(rules(), kStart + 5 * kSecond));
  // The timeout is twice as long as before.
  EXPECT_EQ(presence.due_state(rules(), kStart + 13 * kSecond - Duration{1}), Presence::State::kHere);
  presence.postpone(kSecond, kStart + 13 * kSecond);
  EXPECT_EQ(presence.due_state(rules(), kStart + 13 * kSecond), Presence::State::kHere);
  EXPECT_EQ(presence.due_state(rules(), kStart + 14 * kSecond), Presence::State::kSilent);
}

TEST(Presence, AChildsComplaintCountsOnceHeartbeatsAreMissed) {
  Presence presence;
  presence.join(rules(), kStart);
  presence.on_complaint(kStart + kSecond);
  EXPECT_FALSE(presence.is_silent_to_child(rules(), kStart + 3 * kSecond));
  EXPECT_TRUE(presence.is_silent_to_child(rules(), kStart + 4 * kSecond));
  EXPECT_FALSE(presence.is_silent_to_child(rules(), kStart + kSecond + Presence::kComplaintTime));
}

TEST(Place, FormerParentsMayBeAccusedForAWhile) {
  Place place;
  Assign assign;
  assign.parents = {{WorkerId{1}, {}, 1, false}};
  place.replace(assign, kStart);
  EXPECT_TRUE(place.edge_from(WorkerId{1}) && place.may_accuse(WorkerId{1}, kStart));
  assign.parents[0].worker = WorkerId{2};
  place.replace(assign, kStart);
  EXPECT_FALSE(place.edge_from(WorkerId{1}));
  EXPECT_TRUE(place.may_accuse(WorkerId{1}, kStart + Place::kAccusationTime));
  EXPECT_FALSE(place.may_accuse(WorkerId{1}, kStart + Place::kAccusationTime + Duration{1}));
  EXPECT_FALSE(place.may_accuse(WorkerId{3}, kStart));
}

TEST(Roster, AWorkerKeepsItsRecordWhileItIsAway) {
  Roster roster;
  roster.join(WorkerId{1}, ConnId{2}, rules(), kStart).is_straggler = true;
  roster.check();
  ASSERT_TRUE(roster.find_by_control(ConnId{2}));
  roster.set_away(roster.disconnect(WorkerId{1}), "lost", kStart + kSecond);
  roster.check();
  EXPECT_TRUE(roster.empty() && roster.is_known(WorkerId{1}) && !roster.find_by_control(ConnId{2}));
  EXPECT_EQ(roster.away().at(WorkerId{1}).presence.away_reason(), "lost");
  EXPECT_TRUE(roster.join(WorkerId{1}, ConnId{4}, rules(), kStart + 2 * kSecond).is_straggler);
  roster.drop(roster.disconnect(WorkerId{1}));
  roster.check();
  EXPECT_FALSE(roster.disconnect(WorkerId{1}) || roster.forget_away(WorkerId{1}) || roster.is_known(WorkerId{1}));
  EXPECT_EQ(roster.joined_count(), 2u);
  EXPECT_EQ(roster.lost_count(), 1u);
}

TEST(Roster, CountsTheBytesOfPartialMessages) {
  Roster roster;
  for (std::uint64_t id = 1; id <= 2; ++id)
    roster.join(WorkerId{id}, ConnId{2 * id}, rules(), kStart).view.info.id = {id};
  const Slice bytes(std::vector<std::byte>(100));
  const auto add = [&](std::uint64_t id, std::size_t size) {
    return roster.add_part(WorkerId{id}, {FrameType::kApplication, bytes.part(0, size), {}, {}, true}, 100);
  };
  ASSERT_TRUE(add(1, 80) && add(2, 71));
  EXPECT_EQ(roster.incomplete_bytes(), 151u);
  EXPECT_EQ(roster.sender_of_most_incomplete_bytes().view.info.id, WorkerId{1});
  EXPECT_FALSE(add(2, 100)) << "too long for one message";
  roster.check();
  roster.disconnect(WorkerId{1});
  roster.check();
  EXPECT_EQ(roster.incomplete_bytes(), 0u);
}

TEST(Publications, VersionsGrowAndKeepTheirDigests) {
  LearnerState state;
  state.published[Version{3}] = Digest{};
  Publications all(state, 1);
  EXPECT_FALSE(all.has_announced());
  EXPECT_EQ(all.newest(), Version{3});
  EXPECT_FALSE(all.check_next({Version{2}, {}}));
  EXPECT_FALSE(all.check_next({Version{5}, Version{4}})) << "its base was not published";
  ASSERT_TRUE(all.check_next({Version{5}, Version{3}}));
  all.announce(Version{5});
  EXPECT_FALSE(all.check_next({Version{5}, Version{3}}));
  EXPECT_EQ(all.newest(), Version{5});
  EXPECT_EQ(all.newest_published(all.newest()), Version{3});
  all.abandon({});
  EXPECT_EQ(all.newest(), Version{3});
  all.announce(Version{5});
  Manifest manifest;
  EXPECT_TRUE(all.close({Version{5}, Version{3}}, manifest, {}).value());
  EXPECT_FALSE(all.close({Version{5}, {}}, manifest, {}).value()) << "it was published before";
  manifest.policy_digest[0] = std::byte{1};
  EXPECT_FALSE(all.close({Version{5}, {}}, manifest, {})) << "it has another digest";
  all.check();
  EXPECT_EQ(all.take_closing().size(), 2u);
  EXPECT_EQ(all.newest_published(Version{3}), std::nullopt);
}

TEST(LearnerFile, IsSavedOnceNoChangeIsLeft) {
  std::vector<Action> actions;
  LearnerFile file({}, true, actions);
  EXPECT_FALSE(file.save() || file.save() || file.was_saved());
  EXPECT_EQ(actions.size(), 1u) << "one write at a time";
  EXPECT_TRUE(file.on_succeeded());
  EXPECT_FALSE(file.was_saved()) << "the second change is not on disk";
  EXPECT_FALSE(file.save() || file.on_succeeded());
  EXPECT_TRUE(file.was_saved() && file.is_settled());
  LearnerFile volatile_file({}, false, actions);
  EXPECT_TRUE(volatile_file.save() && volatile_file.was_saved());
  EXPECT_EQ(actions.size(), 2u);
}

TEST(Helpers, TheCheapestHelpsUntilItHasMoreWorkThanOthers) {
  Helpers helpers;
  const std::vector<Helpers::Candidate> candidates{
      {WorkerId{1}, 100, 0, false}, {WorkerId{2}, 150, 0, false}, {WorkerId{3}, 10, 0, true}};
  EXPECT_EQ(helpers.choose(WorkerId{9}, candidates, 1e9).helper, WorkerId{1});
  helpers.begin(WorkerId{9}, WorkerId{1});
  EXPECT_EQ(helpers.choose(WorkerId{8}, candidates, 1e9).helper, WorkerId{2}) << "200 against 150";
  EXPECT_EQ(helpers.choose(WorkerId{9}, candidates, 1e9).helper, WorkerId{2}) << "it was sent to the first";
  EXPECT_EQ(helpers.choose(WorkerId{9}, candidates, 99).helper, WorkerId{3}) << "the others cost more";
  helpers.begin(WorkerId{9}, WorkerId{2});
  helpers.check();
  EXPECT_EQ(helpers.helped_count(WorkerId{1}), 0u);
  EXPECT_EQ(helpers.helper_of(WorkerId{9}), WorkerId{2});
  helpers.on_installed(WorkerId{9});
  EXPECT_EQ(helpers.choose(WorkerId{9}, candidates, 1e9).helper, WorkerId{1});
  for (std::uint64_t id = 10; id < 10 + Helpers::kHelpedMax; ++id) helpers.begin(WorkerId{id}, WorkerId{1});
  const auto busy = helpers.choose(WorkerId{9}, std::span(candidates).first(1), 1e9);
  EXPECT_TRUE(busy.some_candidate_full && !busy.helper);
  helpers.forget(WorkerId{10});
  helpers.check();
  EXPECT_EQ(helpers.helped_count(WorkerId{1}), Helpers::kHelpedMax - 1);
}

TEST(CatchUps, AsksForOneAtATime) {
  std::vector<Action> actions;
  const SignatureChecker checker("run", made_authority().public_key());
  PublicationStore store({{1 << 20}, {}, false}, checker, actions);
  CatchUps catch_ups;
  std::vector<Version> given_up;
  EXPECT_TRUE(catch_ups.enqueue(Version{1}) && catch_ups.enqueue(Version{7}) && catch_ups.enqueue(std::nullopt));
  EXPECT_FALSE(catch_ups.next(std::nullopt, store, given_up)) << "no version was published";
  EXPECT_EQ(catch_ups.next(Version{5}, store, given_up), (PublicationKey{Version{5}, {}}));
  EXPECT_FALSE(catch_ups.next(Version{5}, store, given_up)) << "it was not begun";
  catch_ups.on_begun(PublicationId{});
  EXPECT_EQ(catch_ups.next(Version{5}, store, given_up), (PublicationKey{Version{5}, Version{1}})) << "it was dropped";
  EXPECT_TRUE(given_up.empty());
  catch_ups.on_begun(PublicationId{});
  EXPECT_FALSE(catch_ups.next(Version{5}, store, given_up));
  EXPECT_EQ(given_up, (std::vector{Version{1}, Version{7}})) << "one was dropped, and one is newer than every version";
  for (std::uint64_t v = 0; v < CatchUps::kWantedMax; ++v) EXPECT_TRUE(catch_ups.enqueue(Version{v}));
  EXPECT_FALSE(catch_ups.enqueue(Version{CatchUps::kWantedMax}));
  EXPECT_TRUE(catch_ups.enqueue(Version{0}) && catch_ups.enqueue(std::nullopt));
  catch_ups.check();
}

TEST(SlowHops, BlamesTheSenderOnceAndThenItsReceiver) {
  SlowHops slow;
  const HopMonitor::Finding finding{{WorkerId{1}, WorkerId{2}}, BitRate{1e6}, BitRate{4e6}, false};
  const auto first = slow.find_cause(finding, std::nullopt, BitRate{8e6}, kStart);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->worker, WorkerId{1});
  EXPECT_EQ(slow.uplink_of(WorkerId{1}), BitRate{2e6}) << "a quarter of its rate, as for the hop";
  EXPECT_TRUE(slow.is_slow(WorkerId{1}, kStart) && !slow.is_slow(WorkerId{1}, kStart + SlowHops::kSlowTime));
  HopMonitor::Finding again = finding;
  again.hop.from = WorkerId{3};
  const auto second = slow.find_cause(again, EdgeLimit::kOwnLimit, std::nullopt, kStart + kSecond);
  ASSERT_TRUE(second);
  EXPECT_EQ(second->worker, WorkerId{2});
  EXPECT_EQ(second->hop.text.substr(0, 37), "worker 3 -> 2 limited by the sender's");
  EXPECT_FALSE(slow.find_cause(again, std::nullopt, std::nullopt, kStart + 2 * kSecond)) << "it is known to be slow";
  EXPECT_EQ(slow.recent().size(), 2u);
  const HopMonitor::Finding alone{{WorkerId{7}, WorkerId{8}}, BitRate{1e6}, BitRate{4e6}, true};
  EXPECT_EQ(slow.find_cause(alone, std::nullopt, BitRate{8e6}, kStart)->worker, WorkerId{8})
      << "the sender serves others";
  EXPECT_FALSE(slow.is_silent_to_several(WorkerId{4}, WorkerId{5}, kStart));
  EXPECT_FALSE(slow.is_silent_to_several(WorkerId{4}, WorkerId{6}, kStart + SlowHops::kSilentTogether + kSecond));
  EXPECT_TRUE(slow.is_silent_to_several(WorkerId{4}, WorkerId{5}, kStart + SlowHops::kSilentTogether + kSecond));
  slow.check();
}

TopologyPlan::Fleet fleet(std::uint64_t workers) {
  TopologyPlan::Fleet fleet{BitRate{8e6}, {}};
  for (std::uint64_t id = 1; id <= workers; ++id) fleet.workers.push_back({WorkerId{id}, BitRate{8e6}, BitRate{8e6}});
  return fleet;
}

TEST(TopologyPlan, PlansJoinsTogetherAndThenAppends) {
  LearnerRules rules;
  rules.policy = chains::TopologyPolicy::kEcho2;
  TopologyPlan plan(rules);
  plan.plan_soon(2, kStart);
  const TimePoint due = kStart + TopologyPlan::kDelay + 2 * TopologyPlan::kDelayPerWorker;
  plan.plan_soon(3, kStart + TopologyPlan::kDelay / 2);
  EXPECT_EQ(plan.next_deadline(), due);
  EXPECT_TRUE(plan.set(plan.next(fleet(2), false, due)));
  EXPECT_EQ(plan.next_deadline(), kNever);
  EXPECT_FALSE(plan.set(plan.next(fleet(2), true, due)));
  EXPECT_TRUE(plan.set(plan.next(fleet(3), true, due)));
  EXPECT_EQ(plan.topology().chains, (chains::Chains{{WorkerId{1}, WorkerId{2}, WorkerId{3}}}));
  plan.set(plan.with_worker_last(WorkerId{1}, fleet(3), due));
  EXPECT_EQ(plan.topology().chains, (chains::Chains{{WorkerId{2}, WorkerId{3}, WorkerId{1}}}));
  plan.set(plan.without(WorkerId{3}, fleet(2), due));
  EXPECT_EQ(plan.topology().chains, (chains::Chains{{WorkerId{2}, WorkerId{1}}}));
  plan.check();
}

TEST(TopologyPlan, PlansCompleteTreesLessAndLessOften) {
  LearnerRules rules;
  rules.heartbeat = kSecond;
  TopologyPlan plan(rules);
  auto slower = fleet(4);
  for (chains::ChainWorker& worker : slower.workers) worker.may_forward = worker.id == WorkerId{4};
  plan.set(plan.next(slower, false, kStart));
  plan.on_slow_hop();
  plan.set(plan.next(slower, true, kStart));  // a complete plan
  plan.set(plan.next(fleet(4), true, kStart));
  EXPECT_EQ(plan.next_deadline(), kStart + TopologyPlan::kPauseBeats * kSecond) << "repaired, and slow";
  plan.set(plan.next(fleet(4), true, plan.next_deadline()));
  EXPECT_EQ(plan.next_deadline(), kNever);
  plan.check();
}

TEST(TopologyPlan, ComparesTopologiesBetweenBroadcasts) {
  LearnerRules rules;
  rules.heartbeat = kSecond;
  TopologyPlan fixed(rules);
  EXPECT_FALSE(fixed.take_comparison(4, false, kStart));
  rules.chooses_policy = true;
  TopologyPlan plan(rules);
  const Duration pause = TopologyPlan::kChooseBeats * kSecond;
  EXPECT_FALSE(plan.take_comparison(4, false, kStart));
  EXPECT_FALSE(plan.take_comparison(4, true, kStart + pause)) << "a broadcast is under way";
  EXPECT_TRUE(plan.take_comparison(4, true, kStart + 2 * pause)) << "a broadcast is always under way";
  EXPECT_FALSE(plan.take_comparison(4, false, kStart + 2 * pause));
}

const Endpoint kAt{"10.0.0.1", 9};

TEST(Reachability, DialsOneEndpointOnceASecond) {
  Reachability reach;
  reach.add(WorkerId{1});
  reach.add(WorkerId{2});
  EXPECT_TRUE(reach.begin_dial(WorkerId{1}, kAt, kStart));
  reach.record_dial(WorkerId{1}, ConnId{1}, kStart);
  EXPECT_FALSE(reach.begin_dial(WorkerId{1}, kAt, kStart + 2 * kSecond));  // a dial is under way
  EXPECT_TRUE(reach.claim_dial(kAt, kStart + 2 * kSecond));
  EXPECT_FALSE(reach.begin_dial(WorkerId{2}, kAt, kStart + 2 * kSecond));
  EXPECT_EQ(reach.next_deadline(), kStart + 2 * kSecond + Reachability::kDialPause);
  reach.check();
  EXPECT_EQ(reach.take_planned(reach.next_deadline()), std::vector{WorkerId{2}});
  EXPECT_EQ(reach.next_deadline(), kNever);
  EXPECT_EQ(reach.remove(WorkerId{1}), ConnId{1});
  EXPECT_EQ(reach.remove(WorkerId{2}), std::nullopt);
  reach.check();
}

TEST(Reachability, DialsAnUnreachableWorkerAgain) {
  Reachability reach;
  reach.add(WorkerId{1});
  ASSERT_TRUE(reach.begin_dial(WorkerId{1}, kAt, kStart));
  reach.record_dial(WorkerId{1}, ConnId{1}, kStart);
  const auto failed = reach.end_dial(ConnId{1}, false, kStart + kSecond);
  ASSERT_TRUE(failed && failed->changed && !failed->reachable);
  EXPECT_FALSE(reach.is_reachable(WorkerId{1}));
  EXPECT_FALSE(reach.end_dial(ConnId{1}, true, kStart + kSecond));  // over
  const TimePoint again = kStart + kSecond + Reachability::kRetryPause;
  EXPECT_EQ(reach.take_planned(again), std::vector{WorkerId{1}});
  ASSERT_TRUE(reach.begin_dial(WorkerId{1}, kAt, again));
  reach.record_dial(WorkerId{1}, ConnId{3}, again);
  const auto reached = reach.end_dial(ConnId{3}, true, again + kSecond);
  ASSERT_TRUE(reached && reached->changed && reached->reachable);
  EXPECT_EQ(reached->took, kSecond);
  reach.check();
}

TEST(Reachability, EndsOfAnEdgeTakeTurns) {
  Reachability reach;
  const WorkerId parent{1}, child{2};
  reach.add(child);
  TimePoint now = kStart;
  EXPECT_FALSE(reach.parent_dials(parent, child));
  EXPECT_TRUE(reach.pass_dial_turn(parent, child, kAt, now).first_failure);
  EXPECT_TRUE(reach.parent_dials(parent, child));
  EXPECT_FALSE(reach.pass_dial_turn(parent, child, kAt, now += kSecond).parent_dials);
  EXPECT_TRUE(reach.pass_dial_turn(parent, child, kAt, now += kSecond).parent_dials);
  reach.forget_dial_turns(parent);
  EXPECT_FALSE(reach.parent_dials(parent, child));
}

}  // namespace
}  // namespace echoline::overlay
