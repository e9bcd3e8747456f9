// The closed loop under a clock moved by hand.
#include "provisioner/controller.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace echoline::provisioner {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class Loop : public testing::Test {
 protected:
  // Target 110: M* = 100, headroom 10 %.
  static ControllerConfig config() {
    ControllerConfig c;
    c.required_rollouts_per_s = 100;
    return c;
  }
  static FleetOffer offer(const std::string& name, double rate, double usd) { return {name, rate, usd}; }

  void start(std::uint64_t id, double rate, double usd = 0.1) {
    controller.started(WorkerId{id}, offer("o" + std::to_string(id), rate, usd));
  }
  // Advances second by second; collects what was done.
  std::vector<FleetAction> pass(int s) {
    std::vector<FleetAction> all;
    for (int i = 0; i < s; ++i) {
      clock.advance(seconds(1));
      for (auto& action : controller.tick(clock.now())) all.push_back(std::move(action));
    }
    return all;
  }
  void die(std::uint64_t id) { controller.lost(WorkerId{id}, clock.now()); }
  static std::vector<std::string> activated(const std::vector<FleetAction>& actions) {
    std::vector<std::string> names;
    for (const auto& a : actions)
      if (const auto* activate = std::get_if<Activate>(&a)) names.push_back(activate->offer);
    return names;
  }
  static std::vector<std::uint64_t> released(const std::vector<FleetAction>& actions) {
    std::vector<std::uint64_t> ids;
    for (const auto& a : actions)
      if (const auto* release = std::get_if<Release>(&a)) ids.push_back(release->worker.value);
    return ids;
  }

  ManualClock clock;
  FleetController controller{config(), {offer("s1", 40, 0.1), offer("s2", 40, 0.2), offer("s3", 40, 0.3)}};
};

TEST_F(Loop, AFleetAtItsTargetIsLeftAlone) {
  start(1, 60);
  start(2, 60);
  EXPECT_TRUE(pass(300).empty());
  EXPECT_DOUBLE_EQ(controller.effective_rollouts_per_s(), 120);
}

TEST_F(Loop, MeasuredThroughputTakesThePlaceOfThePrediction) {
  start(1, 60);
  EXPECT_FALSE(controller.measured_rollouts_per_s(WorkerId{1}));
  controller.completed(WorkerId{1}, -1, seconds(1), clock.now());
  controller.completed(WorkerId{1}, 5, Duration{}, clock.now());
  controller.completed(WorkerId{77}, 5, seconds(1), clock.now());
  EXPECT_FALSE(controller.measured_rollouts_per_s(WorkerId{1}));
  controller.completed(WorkerId{1}, 30, seconds(1), clock.now());
  EXPECT_DOUBLE_EQ(*controller.measured_rollouts_per_s(WorkerId{1}), 30);
  clock.advance(seconds(2));
  controller.completed(WorkerId{1}, 30, milliseconds(500), clock.now());
  EXPECT_DOUBLE_EQ(controller.effective_rollouts_per_s(), 40);
  // What is older than the window no longer counts, once there is something newer.
  clock.advance(seconds(59));
  EXPECT_DOUBLE_EQ(*controller.measured_rollouts_per_s(WorkerId{1}), 40);
  controller.completed(WorkerId{1}, 20, milliseconds(500), clock.now());
  EXPECT_DOUBLE_EQ(*controller.measured_rollouts_per_s(WorkerId{1}), 50);
}

TEST_F(Loop, ActivatesOnlyAfterTheShortfallIsSustained) {
  start(1, 60);
  start(2, 45);  // 105 of 110: the other half of the headroom is there
  EXPECT_TRUE(pass(300).empty());
  controller.completed(WorkerId{2}, 44, seconds(1), clock.now());
  EXPECT_TRUE(pass(30).empty());
  EXPECT_EQ(activated(pass(1)), (std::vector<std::string>{"s1"}));
  // The activation is on its way: no second one.
  EXPECT_TRUE(pass(120).empty());
  controller.started(WorkerId{3}, offer("s1", 40, 0.1));
  EXPECT_TRUE(pass(31).empty());
}

// A worker that is not heard is not lost: it may be away, or the learner busy with a long step. Nothing is rented in its
// place before whoever listens gives it up.
TEST_F(Loop, NothingIsRentedForAWorkerThatIsOnlySilent) {
  start(1, 60);
  start(2, 60);
  controller.completed(WorkerId{1}, 75, seconds(1), clock.now());  // faster than was predicted: what may be missing is little
  controller.set_required(122);
  pass(5);
  EXPECT_TRUE(pass(300).empty());  // five minutes without a word of anybody
  EXPECT_TRUE(controller.available(WorkerId{2}));
  die(2);
  EXPECT_EQ(activated(pass(1)), (std::vector<std::string>{"s1", "s2"}));
}

