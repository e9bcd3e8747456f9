// The fleet's core: how many machines it rents, replaces and releases during a run.
#include "tests/provisioner/fleet.hpp"

namespace echoline::provisioner {
namespace {

TEST_F(Fleet, ALossThatTheFleetCanBearIsNotReplaced) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 5, 0.1)}, {"a", "b", "c"});
  pass(seconds(1));
  notify(fleet::Exited{tickets["c"], "gone"});
  pass(minutes(10));
  EXPECT_EQ(rented.size(), 3u);
}

// Until the first batch the machines boot and receive the first policy, and the learner has to wait.
TEST_F(Fleet, NothingIsAddedBeforeTheFirstBatch) {
  rules.fleet.usd_per_hour_max = 1;
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.1)}, {"a", "b"});
  set_learner_waiting(true);
  const auto generate_slowly = submit_every_second({"a", "b"}, 12);
  pass(minutes(10), generate_slowly);
  EXPECT_THAT(rented, ElementsAre("a", "b"));
  set_learner_waiting(false);
  pass(seconds(10), generate_slowly);
  EXPECT_THAT(rented, ElementsAre("a", "b")) << "the wait for the first batch does not count";
  set_learner_waiting(true);
  pass(seconds(35), generate_slowly);
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
}

// Workers whose work the run's lookahead limits measure a low rate. That is no shortfall if the learner does not wait.
TEST_F(Fleet, ALossIsReplacedByAsMuchAsWasLost) {
  std::vector<FleetOffer> offers;
  for (char name = 'a'; name <= 'j'; ++name) offers.push_back(offer(std::string(1, name), 30, 0.1));
  make(offers, {"a", "b", "c", "d"});
  set_learner_waiting(false);
  const auto generate_half = submit_every_second({"a", "b", "c", "d"}, 15);
  pass(minutes(5), generate_half);
  EXPECT_LT(core->numbers().expected_rollouts_per_s, 65);
  notify(fleet::Exited{tickets["d"], "gone"});
  pass(minutes(5), generate_half);
  EXPECT_THAT(rented, ElementsAre("a", "b", "c", "d", "e"));
}

TEST_F(Fleet, AddedMachinesStayWithinThePlannedDollarsPerHour) {
  rules.fleet.headroom = 0.5;  // $0.45 an hour
  make({offer("a", 60, 0.15), offer("b", 60, 0.15), offer("c", 30, 0.1), offer("d", 30, 0.1)}, {"a", "b"});
  const auto generate_slowly = submit_every_second({"a", "b", "c"}, 12);
  wait_for_next_batch();
  pass(minutes(10), generate_slowly);
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
  EXPECT_TRUE(core->numbers().exhausted);
  notify(fleet::Exited{tickets["a"], "gone"});  // a lost machine is replaced at any price
  notify(fleet::OffersRefreshed{{offer("e", 60, 0.4)}});
  pass(seconds(3), generate_slowly);
  EXPECT_THAT(rented, ElementsAre("a", "b", "c", "e"));
}

// The learner waits, and a machine is lost: only as much as was lost is rented at any price.
TEST_F(Fleet, ALossDoesNotOpenTheWholeGapToDearMachines) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 1), offer("d", 60, 1), offer("e", 60, 1)}, {"a", "b"});
  const auto generate_slowly = submit_every_second({"a", "b", "c", "d"}, 12);
  wait_for_next_batch();
  pass(minutes(3), generate_slowly);
  EXPECT_THAT(rented, ElementsAre("a", "b")) << "more than $0.22 an hour";
  notify(fleet::Exited{tickets["a"], "gone"});
  pass(minutes(3), generate_slowly);
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
}

// In a large fleet, some replacement is always on its way.
TEST_F(Fleet, AReplacementOnItsWayDoesNotHideThatTheFleetIsTooSmall) {
  rules.fleet.headroom = 0.5;
  rules.fleet.usd_per_hour_max = 10;
  rules.fleet.join_timeout = minutes(60);
  std::vector<FleetOffer> offers;
  for (char name = 'a'; name <= 'f'; ++name) offers.push_back(offer(std::string(1, name), 40, 0.1));
  make(offers, {"a", "b", "c", "d"});
  set_learner_waiting(false);
  const auto generate_slowly = submit_every_second({"a", "b", "c", "d"}, 26);
  pass(minutes(6), generate_slowly);
  auto_join = false;
  notify(fleet::Exited{tickets["d"], "gone"});
  pass(minutes(2), generate_slowly);
  ASSERT_THAT(noted("replaced"), ElementsAre("e"));
  ASSERT_THAT(noted("added"), IsEmpty());
  set_learner_waiting(true);
  pass(minutes(2), generate_slowly);
  EXPECT_THAT(noted("added"), ElementsAre("f"));
}

