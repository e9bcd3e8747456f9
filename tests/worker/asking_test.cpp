// When a worker asks for work, and how long it takes for it.
#include "worker/asking.hpp"

#include <gtest/gtest.h>

#include "worker/speed.hpp"

namespace echoline::worker {
namespace {

const TimePoint kNow = TimePoint(std::chrono::seconds(100)), kLater = kNow + std::chrono::seconds(1);

TEST(Asking, WaitsForAnAnswerAndForAsLongAsItSays) {
  Asking asking;
  EXPECT_EQ(asking.not_before(), kNever) << "nobody is there to ask";
  asking.joined();
  EXPECT_LE(asking.not_before(), kNow);
  asking.asked();
  EXPECT_TRUE(asking.awaits_grant());
  EXPECT_EQ(asking.not_before(), kNever);
  asking.granted(kLater);
  EXPECT_EQ(asking.not_before(), kLater);
}

// The learner has resumed and loads its model; what was asked of it before is forgotten.
TEST(Asking, AsksNothingOfALearnerThatTellsItToWait) {
  Asking asking;
  asking.joined();
  asking.asked();
  asking.away();
  EXPECT_FALSE(asking.is_joined());
  asking.joined();
  asking.told_to_wait();
  EXPECT_TRUE(asking.is_joined());
  EXPECT_FALSE(asking.awaits_grant()) << "policies may be installed meanwhile";
  EXPECT_EQ(asking.not_before(), kNever);
  asking.told_the_run();
  EXPECT_LE(asking.not_before(), kNow);
  // Another one may be there before this one has told of the run.
  asking.told_to_wait();
  asking.away();
  asking.joined();
  EXPECT_LE(asking.not_before(), kNow);
}

// Every batch is noticed 10 ms late, as on a busy machine.
TEST(Speed, HoldsOverTimeThoughTheProcessWakesLate) {
  using std::chrono::milliseconds;
  Speed speed(100);
  TimePoint now = kNow;
  for (int i = 0; i < 100; ++i) {
    const TimePoint due = speed.due(now, 25), generated = now + milliseconds(50);
    now = due + milliseconds(10);
    speed.ended(due, generated, now);
  }
  EXPECT_NEAR(seconds(now - kNow), 25, 0.011);
  // A machine that cannot keep up makes up for nothing: the next batch has its whole time.
  const TimePoint due = speed.due(now, 25), generated = now + std::chrono::seconds(2);
  speed.ended(due, generated, generated);
  EXPECT_EQ(speed.due(generated, 25), generated + milliseconds(250));
  // Nor is a pause of the machine made up for at once.
  speed.ended(kNow, kNow, kNow + std::chrono::hours(1));
  EXPECT_GE(speed.due(kNow, 25), kNow + milliseconds(180));
}

}  // namespace
}  // namespace echoline::worker
