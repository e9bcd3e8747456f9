// The times at which a worker asks for work, and the pace of its work.
#include "worker/asking.hpp"

#include <gtest/gtest.h>

#include "worker/pace.hpp"

namespace echoline::worker {
namespace {

const TimePoint kNow = TimePoint(std::chrono::seconds(100)), kLater = kNow + std::chrono::seconds(1);

TEST(Asking, WaitsForAnAnswerAndForAsLongAsItSays) {
  Asking asking;
  EXPECT_EQ(asking.not_before(), kNever) << "there is no learner to ask";
  asking.joined();
  EXPECT_LE(asking.not_before(), kNow);
  asking.asked(kNow);
  EXPECT_TRUE(asking.awaits_grant());
  EXPECT_EQ(asking.not_before(), kNever);
  asking.granted(kNow);
  EXPECT_EQ(asking.not_before(), kNow + Asking::kAskEvery);
  asking.granted(kLater);
  EXPECT_EQ(asking.not_before(), kLater);
}

// The learner has resumed and loads its model. Earlier requests are forgotten.
TEST(Asking, AsksNothingOfALearnerThatTellsItToWait) {
  Asking asking;
  asking.joined();
  asking.asked(kNow - Asking::kAskEvery);
  asking.away();
  EXPECT_FALSE(asking.is_joined());
  asking.joined();
  asking.asked(kNow - Asking::kAskEvery);
  asking.told_to_wait();
  asking.check();
  EXPECT_TRUE(asking.is_joined());
  EXPECT_FALSE(asking.awaits_grant()) << "policies may be installed meanwhile";
  EXPECT_EQ(asking.not_before(), kNever);
  asking.told_the_run();
  EXPECT_LE(asking.not_before(), kNow);
  // Another learner may answer before this one has described the run.
  asking.told_to_wait();
  asking.away();
  asking.joined();
  EXPECT_LE(asking.not_before(), kNow);
}

// The worker notices every group 10 ms late, as on a busy machine. By then it has generated the next one.
TEST(Pace, HoldsOverTimeThoughTheProcessWakesLate) {
  using std::chrono::milliseconds;
  Pace pace(100);
  TimePoint now = kNow, begun = kNow;
  for (int i = 0; i < 100; ++i) {
    const TimePoint due = pace.due(std::exchange(begun, now), 25, now + milliseconds(50));
    now = due + milliseconds(10);
  }
  EXPECT_NEAR(seconds(now - kNow), 25, 0.011);
  // A machine without work does not save up speed.
  now += std::chrono::seconds(3);
  EXPECT_EQ(pace.due(now, 25, now), now + milliseconds(250));
  // A machine that cannot keep up recovers at most a quarter of a group.
  const TimePoint ready = now + std::chrono::seconds(10);
  EXPECT_LE(pace.due(now, 25, ready), ready);
  EXPECT_GE(pace.due(now, 25, ready), ready + milliseconds(187));
}

}  // namespace
}  // namespace echoline::worker
