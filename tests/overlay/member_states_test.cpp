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
  Membership m(7);
  m.start(now, 10 * kSecond);
  m.on_dialled(ConnId{1}, m.next_asks(false));
  m.on_connected(now);
  m.on_answered();
  m.on_welcomed(30 * kSecond);
  m.check();
  return m;
}

TEST(Membership, JoinsLosesTheLearnerAndComesBack) {
  Membership m = joined();
  EXPECT_EQ(m.next_deadline(), kNever);
  EXPECT_TRUE(m.on_lost(kStart + kSecond));
  m.check();
  EXPECT_EQ(m.state(), State::kAway);
  EXPECT_EQ(m.away_until(), kStart + 31 * kSecond);
  EXPECT_FALSE(m.take_redial(m.redial_at() - Duration{1}));
  const TimePoint again = m.redial_at();
  EXPECT_TRUE(m.take_redial(again));
  EXPECT_FALSE(m.take_redial(again));  // once
  m.on_dialled(ConnId{3}, m.next_asks(false));
  m.on_connected(again);
  m.check();
  EXPECT_TRUE(m.is_greeted() && !m.is_joined());
  EXPECT_TRUE(m.is_unanswered(again + Core::kHandshakeTimeout));
  m.on_welcomed(30 * kSecond);
  m.check();
  EXPECT_EQ(m.away_until(), kNever);
}

TEST(Membership, WaitsLongerAfterEveryAttempt) {
  Membership m = joined();
  TimePoint now = kStart;
  m.on_lost(now);
  Duration last{};
  for (int i = 0; i < 4; ++i) {
    const Duration pause = m.redial_at() - now;
    EXPECT_GT(pause, last);
    last = pause;
    now = m.redial_at();
    ASSERT_TRUE(m.take_redial(now));
    m.on_dialled(ConnId{static_cast<std::uint64_t>(3 + 2 * i)}, m.next_asks(false));
    EXPECT_FALSE(m.on_lost(now));  // it was no member
    m.check();
  }
}

TEST(Membership, AsksForACertificateWhereItsOwnHasEndedOrIsNotAnswered) {
  Membership m(7);
  m.start(kStart, 10 * kSecond);
  ASSERT_TRUE(m.next_asks(true));
  m.on_dialled(ConnId{1}, true);
  m.on_connected(kStart);
  EXPECT_TRUE(m.is_asking());
  m.check();
  EXPECT_FALSE(m.on_refused());
  m.on_lost(kStart);
  EXPECT_FALSE(m.next_asks(true));  // it may be this machine's clock that is wrong
  m.take_redial(m.redial_at());
  m.on_dialled(ConnId{3}, false);
  m.on_connected(kStart);
  m.on_disconnected();  // nothing was answered
  m.on_lost(kStart);
  EXPECT_TRUE(m.next_asks(false));
  m.take_redial(m.redial_at());
  m.on_dialled(ConnId{5}, true);
  m.on_connected(kStart);
  EXPECT_TRUE(m.on_refused());  // the second time
}

TEST(Membership, DrainsUntilItsChildrenAreGone) {
  Membership m = joined();
  EXPECT_FALSE(m.may_leave(false, kBeat, kStart + 100 * kSecond));
  m.drain(kStart);
  EXPECT_FALSE(m.may_leave(false, kBeat, kStart));  // the learner has not heard of it
  EXPECT_TRUE(m.may_leave(false, kBeat, kStart + kBeat));
  EXPECT_FALSE(m.may_leave(true, kBeat, kStart + kBeat));
  EXPECT_TRUE(m.may_leave(true, kBeat, kStart + Membership::kDrainMax));
}

TEST(Membership, NothingFollowsItsEnd) {
  Membership m = joined();
  m.end();
  m.check();
  EXPECT_EQ(m.next_deadline(), kNever);
  EXPECT_DEATH(m.start(kStart, kSecond), "a worker that is ended cannot become joining");
  EXPECT_DEATH(m.on_welcomed(kSecond), "a worker that is ended cannot become joined");
}

TEST(Membership, IsWelcomedOnlyOnce) {
  Membership m = joined();
  EXPECT_DEATH(m.on_welcomed(kSecond), "a worker that is joined cannot become joined");
  EXPECT_DEATH(m.on_dialled(ConnId{3}, false), "a connection that is answered cannot become dialling");
}

TEST(StallWatch, CallsAfterTooLittleProgress) {
  StallWatch w;
  w.set_heartbeat(kBeat);
  EXPECT_EQ(w.deadline(), kNever);
  w.begin_wait(kStart);
  const Duration patience = StallWatch::kStallHeartbeats * kBeat;
  EXPECT_EQ(w.deadline(), kStart + patience);
  w.record_progress({Version{1}, {}}, 1, true, kStart + kSecond);
  EXPECT_EQ(w.deadline(), kStart + kSecond + patience);
  w.record_progress({Version{1}, {}}, 1, true, kStart + 2 * kSecond);   // no more than before
  w.record_progress({Version{1}, {}}, 2, false, kStart + 2 * kSecond);  // nothing will come of it
  EXPECT_EQ(w.deadline(), kStart + kSecond + patience);
  EXPECT_FALSE(w.take_stall(w.deadline() - Duration{1}));
  EXPECT_TRUE(w.take_stall(w.deadline()));
  w.check();
}