TEST_F(Fleet, WithoutReplaceLostALossWaitsLikeAnyShortfall) {
  rules.fleet.replace_lost = false;
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.1)}, {"a", "b"});
  pass(seconds(1));
  notify(fleet::Exited{tickets["a"], "gone"});
  pass(seconds(29));
  EXPECT_EQ(rented.size(), 2u);
  pass(seconds(3));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
}

// The target follows the measured T.
TEST_F(Fleet, MeasuredPaceMovesTheTarget) {
  rules.fleet.usd_per_hour_max = 10;
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.1)}, {"a", "b"});
  pass(seconds(1));
  for (int i = 0; i < 4; ++i) notify(fleet::StepMeasured{seconds(5)});
  EXPECT_DOUBLE_EQ(core->numbers().required_rollouts_per_s, 100);  // not by a few steps
  notify(fleet::StepMeasured{seconds(5)});
  EXPECT_DOUBLE_EQ(core->numbers().required_rollouts_per_s, 200);
  notify(fleet::StepMeasured{minutes(10)});  // an evaluation: it moves nothing
  EXPECT_DOUBLE_EQ(core->numbers().required_rollouts_per_s, 200);
  for (int i = 0; i < 5; ++i) notify(fleet::BroadcastMeasured{seconds(2)});
  EXPECT_NEAR(core->numbers().required_rollouts_per_s, 1000.0 / 3, 1e-9);
  // More machines do not help if the broadcast takes the whole period.
  for (int i = 0; i < 15; ++i) notify(fleet::BroadcastMeasured{seconds(6)});
  EXPECT_NEAR(core->numbers().required_rollouts_per_s, 400, 1e-9);
  EXPECT_THAT(noted("faster"), testing::SizeIs(1));
  // 110 of 440 are missing, but the fleet rents nothing before the learner waits.
  pass(minutes(5));
  EXPECT_EQ(rented.size(), 2u);
  wait_for_next_batch();
  pass(seconds(35));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
  EXPECT_THAT(notes.back().why, HasSubstr("120 rollouts/s are rented or on their way, 440 are wanted"));
}

// Workers go on generating during a broadcast: only the measured installation counts, and T_b by S.
TEST_F(Fleet, MeasuredInstallationsAndTheStalenessBudgetMoveTheTarget) {
  rules.fleet.capacity_rule = CapacityRule::kOverlap;
  rules.staleness_budget = 2;
  rules.fleet.usd_per_hour_max = 10;
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.1)}, {"a", "b"});
  const auto measure = [&](Duration broadcast, std::optional<Duration> install) {
    for (int i = 0; i < 15; ++i) notify(fleet::BroadcastMeasured{broadcast, {}, install});
    return core->numbers().required_rollouts_per_s;
  };
  EXPECT_DOUBLE_EQ(core->numbers().required_rollouts_per_s, 100);
  EXPECT_DOUBLE_EQ(measure(seconds(9), {}), 100) << "of a period of 10 s";
  EXPECT_DOUBLE_EQ(measure(seconds(9), seconds(2)), 125);
  EXPECT_EQ(core->numbers().install_time, seconds(2));
  EXPECT_DOUBLE_EQ(measure(seconds(9), seconds(30)), 200) << "no more than all of T_b, and 2R/T at most";
  EXPECT_DOUBLE_EQ(measure(seconds(14), seconds(1)), 1000.0 / 6) << "of two steps, 6 s are left for a batch";
  EXPECT_DOUBLE_EQ(measure(seconds(60), seconds(1)), 200) << "more than S allows";
}

// The run file may have changed since the plan was made.
TEST_F(Fleet, APlanThatHasBecomeImpossibleGivesTheGreatestUsefulTarget) {
  rules.times = {.broadcast = seconds(25), .install = seconds(12)};
  make({offer("a", 200, 0.1)}, {"a"});
  EXPECT_DOUBLE_EQ(core->numbers().required_rollouts_per_s, 200);
}

// The quickstart's learner takes a third of its planned step time, and waits for its workers. Without a budget for
// more, the fleet stays as planned.
TEST_F(Fleet, AFastLearnerRentsNothingBeyondThePlan) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.1)}, {"a", "b"});
  pass(seconds(1));
  set_learner_waiting(true);
  for (int i = 0; i < 15; ++i) notify(fleet::StepMeasured{std::chrono::milliseconds(3000 + 10 * i)});
  for (int i = 0; i < 15; ++i) notify(fleet::BroadcastMeasured{seconds(2)});
  pass(minutes(10));
  EXPECT_THAT(rented, ElementsAre("a", "b"));
  EXPECT_THAT(noted("faster"), testing::SizeIs(1));
  EXPECT_DOUBLE_EQ(core->numbers().required_rollouts_per_s, 100);
}

