// The parts of a worker's protocol, each alone: membership, stalls, and the installed position.
#include <gtest/gtest.h>

#include "overlay/member/child_budgets.hpp"
#include "overlay/member/membership.hpp"
#include "overlay/member/stall_watch.hpp"
#include "overlay/member/standing.hpp"
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
  m.dialled(ConnId{1}, m.asks_next(false));
  m.connected(now);
  m.answered();
  m.welcomed(30 * kSecond);
  m.check();
  return m;
}

TEST(Membership, JoinsLosesTheLearnerAndComesBack) {
  Membership m = joined();
  EXPECT_EQ(m.next_deadline(), kNever);
  EXPECT_TRUE(m.lost(kStart + kSecond));
  m.check();
  EXPECT_EQ(m.state(), State::kAway);
  EXPECT_EQ(m.away_until(), kStart + 31 * kSecond);
  EXPECT_FALSE(m.take_redial(m.redial_at() - Duration{1}));
  const TimePoint again = m.redial_at();
  EXPECT_TRUE(m.take_redial(again));
  EXPECT_FALSE(m.take_redial(again));  // once
  m.dialled(ConnId{3}, m.asks_next(false));
  m.connected(again);
  m.check();
  EXPECT_TRUE(m.greeted() && !m.joined());
  EXPECT_TRUE(m.unanswered(again + Core::kHandshakeTimeout));
  m.welcomed(30 * kSecond);
  m.check();
  EXPECT_EQ(m.away_until(), kNever);
}

TEST(Membership, WaitsLongerAfterEveryAttempt) {
  Membership m = joined();
  TimePoint now = kStart;
  m.lost(now);
  Duration last{};
  for (int i = 0; i < 4; ++i) {
    const Duration pause = m.redial_at() - now;
    EXPECT_GT(pause, last);
    last = pause;
    now = m.redial_at();
    ASSERT_TRUE(m.take_redial(now));
    m.dialled(ConnId{static_cast<std::uint64_t>(3 + 2 * i)}, m.asks_next(false));
    EXPECT_FALSE(m.lost(now));  // it was no member
    m.check();
  }
}

TEST(Membership, AsksForACertificateWhereItsOwnHasEndedOrIsNotAnswered) {
  Membership m(7);
  m.start(kStart, 10 * kSecond);
  ASSERT_TRUE(m.asks_next(true));
  m.dialled(ConnId{1}, true);
  m.connected(kStart);
  EXPECT_TRUE(m.asking());
  m.check();
  EXPECT_FALSE(m.refused());
  m.lost(kStart);
  EXPECT_FALSE(m.asks_next(true));  // it may be this machine's clock that is wrong
  m.take_redial(m.redial_at());
  m.dialled(ConnId{3}, false);
  m.connected(kStart);
  m.broken();  // nothing was answered
  m.lost(kStart);
  EXPECT_TRUE(m.asks_next(false));
  m.take_redial(m.redial_at());
  m.dialled(ConnId{5}, true);
  m.connected(kStart);
  EXPECT_TRUE(m.refused());  // the second time
}

TEST(Membership, DrainsUntilItsChildrenAreGone) {
  Membership m = joined();
  EXPECT_FALSE(m.drained(false, kBeat, kStart + 100 * kSecond));
  m.drain(kStart);
  EXPECT_FALSE(m.drained(false, kBeat, kStart));  // the learner has not heard of it
  EXPECT_TRUE(m.drained(false, kBeat, kStart + kBeat));
  EXPECT_FALSE(m.drained(true, kBeat, kStart + kBeat));
  EXPECT_TRUE(m.drained(true, kBeat, kStart + Membership::kDrainMax));
}

TEST(Membership, NothingFollowsItsEnd) {
  Membership m = joined();
  m.end();
  m.check();
  EXPECT_EQ(m.next_deadline(), kNever);
  EXPECT_DEATH(m.start(kStart, kSecond), "a worker that is ended cannot become joining");
  EXPECT_DEATH(m.welcomed(kSecond), "a worker that is ended cannot become joined");
}

TEST(Membership, IsWelcomedOnlyOnce) {
  Membership m = joined();
  EXPECT_DEATH(m.welcomed(kSecond), "a worker that is joined cannot become joined");
  EXPECT_DEATH(m.dialled(ConnId{3}, false), "a connection that is answered cannot become dialling");
}

