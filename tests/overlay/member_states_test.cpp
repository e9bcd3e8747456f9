// The parts of a worker's protocol, each alone: membership, stalls, and the installed position.
#include <gtest/gtest.h>

#include "overlay/member/child_budgets.hpp"
#include "overlay/member/install_state.hpp"
#include "overlay/member/membership.hpp"
#include "overlay/member/stall_watch.hpp"
#include "overlay/saver.hpp"

namespace echoline::overlay {
namespace {

using State = Membership::State;
constexpr Duration kBeat = std::chrono::milliseconds(500);
constexpr Duration kSecond = std::chrono::seconds(1);
constexpr TimePoint kStart{std::chrono::seconds(1)};

Membership joined(TimePoint now = kStart) {
  Membership membership(7);
  membership.start(now, 10 * kSecond);
  membership.on_dialled(ConnId{1}, membership.next_connection_asks(false));
  membership.on_connected(now);
  membership.on_answered();
  membership.on_welcomed(30 * kSecond);
  membership.check();
  return membership;
}

TEST(Membership, JoinsLosesTheLearnerAndComesBack) {
  Membership membership = joined();
  EXPECT_EQ(membership.next_deadline(), kNever);
  EXPECT_TRUE(membership.on_lost(kStart + kSecond));
  membership.check();
  EXPECT_EQ(membership.state(), State::kAway);
  EXPECT_EQ(membership.away_until(), kStart + 31 * kSecond);
  EXPECT_FALSE(membership.take_redial(membership.redial_at() - Duration{1}));
  const TimePoint redial_at = membership.redial_at();
  EXPECT_TRUE(membership.take_redial(redial_at));
  EXPECT_FALSE(membership.take_redial(redial_at));  // once
  membership.on_dialled(ConnId{3}, membership.next_connection_asks(false));
  membership.on_connected(redial_at);
  membership.check();
  EXPECT_TRUE(membership.is_greeted() && !membership.is_joined());
  EXPECT_TRUE(membership.is_unanswered(redial_at + Core::kHandshakeTimeout));
  membership.on_welcomed(30 * kSecond);
  membership.check();
  EXPECT_EQ(membership.away_until(), kNever);
}

TEST(Membership, WaitsLongerAfterEveryAttempt) {
  Membership membership = joined();
  TimePoint now = kStart;
  membership.on_lost(now);
  Duration previous_pause{};
  for (int i = 0; i < 4; ++i) {
    const Duration pause = membership.redial_at() - now;
    EXPECT_GT(pause, previous_pause);
    previous_pause = pause;
    now = membership.redial_at();
    ASSERT_TRUE(membership.take_redial(now));
    membership.on_dialled(ConnId{static_cast<std::uint64_t>(3 + 2 * i)}, membership.next_connection_asks(false));
    EXPECT_FALSE(membership.on_lost(now));  // it had not joined
    membership.check();
  }
}

TEST(Membership, AsksForACertificateIfItsOwnHasExpiredOrGetsNoAnswer) {
  Membership membership(7);
  membership.start(kStart, 10 * kSecond);
  ASSERT_TRUE(membership.next_connection_asks(true));
  membership.on_dialled(ConnId{1}, true);
  membership.on_connected(kStart);
  EXPECT_TRUE(membership.is_asking());
  membership.check();
  EXPECT_FALSE(membership.on_refused());
  membership.on_lost(kStart);
  EXPECT_FALSE(membership.next_connection_asks(true));  // this machine's clock may be wrong
  membership.take_redial(membership.redial_at());
  membership.on_dialled(ConnId{3}, false);
  membership.on_connected(kStart);
  membership.on_disconnected();  // without an answer
  membership.on_lost(kStart);
  EXPECT_TRUE(membership.next_connection_asks(false));
  membership.take_redial(membership.redial_at());
  membership.on_dialled(ConnId{5}, true);
  membership.on_connected(kStart);
  EXPECT_TRUE(membership.on_refused());  // the second time
}

TEST(Membership, DrainsUntilItsChildrenAreGone) {
  Membership membership = joined();
  EXPECT_FALSE(membership.may_leave(false, kBeat, kStart + 100 * kSecond));
  membership.drain(kStart);
  EXPECT_FALSE(membership.may_leave(false, kBeat, kStart));  // the learner has not yet been told
  EXPECT_TRUE(membership.may_leave(false, kBeat, kStart + kBeat));
  EXPECT_FALSE(membership.may_leave(true, kBeat, kStart + kBeat));
  EXPECT_TRUE(membership.may_leave(true, kBeat, kStart + Membership::kDrainMax));
}

TEST(Membership, NothingFollowsItsEnd) {
  Membership membership = joined();
  membership.end();
  membership.check();
  EXPECT_EQ(membership.next_deadline(), kNever);
  EXPECT_DEATH(membership.start(kStart, kSecond), "a worker that is ended cannot become joining");
  EXPECT_DEATH(membership.on_welcomed(kSecond), "a worker that is ended cannot become joined");
}

TEST(Membership, IsWelcomedOnlyOnce) {
  Membership membership = joined();
  EXPECT_DEATH(membership.on_welcomed(kSecond), "a worker that is joined cannot become joined");
  EXPECT_DEATH(membership.on_dialled(ConnId{3}, false), "a connection that is answered cannot become dialling");
}

TEST(StallWatch, StallsAfterTooLittleProgress) {
  StallWatch watch;
  watch.set_heartbeat(kBeat);
  EXPECT_EQ(watch.deadline(), kNever);
  watch.begin_wait(kStart);
  const Duration stall_time = StallWatch::kStallHeartbeats * kBeat;
  EXPECT_EQ(watch.deadline(), kStart + stall_time);
  watch.record_progress({Version{1}, {}}, 1, true, kStart + kSecond);
  EXPECT_EQ(watch.deadline(), kStart + kSecond + stall_time);
  watch.record_progress({Version{1}, {}}, 1, true, kStart + 2 * kSecond);   // no more than before
  watch.record_progress({Version{1}, {}}, 2, false, kStart + 2 * kSecond);  // it cannot be completed
  EXPECT_EQ(watch.deadline(), kStart + kSecond + stall_time);
  EXPECT_FALSE(watch.take_stall(watch.deadline() - Duration{1}));
  EXPECT_TRUE(watch.take_stall(watch.deadline()));
  watch.check();
}

TEST(StallWatch, CountsOnlyTheFirstPublicationsThatBegin) {
  StallWatch watch;
  watch.set_heartbeat(kBeat);
  watch.begin_wait(kStart);
  TimePoint now = kStart;
  for (std::uint64_t v = 0; v < StallWatch::kBegunMax + 1; ++v)
    watch.record_progress({Version{v}, {}}, 1, true, now += kSecond);
  EXPECT_EQ(watch.deadline(), now - kSecond + StallWatch::kStallHeartbeats * kBeat);
}

TEST(StallWatch, WaitsLongerAfterTheStoreRefusedAChunk) {
  StallWatch watch;
  watch.set_heartbeat(kBeat);
  watch.begin_wait(kStart);
  watch.on_store_refused();
  EXPECT_TRUE(watch.has_lost_chunks());
  EXPECT_EQ(watch.deadline(), kStart + 2 * StallWatch::kStallHeartbeats * kBeat);
  watch.on_activated(false, kStart + kSecond);
  EXPECT_FALSE(watch.has_lost_chunks());
  EXPECT_EQ(watch.deadline(), kStart + kSecond + StallWatch::kStallHeartbeats * kBeat);
  watch.on_activated(true, kStart + kSecond);
  EXPECT_EQ(watch.deadline(), kNever);
}

TEST(StallWatch, RestartsOnceForParentsThatComeAndGo) {
  StallWatch watch;
  watch.set_heartbeat(kBeat);
  watch.begin_wait(kStart);
  watch.restart_for_parents(kStart + kSecond);
  watch.restart_for_parents(kStart + 2 * kSecond);
  EXPECT_EQ(watch.deadline(), kStart + kSecond + StallWatch::kStallHeartbeats * kBeat);
}

TEST(StallWatch, AsksAgainOnlyAfterAPause) {
  StallWatch watch;
  watch.set_heartbeat(kBeat);
  watch.begin_wait(kStart);
  EXPECT_TRUE(watch.begin_call(4 * kBeat, kStart));
  EXPECT_FALSE(watch.begin_call(4 * kBeat, kStart + kBeat));
  EXPECT_EQ(watch.deadline(), kStart + 4 * kBeat);  // then it stalls again
  EXPECT_TRUE(watch.begin_call(4 * kBeat, kStart + 4 * kBeat));
  watch.on_help();
  EXPECT_TRUE(watch.begin_call(4 * kBeat, kStart + 4 * kBeat));
}

TEST(InstallState, KnowsTheNewestVersionOfItsEpoch) {
  InstallState state(0);
  EXPECT_FALSE(state.is_behind());
  EXPECT_TRUE(state.on_announced(Version{3}));
  EXPECT_FALSE(state.on_announced(Version{2}));
  EXPECT_TRUE(state.is_behind());
  EXPECT_EQ(state.next_version(), Version{0});
  state.on_published(Version{2});
  EXPECT_EQ(state.newest(), Version{2});
  state.begin_epoch(1);
  state.check();
  EXPECT_FALSE(state.newest());
  EXPECT_EQ(state.on_installed(Version{2}, {}, kStart), std::nullopt);  // no version was delivered in this epoch
  EXPECT_EQ(state.on_install_failed(Version{2}), InstallState::Failure::kVoid);
}

TEST(ChildBudgets, BarsAChildThatAsksForTooMuch) {
  ChildBudgets budgets;
  const auto is_connected = [](WorkerId) { return false; };
  auto verdict = MessageBudget::Verdict::kAccept;
  for (int i = 0; i < 100'000 && verdict != MessageBudget::Verdict::kTooMuch; ++i)
    verdict = budgets.count(WorkerId{3}, MessageBudget::Kind::kHave, 0, kBeat, is_connected, kStart);
  EXPECT_EQ(verdict, MessageBudget::Verdict::kTooMuch);
  EXPECT_TRUE(budgets.is_barred(WorkerId{3}, kStart));
  EXPECT_FALSE(budgets.is_barred(WorkerId{4}, kStart));
  EXPECT_FALSE(budgets.is_barred(WorkerId{3}, kStart + ChildBudgets::kBarredTime));
}

TEST(Saver, SavesAgainWhatChangedDuringASave) {
  Saver saver;
  EXPECT_TRUE(saver.begin());
  EXPECT_FALSE(saver.begin());
  EXPECT_TRUE(saver.on_succeeded());
  EXPECT_TRUE(saver.begin());
  EXPECT_FALSE(saver.on_succeeded());
  EXPECT_TRUE(saver.is_settled());
}

TEST(Saver, RepeatsASaveThatFailed) {
  Saver saver;
  ASSERT_TRUE(saver.begin());
  saver.on_failed(kStart);
  EXPECT_FALSE(saver.is_settled() || saver.is_saving());
  EXPECT_FALSE(saver.take_retry(kStart));
  EXPECT_TRUE(saver.take_retry(kStart + Saver::kRetryPause));
  EXPECT_FALSE(saver.take_retry(kStart + Saver::kRetryPause));
}

}  // namespace
}  // namespace echoline::overlay