// 180 rollouts/s of which the learner takes 100. The dearest machine is released once that has lasted, and not while
// the learner waits.
TEST_F(Fleet, WorkersWithoutWorkAreReleasedDearestFirst) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.3), offer("c", 60, 0.2)}, {"a", "b", "c"});
  pass(minutes(20), lack_work({"a", "b", "c"}, 60, 0.44));
  EXPECT_THAT(noted("released"), IsEmpty()) << "there was no batch yet";
  set_learner_waiting(false);
  pass(minutes(7), lack_work({"a", "b", "c"}, 60, 0.44));
  EXPECT_THAT(noted("released"), IsEmpty());
  pass(minutes(2), lack_work({"a", "b", "c"}, 60, 0.44));
  EXPECT_THAT(noted("released"), ElementsAre("b"));
  EXPECT_THAT(ended, ElementsAre(tickets["b"]));
  EXPECT_EQ(core->numbers().lost, 0u);
  pass(minutes(60), lack_work({"a", "c"}, 60, 0.17));
  EXPECT_EQ(core->numbers().working, 2u) << "60 of 100: neither of them is unneeded";
  EXPECT_EQ(rented.size(), 3u);
}

TEST_F(Fleet, NothingIsReleasedWhileTheLearnerWaits) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.3), offer("c", 60, 0.2)}, {"a", "b", "c"});
  set_learner_waiting(false);
  pass(minutes(30), [&](int s) {
    if (s % 30 == 0) set_learner_waiting(true);
    if (s % 30 == 1) set_learner_waiting(false);
    lack_work({"a", "b", "c"}, 60, 0.44)(s);
  });
  EXPECT_THAT(noted("released"), IsEmpty());
}

// The planned fleet has 180 rollouts/s, and the learner takes 100.
TEST_F(Fleet, ALossWithinTheUnusedCapacityIsNotReplaced) {
  rules.fleet.headroom = 1;
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.1), offer("d", 60, 0.1)}, {"a", "b", "c"});
  set_learner_waiting(false);
  pass(minutes(6), lack_work({"a", "b", "c"}, 60, 0.44));
  notify(fleet::Exited{tickets["a"], "gone"});
  pass(minutes(2), lack_work({"b", "c"}, 60, 0.17));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
  notify(fleet::Exited{tickets["b"], "gone"});
  pass(seconds(2), lack_work({"c"}, 60, 0));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c", "d")) << "the rest would be too few";
}

// A worker's claim counts for no more than the time that has passed.
TEST_F(Fleet, AFalseClaimOfLackingWorkReleasesNoOther) {
  make({offer("liar", 60, 0.1), offer("b", 60, 0.3)}, {"liar", "b"});
  pass(seconds(1));
  set_learner_waiting(false);
  pass(minutes(30), [&](int s) {
    lack_work({"b"}, 60, 0)(s);
    notify(fleet::Heartbeat{.worker = worker("liar"), .rollouts = 60, .busy_s = 1, .without_work_s = 1e9});
  });
  EXPECT_THAT(noted("released"), IsEmpty());
}

// Rollouts that only fill the stock are not needed: the workers never lack work, and yet one of them is superfluous.
TEST_F(Fleet, AStockThatGrowsIsASurplus) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.3), offer("c", 60, 0.2)}, {"a", "b", "c"});
  set_learner_waiting(false);
  const auto all_busy = lack_work({"a", "b", "c"}, 60, 0);
  const auto run = [&](Duration time, std::uint64_t stock, int growth_per_step, std::uint64_t steps_left) {
    pass(time, [&](int s) {
      all_busy(s);
      if (s % 10 == 0) notify(fleet::StepMeasured{seconds(10), steps_left, stock += growth_per_step});
    });
    return stock;
  };
  const std::uint64_t stock = run(minutes(12), 1000, 700, 1000);
  EXPECT_THAT(noted("released"), ElementsAre("b")) << "110 of 180 are needed";
  run(minutes(30), stock, 0, 1000);
  EXPECT_THAT(noted("released"), ElementsAre("b")) << "the fleet now gives as much as is needed, so the stock stays";
}