TEST(StallWatch, CallsAfterTooLittleProgress) {
  StallWatch w;
  w.set_heartbeat(kBeat);
  EXPECT_EQ(w.deadline(), kNever);
  w.wait(kStart);
  const Duration patience = StallWatch::kStallHeartbeats * kBeat;
  EXPECT_EQ(w.deadline(), kStart + patience);
  w.progressed({Version{1}, {}}, 1, true, kStart + kSecond);
  EXPECT_EQ(w.deadline(), kStart + kSecond + patience);
  w.progressed({Version{1}, {}}, 1, true, kStart + 2 * kSecond);   // no more than before
  w.progressed({Version{1}, {}}, 2, false, kStart + 2 * kSecond);  // nothing will come of it
  EXPECT_EQ(w.deadline(), kStart + kSecond + patience);
  EXPECT_FALSE(w.take_stall(w.deadline() - Duration{1}));
  EXPECT_TRUE(w.take_stall(w.deadline()));
  w.check();
}

TEST(StallWatch, CountsOnlyTheFirstPublicationsThatBegin) {
  StallWatch w;
  w.set_heartbeat(kBeat);
  w.wait(kStart);
  TimePoint now = kStart;
  for (std::uint64_t v = 0; v < StallWatch::kBegunMax + 1; ++v) w.progressed({Version{v}, {}}, 1, true, now += kSecond);
  EXPECT_EQ(w.deadline(), now - kSecond + StallWatch::kStallHeartbeats * kBeat);
}

TEST(StallWatch, WaitsLongerWhereTheStoreRefusesAndUntilActivation) {
  StallWatch w;
  w.set_heartbeat(kBeat);
  w.wait(kStart);
  w.store_refused();
  EXPECT_TRUE(w.is_lost_here());
  EXPECT_EQ(w.deadline(), kStart + 2 * StallWatch::kStallHeartbeats * kBeat);
  w.activated(false, kStart + kSecond);
  EXPECT_FALSE(w.is_lost_here());
  EXPECT_EQ(w.deadline(), kStart + kSecond + StallWatch::kStallHeartbeats * kBeat);
  w.activated(true, kStart + kSecond);
  EXPECT_EQ(w.deadline(), kNever);
}

TEST(StallWatch, GivesParentsThatComeAndGoTimeOnce) {
  StallWatch w;
  w.set_heartbeat(kBeat);
  w.wait(kStart);
  w.restart_for_parents(kStart + kSecond);
  w.restart_for_parents(kStart + 2 * kSecond);
  EXPECT_EQ(w.deadline(), kStart + kSecond + StallWatch::kStallHeartbeats * kBeat);
}

TEST(StallWatch, AsksAgainOnlyAfterAPause) {
  StallWatch w;
  w.set_heartbeat(kBeat);
  w.wait(kStart);
  EXPECT_TRUE(w.may_ask(4 * kBeat, kStart));
  EXPECT_FALSE(w.may_ask(4 * kBeat, kStart + kBeat));
  EXPECT_EQ(w.deadline(), kStart + 4 * kBeat);  // it is stalled again then
  EXPECT_TRUE(w.may_ask(4 * kBeat, kStart + 4 * kBeat));
  w.help_came();
  EXPECT_TRUE(w.may_ask(4 * kBeat, kStart + 4 * kBeat));
}

TEST(Standing, KnowsTheNewestVersionOfItsEpoch) {
  Standing s(0);
  EXPECT_FALSE(s.behind());
  EXPECT_TRUE(s.announced(Version{3}));
  EXPECT_FALSE(s.announced(Version{2}));
  EXPECT_TRUE(s.behind());
  EXPECT_EQ(s.next_version(), Version{0});
  s.published(Version{2});
  EXPECT_EQ(s.newest(), Version{2});
  s.begin_epoch(1);
  s.check();
  EXPECT_FALSE(s.newest());
  EXPECT_EQ(s.installed(Version{2}, {}, kStart), std::nullopt);  // it was given nothing
  EXPECT_EQ(s.install_failed(Version{2}), Standing::Failure::kVoid);
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
  EXPECT_FALSE(budgets.is_barred(WorkerId{3}, kStart + ChildBudgets::kBarred));
}

TEST(Saver, WritesOnceMoreWhatHasChangedMeanwhile) {
  Saver s;
  EXPECT_TRUE(s.begin());
  EXPECT_FALSE(s.begin());
  EXPECT_TRUE(s.succeeded());
  EXPECT_TRUE(s.begin());
  EXPECT_FALSE(s.succeeded());
  EXPECT_TRUE(s.settled());
}

TEST(Saver, RepeatsAWriteThatFailed) {
  Saver s;
  ASSERT_TRUE(s.begin());
  s.failed(kStart);
  EXPECT_FALSE(s.settled() || s.saving());
  EXPECT_FALSE(s.take_retry(kStart));
  EXPECT_TRUE(s.take_retry(kStart + Saver::kRetry));
  EXPECT_FALSE(s.take_retry(kStart + Saver::kRetry));
}

}  // namespace
}  // namespace echoline::overlay
