// When a worker asks for work.
#include "worker/asking.hpp"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace echoline::worker