// A fleet that is a little too small costs less, as long as the stock lasts.
TEST_F(Fleet, ALargeStockIsUsedUp) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 5, 0.9)}, {"a", "b", "c"});
  set_learner_waiting(false);
  const auto all_busy = lack_work({"a", "b", "c"}, 0, 0);
  const auto run = [&](std::uint64_t stock) {
    pass(minutes(12), [&](int s) {
      for (const char* name : {"a", "b"}) heartbeat(name, 60, 1);
      heartbeat("c", 5, 1);
      if (s % 10 == 0) notify(fleet::StepMeasured{seconds(10), 1000, stock});
    });
  };
  run(20'000);
  EXPECT_THAT(noted("released"), IsEmpty()) << "19,000 to spare are 5 a second, of which 2.5 are the reserve";
  run(40'000);
  EXPECT_THAT(noted("released"), ElementsAre("c")) << "39,000 to spare are 10 a second";
}

// The learner does not wait yet, but it would before a new machine has results.
TEST_F(Fleet, AMachineIsRentedBeforeTheStockIsUsedUp) {
  rules.fleet.usd_per_hour_max = 10;
  make({offer("a", 60, 0.1), offer("b", 30, 0.1), offer("c", 30, 0.1)}, {"a", "b"});
  set_learner_waiting(false);
  std::uint64_t stock = 12'000;
  const auto use_up_stock = [&](int s) {
    heartbeat("a", 60, 1), heartbeat("b", 30, 1);
    if (s % 10 == 0) notify(fleet::StepMeasured{seconds(10), 1000, stock -= 100});
  };
  pass(minutes(10), use_up_stock);
  EXPECT_EQ(stock, 6000u);
  EXPECT_THAT(noted("added"), IsEmpty()) << "5,000 to spare last for 8 minutes";
  pass(minutes(8), use_up_stock);
  EXPECT_EQ(stock, 1200u);
  EXPECT_THAT(noted("added"), ElementsAre("c"));
  EXPECT_THAT(notes.back().why, HasSubstr("nearly used up"));
}

// The stock suffices for the rest of the run, so no worker has work. One worker stays, in case a group must be
// generated again.
TEST_F(Fleet, MachinesAreReleasedWhenTheRestOfTheRunIsGenerated) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.3), offer("c", 60, 0.2)}, {"a", "b", "c"});
  set_learner_waiting(false);
  std::uint64_t steps_left = 100;
  pass(minutes(17), [&](int s) {
    lack_work({"a", "b", "c"}, 60, 1)(s);
    if (s % 10 == 0 && steps_left > 0)
      notify(fleet::StepMeasured{seconds(10), steps_left, steps_left * 1000}), --steps_left;
  });
  EXPECT_THAT(noted("released"), ElementsAre("b", "c"));
  EXPECT_EQ(core->numbers().working, 1u);
}

TEST_F(Fleet, ALimitOfThePriceIsNamed) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 1)}, {"a", "b"});
  wait_for_next_batch();
  pass(minutes(5), submit_every_second({"a", "b"}, 30));
  ASSERT_THAT(noted("short"), testing::SizeIs(1));
  EXPECT_THAT(notes.back().why, HasSubstr("above $0.3 an hour, which is the plan's with its headroom or one more"));
}

// A fleet of two has room for a third machine, whatever its headroom, but not for a fourth.
TEST_F(Fleet, ASmallFleetMayGrowByOneMachine) {
  make({offer("a", 30, 0.1), offer("b", 30, 0.1), offer("c", 30, 0.1), offer("d", 30, 0.1)}, {"a", "b"});
  wait_for_next_batch();
  pass(minutes(10), submit_every_second({"a", "b", "c"}, 15));
  EXPECT_THAT(noted("added"), ElementsAre("c"));
  EXPECT_EQ(noted("short").size(), 1u);
}

// Near its end, a run rents nothing that could not work any more, unless it might not end otherwise.
TEST_F(Fleet, NothingIsRentedForStepsThatAreNearlyOver) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.1), offer("d", 60, 0.1), offer("e", 60, 0.1),
        offer("f", 60, 0.1), offer("g", 60, 0.1)},
       {"a", "b"});
  auto_join = false;
  const auto give_results_after_30_s = [&](const Names& names) {
    pass(seconds(30));
    for (const std::string& name : names) join(name), heartbeat(name, 60, 1);
  };
  give_results_after_30_s({"a", "b"});
  for (const char* lost : {"a", "b", "c"}) {  // five first results are measured
    notify(fleet::Exited{tickets[lost], "gone"});
    pass(seconds(2));
    give_results_after_30_s({rented.back()});
  }
  ASSERT_EQ(rented.size(), 5u);
  notify(fleet::StepMeasured{seconds(10), 2});
  notify(fleet::Exited{tickets["d"], "gone"});
  pass(minutes(1));
  EXPECT_EQ(rented.size(), 5u) << "it would have results after 30 s, and 20 s are left";
  notify(fleet::Exited{tickets["e"], "gone"});
  pass(seconds(2));
  EXPECT_GT(rented.size(), 5u) << "no machine is left for the last steps";
}

}  // namespace
}  // namespace echoline::provisioner