TEST(StallWatch, CountsOnlyTheFirstPublicationsThatBegin) {
  StallWatch w;
  w.set_heartbeat(kBeat);
  w.begin_wait(kStart);
  TimePoint now = kStart;
  for (std::uint64_t v = 0; v < StallWatch::kBegunMax + 1; ++v)
    w.record_progress({Version{v}, {}}, 1, true, now += kSecond);
  EXPECT_EQ(w.deadline(), now - kSecond + StallWatch::kStallHeartbeats * kBeat);
}

TEST(StallWatch, WaitsLongerWhereTheStoreRefusesAndUntilActivation) {
  StallWatch w;
  w.set_heartbeat(kBeat);
  w.begin_wait(kStart);
  w.on_store_refused();
  EXPECT_TRUE(w.has_lost_chunks());
  EXPECT_EQ(w.deadline(), kStart + 2 * StallWatch::kStallHeartbeats * kBeat);
  w.on_activated(false, kStart + kSecond);
  EXPECT_FALSE(w.has_lost_chunks());
  EXPECT_EQ(w.deadline(), kStart + kSecond + StallWatch::kStallHeartbeats * kBeat);
  w.on_activated(true, kStart + kSecond);
  EXPECT_EQ(w.deadline(), kNever);
}

TEST(StallWatch, GivesParentsThatComeAndGoTimeOnce) {
  StallWatch w;
  w.set_heartbeat(kBeat);
  w.begin_wait(kStart);
  w.restart_for_parents(kStart + kSecond);
  w.restart_for_parents(kStart + 2 * kSecond);
  EXPECT_EQ(w.deadline(), kStart + kSecond + StallWatch::kStallHeartbeats * kBeat);
}

TEST(StallWatch, AsksAgainOnlyAfterAPause) {
  StallWatch w;
  w.set_heartbeat(kBeat);
  w.begin_wait(kStart);
  EXPECT_TRUE(w.may_ask(4 * kBeat, kStart));
  EXPECT_FALSE(w.may_ask(4 * kBeat, kStart + kBeat));
  EXPECT_EQ(w.deadline(), kStart + 4 * kBeat);  // it is stalled again then
  EXPECT_TRUE(w.may_ask(4 * kBeat, kStart + 4 * kBeat));
  w.on_help();
  EXPECT_TRUE(w.may_ask(4 * kBeat, kStart + 4 * kBeat));
}

TEST(InstallState, KnowsTheNewestVersionOfItsEpoch) {
  InstallState s(0);
  EXPECT_FALSE(s.is_behind());
  EXPECT_TRUE(s.on_announced(Version{3}));
  EXPECT_FALSE(s.on_announced(Version{2}));
  EXPECT_TRUE(s.is_behind());
  EXPECT_EQ(s.next_version(), Version{0});
  s.on_published(Version{2});
  EXPECT_EQ(s.newest(), Version{2});
  s.begin_epoch(1);
  s.check();
  EXPECT_FALSE(s.newest());
  EXPECT_EQ(s.on_installed(Version{2}, {}, kStart), std::nullopt);  // it was given nothing
  EXPECT_EQ(s.on_install_failed(Version{2}), InstallState::Failure::kVoid);
}

TEST(ChildBudgets, BarsAChildThatAsksForTooMuch) {
  ChildBudgets budgets;
  const auto nobody = [](WorkerId) { return false; };
  auto verdict = MessageBudget::Verdict::kTake;
  for (int i = 0; i < 100'000 && verdict != MessageBudget::Verdict::kTooMuch; ++i)
    verdict = budgets.take(WorkerId{3}, MessageBudget::Kind::kHave, 0, kBeat, nobody, kStart);
  EXPECT_EQ(verdict, MessageBudget::Verdict::kTooMuch);
  EXPECT_TRUE(budgets.is_barred(WorkerId{3}, kStart));
  EXPECT_FALSE(budgets.is_barred(WorkerId{4}, kStart));
  EXPECT_FALSE(budgets.is_barred(WorkerId{3}, kStart + ChildBudgets::kBarredTime));
}

TEST(Saver, WritesOnceMoreWhatHasChangedMeanwhile) {
  Saver s;
  EXPECT_TRUE(s.begin());
  EXPECT_FALSE(s.begin());
  EXPECT_TRUE(s.on_succeeded());
  EXPECT_TRUE(s.begin());
  EXPECT_FALSE(s.on_succeeded());
  EXPECT_TRUE(s.is_settled());
}

TEST(Saver, RepeatsAWriteThatFailed) {
  Saver s;
  ASSERT_TRUE(s.begin());
  s.on_failed(kStart);
  EXPECT_FALSE(s.is_settled() || s.is_saving());
  EXPECT_FALSE(s.take_retry(kStart));
  EXPECT_TRUE(s.take_retry(kStart + Saver::kRetry));
  EXPECT_FALSE(s.take_retry(kStart + Saver::kRetry));
}

}  // namespace
}  // namespace echoline::overlay
