// The times at which a worker asks for work, and the pace of its work.
#include "worker/asking.hpp"

#include <gtest/gtest.h>

#include "worker/pace.hpp"

namespace echoline::worker {
namespace {

const TimePoint kNow = TimePoint(std::chrono::seconds(100)), kLater = kNow + std::chrono::seconds(1);

TEST(Asking, WaitsForAnAnswerAndForAsLongAsItSays) {
  Asking asking;
  EXPECT_EQ(asking.earliest_request(), kNever) << "there is no learner to ask";
  asking.on_joined();
  EXPECT_LE(asking.earliest_request(), kNow);
  asking.on_requested(kNow);
  EXPECT_TRUE(asking.awaits_grant());
  EXPECT_EQ(asking.earliest_request(), kNever);
  asking.on_granted(kNow);
  EXPECT_EQ(asking.earliest_request(), kNow + Asking::kRequestIntervalMin);
  asking.on_granted(kLater);
  EXPECT_EQ(asking.earliest_request(), kLater);
}

// The learner has resumed and loads its model. Earlier requests are forgotten.
TEST(Asking, AsksNothingOfALearnerThatTellsItToWait) {
  Asking asking;
  asking.on_joined();
  asking.on_requested(kNow - Asking::kRequestIntervalMin);
  asking.on_away();
  EXPECT_FALSE(asking.is_joined());
  asking.on_joined();
  asking.on_requested(kNow - Asking::kRequestIntervalMin);
  asking.on_told_to_wait();
  asking.check();
  EXPECT_TRUE(asking.is_joined());
  EXPECT_FALSE(asking.awaits_grant()) << "policies may be installed meanwhile";
  EXPECT_EQ(asking.earliest_request(), kNever);
  asking.on_run_described();
  EXPECT_LE(asking.earliest_request(), kNow);
  // Another learner may answer before this one has described the run.
  asking.on_told_to_wait();
  asking.on_away();
  asking.on_joined();
  EXPECT_LE(asking.earliest_request(), kNow);
}

// The worker notices every group 10 ms late, as on a busy machine. By then it has generated the next one.
TEST(Pace, HoldsOverTimeThoughTheProcessWakesLate) {
  using std::chrono::milliseconds;
  Pace pace(100);
  TimePoint now = kNow, begun = kNow;
  for (int i = 0; i < 100; ++i) {
    const TimePoint due = pace.due_time(std::exchange(begun, now), 25, now + milliseconds(50));
    now = due + milliseconds(10);
  }
  EXPECT_NEAR(seconds(now - kNow), 25, 0.011);
  // A machine without work does not save up speed.
  now += std::chrono::seconds(3);
  EXPECT_EQ(pace.due_time(now, 25, now), now + milliseconds(250));
  // A machine that cannot keep up recovers at most a quarter of a group.
  const TimePoint ready = now + std::chrono::seconds(10);
  EXPECT_LE(pace.due_time(now, 25, ready), ready);
  EXPECT_GE(pace.due_time(now, 25, ready), ready + milliseconds(187));
}

}  // namespace
}  // namespace echoline::worker