TEST_F(Loop, ALostWorkerIsReplacedAtOnce) {
  start(1, 60);
  start(2, 60);
  pass(5);
  die(2);
  EXPECT_EQ(activated(controller.tick(clock.now())), (std::vector<std::string>{"s1", "s2"}));
  EXPECT_TRUE(pass(10).empty());
}

TEST_F(Loop, ALossThatTheFleetCanBearIsNotReplaced) {
  start(1, 60);
  start(2, 60);
  start(3, 5);
  die(3);
  EXPECT_TRUE(pass(100).empty());
}

TEST_F(Loop, WithoutReplaceLostALossWaitsLikeAnyShortfall) {
  auto patient = config();
  patient.replace_lost = false;
  controller = FleetController(patient, {offer("s1", 80, 0.1)});
  start(1, 60);
  start(2, 60);
  die(2);
  EXPECT_TRUE(pass(30).empty());
  EXPECT_EQ(activated(pass(2)), (std::vector<std::string>{"s1"}));
}

TEST_F(Loop, AFailedStartMovesOnToTheNextOffer) {
  start(1, 60);
  start(2, 60);
  die(2);
  ASSERT_EQ(activated(controller.tick(clock.now())).size(), 2u);
  controller.start_failed("s1", clock.now());
  EXPECT_EQ(activated(controller.tick(clock.now())), (std::vector<std::string>{"s3"}));
  controller.start_failed("s2", clock.now());
  EXPECT_TRUE(controller.tick(clock.now()).empty());  // nothing is left to try
}

TEST_F(Loop, AnActivationThatNeverReportsIsGivenUp) {
  start(1, 104);
  EXPECT_EQ(activated(pass(31)), (std::vector<std::string>{"s1"}));
  EXPECT_TRUE(pass(299).empty());
  EXPECT_EQ(activated(pass(40)), (std::vector<std::string>{"s2"}));
}

TEST_F(Loop, ReleasesTheDearestPerRolloutOneAtATime) {
  start(1, 60, 0.1);
  start(2, 60, 0.2);
  start(3, 30, 0.5);
  start(4, 30, 0.3);  // 180 against 110 * 1.25
  EXPECT_TRUE(pass(30).empty());
  EXPECT_EQ(released(pass(1)), (std::vector<std::uint64_t>{3}));
  EXPECT_FALSE(controller.available(WorkerId{3}));
  die(3);
  // 150 is still above 137.5.
  EXPECT_TRUE(pass(29).empty());
  EXPECT_EQ(released(pass(5)), (std::vector<std::uint64_t>{4}));
  die(4);
  EXPECT_TRUE(pass(300).empty());
}

TEST_F(Loop, NeverReleasesBelowTheTarget) {
  start(1, 100, 0.1);
  start(2, 100, 0.9);
  EXPECT_TRUE(pass(300).empty());
}

TEST_F(Loop, AReleasedOfferCanBeRentedAgain) {
  start(1, 60, 0.1);
  start(2, 60, 0.2);
  start(3, 30, 0.15);
  ASSERT_EQ(released(pass(40)), (std::vector<std::uint64_t>{3}));
  die(3);
  ASSERT_EQ(controller.standby().size(), 4u);
  std::vector<std::string> order;
  for (const auto& o : controller.standby()) order.push_back(o.offer);
  EXPECT_EQ(order, (std::vector<std::string>{"s1", "s2", "o3", "s3"}));  // by cost per rollout
}

TEST_F(Loop, AHigherRequirementIsMet) {
  start(1, 60);
  start(2, 60);
  controller.set_required(140);  // 154
  EXPECT_EQ(activated(pass(31)), (std::vector<std::string>{"s1"}));
}

TEST_F(Loop, ManyCompletionsStayBounded) {
  start(1, 60);
  for (int i = 0; i < 100000; ++i) {
    clock.advance(milliseconds(7));
    controller.completed(WorkerId{1}, 2, milliseconds(40), clock.now());
  }
  EXPECT_NEAR(*controller.measured_rollouts_per_s(WorkerId{1}), 50, 1e-6);
}

}  // namespace
}  // namespace echoline::provisioner
