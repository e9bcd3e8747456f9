// The fleet's core: machines from their request to their end.
#include "tests/provisioner/fleet.hpp"

namespace echoline::provisioner {
namespace {

TEST_F(Fleet, PlannedOffersAreRentedOnceAndKept) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.1)}, {"a", "b"});
  set_learner_waiting(true);  // as every learner does until the first batch is there
  pass(minutes(30));
  EXPECT_THAT(rented, ElementsAre("a", "b"));
  EXPECT_THAT(stop_requests, IsEmpty());
  EXPECT_DOUBLE_EQ(core->numbers().working_rollouts_per_s, 120);
}

// The promised rate counts only for the first groups. A slow worker that keeps 80 % of it must count for exactly that.
// Otherwise the fleet overestimates its capacity, and the learner waits for rollouts.
TEST_F(Fleet, APromiseDoesNotFlatterForEver) {
  rules.group_size = 8;
  make({offer("a", 1, 0.1), offer("b", 200, 0.1)}, {"a", "b"});
  const auto measured = [&] { return core->machines().find("a")->measured_rollouts_per_s.value(); };
  pass(seconds(10));
  heartbeat("a", 8, 30);  // its first results say nothing about its rate
  EXPECT_FALSE(core->machines().find("a")->measured_rollouts_per_s.has_value());
  pass(seconds(10));
  heartbeat("a", 8, 10);
  EXPECT_GT(measured(), 0.85);
  EXPECT_LT(measured(), 1);
  for (int group = 2; group <= 8; ++group) {
    pass(seconds(10));
    heartbeat("a", 8, 10);
  }
  EXPECT_NEAR(measured(), 0.8, 1e-9);
}

// A machine is released before its provider has reported that it runs. It may still start, so the fleet looks for it
// after a minute, even if a machine may take longer to boot.
TEST_F(Fleet, AReleasedMachineWithoutAnAnswerIsLookedUpSoon) {
  rules.fleet.join_timeout = minutes(10);
  rules.fleet.usd_per_hour_max = 0.25;
  auto_start = false;
  make({offer("a", 60, 0.1), offer("b", 60, 0.1)}, {"a", "b"});
  pass(seconds(10));
  notify(fleet::Started{tickets.at("a"), {"i1"}, {}});
  notify(fleet::PriceChanged{tickets.at("a"), 0.16});
  pass(seconds(45));
  EXPECT_THAT(noted("released"), testing::SizeIs(1));
  const std::string released = noted("released").front();
  ASSERT_EQ(released, "a");  // the dearest
  notify(fleet::PriceChanged{tickets.at("b"), 0.3});
  pass(seconds(10));
  EXPECT_THAT(noted("released"), ElementsAre("a", "b"));
  pass(seconds(10));
  EXPECT_THAT(find_requests, testing::AllOf(testing::Not(IsEmpty()), testing::Each(tickets.at("b"))));
  notify(fleet::Found{tickets.at("b"), InstanceId{"i2"}});
  EXPECT_THAT(stop_requests, ElementsAre(tickets.at("a"), tickets.at("b")));
}

// Eight offers of 0.05 rollouts/s and groups of four: a worker submits its first group after 80 s. Both planned
// machines work, so nothing else is rented while they boot, before their first group, or while the learner waits.
TEST_F(Fleet, SlowWorkersThatWorkAreNotRentedAgain) {
  rules.pace = {4, 1, seconds(50)};
  std::vector<FleetOffer> offers;
  for (int i = 0; i < 8; ++i) offers.push_back(offer("o" + std::to_string(i), 0.05, 0.1));
  make(offers, {"o0", "o1"});
  auto_join = false;
  pass(seconds(41));
  join("o0");
  join("o1");
  set_learner_waiting(true);
  pass(minutes(60), [&](int s) {
    for (const char* name : {"o0", "o1"}) heartbeat(name, s % 80 == 79 ? 4 : 0, 1);
  });
  EXPECT_THAT(rented, ElementsAre("o0", "o1"));
  EXPECT_THAT(stop_requests, IsEmpty());
  EXPECT_NEAR(core->machines().find("o0")->measured_rollouts_per_s.value(), 0.05, 0.02);
}

// "3690 of 3692": six of the quickstart's machines do a little less than they promise.
TEST_F(Fleet, APerMilleIsNotMissing) {
  rules.pace = {2048, 1, seconds(1)};
  rules.times.broadcast = from_seconds(0.3898);
  make({offer("a", 1231, 1), offer("b", 1231, 1), offer("c", 1231, 1), offer("d", 600, 1)}, {"a", "b", "c"});
  EXPECT_NEAR(core->numbers().target_rollouts_per_s, 3692, 1);
  set_learner_waiting(true);
  pass(minutes(10), [&](int) {
    for (const char* name : {"a", "b", "c"}) heartbeat(name, 1230, 1);
  });
  EXPECT_NEAR(core->numbers().expected_rollouts_per_s, 3690, 1);
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
}

// During a step, an evaluation or a boot of minutes, workers submit nothing, and no worker is to blame.
TEST_F(Fleet, ALearnerStepOfMinutesRentsNothing) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.1)}, {"a", "b"});
  for (int step = 0; step < 5; ++step) {
    set_learner_waiting(true);
    pass(seconds(2), [&](int) {
      for (const char* name : {"a", "b"}) heartbeat(name, 58, 1);
    });
    set_learner_waiting(false);
    pass(seconds(step == 3 ? 600 : 60));
    notify(fleet::StepMeasured{seconds(10)});
  }
  EXPECT_THAT(rented, ElementsAre("a", "b"));
  EXPECT_THAT(stop_requests, IsEmpty());
}

TEST_F(Fleet, AMachineThatNeverJoinsIsStoppedAndReplaced) {
  rules.fleet.join_timeout = seconds(300);
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.2)}, {"a", "b"});
  auto_join = false;
  pass(seconds(1));
  join("a");
  pass(seconds(299));
  EXPECT_THAT(stop_requests, IsEmpty());
  auto_stop = false;
  pass(seconds(3));
  EXPECT_THAT(stop_requests, ElementsAre(tickets["b"]));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
  EXPECT_EQ(state("b"), MachineState::kStopping);
  // Without an answer, the fleet asks again, until the provider reports that the machine is gone.
  pass(minutes(5));
  EXPECT_GT(std::count(stop_requests.begin(), stop_requests.end(), tickets["b"]), 3);
  EXPECT_THAT(ended, IsEmpty());
  notify(fleet::Stopped{tickets["b"]});
  EXPECT_THAT(ended, testing::Contains(tickets["b"]));
}

// A provider takes a few requests at a time. The others have no row, and the time to join counts from the answer.
TEST_F(Fleet, MachinesWaitForTheirTurnWithoutARow) {
  rules.starts_at_once["local"] = 2;
  auto_start = false;
  std::vector<FleetOffer> offers;
  Names names;
  for (int i = 0; i < 5; ++i) names.push_back("o" + std::to_string(i)), offers.push_back(offer(names.back(), 22, 0.1));
  make(offers, names);
  pass(seconds(30));
  EXPECT_THAT(rented, ElementsAre("o0", "o1"));
  EXPECT_EQ(core->numbers().queued, 5u);
  notify(fleet::Started{tickets["o0"], {"i1"}, {}});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("o0", "o1", "o2"));
  pass(seconds(58));
  EXPECT_THAT(noted("lost"), IsEmpty());
  join("o0");
  pass(minutes(2));
  EXPECT_THAT(noted("lost"), IsEmpty());
  // An offer that vanishes meanwhile is not requested.
  notify(fleet::OffersRefreshed{{offers[0], offers[1], offers[2], offers[4]}});
  notify(fleet::Started{tickets["o1"], {"i2"}, {}});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("o0", "o1", "o2", "o4"));
  EXPECT_THAT(noted("failed"), ElementsAre("o3"));
}

// A provider whose key is refused or whose account has no credit is not asked again and again. Another one is rented
// from meanwhile.
TEST_F(Fleet, ABlockedProviderIsNotAskedUntilItCanRentAgain) {
  rules.starts_at_once["local"] = 2;
  auto_start = false;
  std::vector<FleetOffer> offers;
  Names names;
  for (int i = 0; i < 5; ++i) names.push_back("o" + std::to_string(i)), offers.push_back(offer(names.back(), 22, 0.1));
  make(offers, names);
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("o0", "o1"));
  notify(fleet::StartFailed{.ticket = tickets["o0"], .why = "no credit", .retryable = true, .by_account = true});
  notify(fleet::StartFailed{.ticket = tickets["o1"], .why = "no credit", .retryable = true, .by_account = true});
  notify(fleet::ProviderTrouble{"local", "no credit"});
  pass(minutes(30));
  EXPECT_EQ(rented.size(), 2u);
  EXPECT_THAT(noted("failed"), testing::SizeIs(1));
  EXPECT_EQ(noted("blocked").size(), 1u);
  EXPECT_EQ(core->numbers().queued, 0u);
  auto_start = true;
  notify(fleet::ProviderTrouble{"local", ""});
  pass(minutes(2));
  EXPECT_EQ(core->numbers().working, 5u);
}

TEST_F(Fleet, QueuedMachinesEndWithTheRunAndSentOnesAreCancelled) {
  rules.starts_at_once["local"] = 1;
  auto_start = false;
  make({offer("a", 60, 0.1), offer("b", 60, 0.1)}, {"a", "b"});
  pass(seconds(1));
  const auto actions = core->close("over", clock.now());
  EXPECT_THAT(actions, testing::Contains(testing::VariantWith<fleet::CancelStart>(
                           testing::Field(&fleet::CancelStart::ticket, tickets["a"]))));
  EXPECT_EQ(core->machines().size(), 1u);
  notify(fleet::Cancelled{tickets["a"]});
  EXPECT_THAT(ended, ElementsAre(tickets["a"]));
  EXPECT_FALSE(ran[tickets["a"]]);
  EXPECT_TRUE(core->machines().empty());
}

// Each phase of a start has its own limit, counted from its own beginning.
TEST_F(Fleet, EachPhaseOfAStartHasItsLimit) {
  rules.fleet.queue_timeout = minutes(2);
  rules.fleet.pull_timeout = minutes(4);
  rules.fleet.boot_timeout = minutes(3);
  auto_start = false;
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.1)}, {"a", "b"});
  pass(seconds(100));
  notify(fleet::Started{.ticket = tickets["a"], .instance = {"i1"}, .usd_per_hour = {}, .running_follows = true});
  EXPECT_EQ(core->numbers().pulling, 1u);
  pass(seconds(22));
  EXPECT_THAT(noted("lost"), ElementsAre("b"));  // no answer
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
  notify(fleet::Started{.ticket = tickets["c"], .instance = {"i3"}, .usd_per_hour = {}, .running_follows = true});
  pass(seconds(200));
  notify(fleet::Running{tickets["a"]});
  pass(seconds(42));
  EXPECT_THAT(noted("lost"), ElementsAre("b", "c"));  // its container does not run
  pass(seconds(137));
  EXPECT_THAT(noted("lost"), ElementsAre("b", "c"));
  pass(seconds(2));
  EXPECT_THAT(noted("lost"), ElementsAre("b", "c", "a"));  // it runs, and its worker does not join
  EXPECT_THAT(notes.back().why, testing::AnyOf(HasSubstr("worker did not join"), HasSubstr("no offer is left")));
}

TEST_F(Fleet, ALostWorkerIsReplacedAtOnceAndItsMachineStopped) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.2), offer("d", 60, 0.3)}, {"a", "b"});
  pass(seconds(5));
  notify(fleet::Exited{tickets["a"], "killed by signal 9"});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
  EXPECT_THAT(ended, ElementsAre(tickets["a"]));
  notify(fleet::Left{worker("b"), "away for too long"});
  EXPECT_THAT(stop_requests, ElementsAre(tickets["b"]));
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c", "d"));
  EXPECT_EQ(core->numbers().lost, 2u);
  EXPECT_EQ(core->numbers().replaced, 2u);
}

TEST_F(Fleet, AnOutbidMachineIsReplacedAtOnceAndNotAtThatPrice) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.2)}, {"a", "b"});
  pass(seconds(5));
  auto_stop = false;
  notify(fleet::Exited{tickets["a"], "outbid", true, true});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
  EXPECT_THAT(stop_requests, ElementsAre(tickets["a"]));  // its disk still costs
  notify(fleet::Stopped{tickets["a"]});
  notify(fleet::Exited{tickets["c"], "outbid", true});
  pass(minutes(200));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));  // nothing else is there, and these are refused
  EXPECT_THAT(noted("short"), testing::SizeIs(1));
  notify(fleet::OffersRefreshed{{offer("a", 60, 0.4)}});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c", "a"));
}

// The provider announces that it takes a machine away. The fleet rents another at once, and the old one submits its
// work.
TEST_F(Fleet, AnEndingMachineIsReplacedAtOnceAndDrained) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.2), offer("d", 60, 0.3)}, {"a", "b"});
  auto_drain = false;
  pass(seconds(5));
  notify(fleet::Ending{tickets["a"], "outbid: it is being stopped", true});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
  EXPECT_THAT(drain_requests, ElementsAre(worker("a").value));
  EXPECT_THAT(stop_requests, IsEmpty());
  EXPECT_EQ(state("a"), MachineState::kDraining);
  EXPECT_EQ(core->numbers().working, 2u);
  heartbeat("a", 4, 1);
  notify(fleet::Drained{worker("a")});
  EXPECT_THAT(stop_requests, ElementsAre(tickets["a"]));
  EXPECT_EQ(core->machines().find("a"), nullptr);
  EXPECT_EQ(core->numbers().lost, 1u);
  // A worker whose operator stops it reports that it leaves, and goes.
  notify(fleet::Leaving{worker("b")});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c", "d"));  // and not a, whose bid was too low
  notify(fleet::Left{worker("b"), "drained"});
  EXPECT_THAT(stop_requests, ElementsAre(tickets["a"], tickets["b"]));
  EXPECT_EQ(core->numbers().lost, 2u);
  EXPECT_EQ(core->numbers().replaced, 2u);
}

// The machine may be taken away before it has submitted anything, or may never report its end. The fleet waits for
// neither, and counts neither as lost twice.
TEST_F(Fleet, DrainingEndsAfterAWhileOrWithTheMachine) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.2), offer("d", 60, 0.3)}, {"a", "b"});
  auto_drain = false;
  pass(seconds(5));
  notify(fleet::Ending{tickets["a"], "preempted"});
  notify(fleet::Ending{tickets["b"], "preempted"});
  pass(seconds(10));
  notify(fleet::Exited{tickets["a"], "it is gone"});
  EXPECT_EQ(core->machines().find("a"), nullptr);
  EXPECT_THAT(ended, ElementsAre(tickets["a"]));
  notify(fleet::Joined{worker("b"), "b"});  // it was away, and is drained again
  EXPECT_EQ(drain_requests.size(), 3u);
  pass(rules::kDrainTimeout - seconds(11));
  EXPECT_THAT(stop_requests, IsEmpty());
  pass(seconds(1));
  EXPECT_THAT(stop_requests, ElementsAre(tickets["b"]));
  EXPECT_EQ(core->numbers().lost, 2u);
  EXPECT_THAT(rented, ElementsAre("a", "b", "c", "d"));
}

// With more bytes than planned, or faster steps, traffic costs more. The next rental minimises the cost with it.
TEST_F(Fleet, MeasuredBytesMoveThePriceOfTraffic) {
  rules.payload = Bytes{1'000'000};
  std::vector<FleetOffer> offers{offer("a", 120, 0.1), offer("cheap", 120, 0.1), offer("near", 120, 0.15)};
  for (FleetOffer& o : offers) o.download_usd_per_gb = 0.01, o.upload_usd_per_gb = 0.02;
  offers[0].traffic_usd_per_hour = 0.01;
  offers[1].traffic_usd_per_hour = 0.02;
  make(offers, {"a"});
  pass(seconds(1));
  EXPECT_NEAR(core->numbers().usd_per_hour, 0.11, 1e-9);
  for (std::size_t i = 0; i < MedianMeter<Duration>::kSamplesMin; ++i) {
    EXPECT_NEAR(core->numbers().usd_per_hour, 0.11, 1e-9);
    notify(fleet::BroadcastMeasured{seconds(1), Bytes{4'000'000}});
  }
  EXPECT_NEAR(core->numbers().usd_per_hour, 0.1 + 4 * 0.01, 1e-9);
  EXPECT_EQ(core->numbers().payload.count, 4'000'000u);
  for (std::size_t i = 0; i < MedianMeter<Duration>::kSamplesMin; ++i) notify(fleet::StepMeasured{seconds(20)});
  EXPECT_NEAR(core->numbers().usd_per_hour, 0.1 + 2 * 0.01, 1e-9);  // half as many publications an hour
  for (std::size_t i = 0; i < MedianMeter<Duration>::kSamplesMax; ++i) notify(fleet::StepMeasured{seconds(10)});
  // A working machine's traffic counts as measured: 1 MB received and 2 MB forwarded per second.
  std::uint64_t mb = 1000;  // what it took to join is none of it
  pass(minutes(3), [&](int) {
    heartbeat("a", 120, 1);
    notify(fleet::TrafficMeasured{worker("a"), Bytes{mb * 1'000'000}, Bytes{2 * mb * 1'000'000}});
    ++mb;
  });
  EXPECT_NEAR(core->numbers().usd_per_hour, 0.1 + 3600 * (0.001 * 0.01 + 0.002 * 0.02), 1e-3);
  // As planned, "cheap" is the cheapest (0.12); as measured, "near", whose traffic is free (0.15 and not 0.18).
  notify(fleet::Exited{tickets["a"], "gone"});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "near"));
}

// After a refresh, the fleet asks for no offer that is gone and prefers new or cheaper ones. Rented machines stay.
TEST_F(Fleet, LaterRentalsUseTheRefreshedMarket) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.2), offer("d", 60, 0.3)}, {"a", "b"});
  pass(seconds(5));
  notify(fleet::OffersRefreshed{{offer("a", 60, 0.1), offer("d", 60, 0.15), offer("e", 60, 0.18)}});
  EXPECT_THAT(notes.back().what, testing::StrEq("market"));
  EXPECT_THAT(notes.back().why, HasSubstr("3 offers: 1 new, 2 gone, 1 cheaper, 0 dearer"));
  EXPECT_THAT(stop_requests, IsEmpty());
  notify(fleet::Exited{tickets["b"], "gone"});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b", "d"));  // b was as cheap, and is not offered any more
  notify(fleet::Exited{tickets["d"], "gone"});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b", "d", "e"));
  // An unchanged market is not recorded.
  const std::size_t told = notes.size();
  notify(fleet::OffersRefreshed{{offer("a", 60, 0.1), offer("d", 60, 0.15), offer("e", 60, 0.18)}});
  EXPECT_EQ(notes.size(), told);
}

TEST_F(Fleet, AVanishedOfferIsReplacedAtOnce) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.2)}, {"a", "b"});
  notify(fleet::OffersRefreshed{{offer("a", 60, 0.1), offer("c", 60, 0.2)}});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "c"));
  EXPECT_EQ(noted("failed"), Names{"b"});
}

// Eight workers, three of which do 40 % less than promised; one dies and one is outbid. The learner is modelled as a
// steady consumer of 1,000 rollouts per step of 10 s.
TEST_F(Fleet, ThreeOfEightLieOneDiesOneIsOutbidAndTheLearnerSoonWaitsNoMore) {
  rules.fleet.join_timeout = seconds(60);
  rules.fleet.usd_per_hour_max = 1.6;
  std::vector<FleetOffer> offers;
  Names planned;
  for (int i = 0; i < 16; ++i) {
    offers.push_back(offer("o" + std::to_string(i), 14, i < 8 ? 0.1 : 0.12, "h" + std::to_string(i)));
    if (i < 8) planned.push_back("o" + std::to_string(i));
  }
  make(offers, planned);
  auto_join = false;
  std::map<std::string, int> booted;  // when they were first seen
  double stock = 0, usd = 0, usd_most = 0, waited = 0, waited_late = 0;
  int busy = 0, recovered = 0;
  pass(minutes(40), [&](int s) {
    for (const auto& [key, machine] : core->machines().all()) usd += machine.offer.usd_per_hour / 3600;
    usd_most = std::max(usd_most, core->numbers().usd_per_hour);
    for (const std::string& name : rented) {
      const auto* machine = core->machines().find(name);
      if (machine == nullptr || machine->instance.text.empty()) continue;
      if (s - booted.try_emplace(name, s).first->second == 40) join(name);  // 40 s to boot
      if (machine->state != MachineState::kWorking || stock > 2000) continue;
      const double rate = name == "o0" || name == "o1" || name == "o2" ? 8.4 : 14;
      heartbeat(name, rate, 1);
      stock += rate;
    }
    if (s == 300) notify(fleet::Exited{tickets["o3"], "killed by signal 9"});
    if (s == 360) notify(fleet::Exited{tickets["o4"], "outbid", true});
    if (busy > 0 && --busy == 0) notify(fleet::StepMeasured{seconds(10)});
    if (busy == 0) {
      set_learner_waiting(stock < 1000);
      if (stock >= 1000) stock -= 1000, busy = 10;
    }
    if (busy == 0 && s > 60) waited += 1;
    if (busy == 0 && s >= 1200) waited_late += 1;
    if (s > 360 && recovered == 0 && core->numbers().working_rollouts_per_s >= 104.5) recovered = s;
  });
  EXPECT_GT(waited, 0);  // it was felt
  EXPECT_GT(recovered, 360);
  EXPECT_LE(recovered, 360 + 2 * 60 + 360);  // the promise: twice the boot time and six minutes
  EXPECT_LE(waited_late / 1200, 0.05);
  EXPECT_LE(usd_most, 1.6);
  EXPECT_LE(usd, 1.6 * 40 / 60);
  EXPECT_THAT(noted("demoted"), UnorderedElementsAre("o0", "o1", "o2"));
  EXPECT_THAT(noted("lost"), ElementsAre("o3", "o4"));
  EXPECT_LE(core->numbers().working, 12u);
}

TEST_F(Fleet, AFailedStartMovesOnToTheNextOffer) {
  make({offer("a", 120, 0.1), offer("b", 120, 0.2), offer("c", 120, 0.3)}, {"a"});
  auto_start = false;
  pass(seconds(1));
  notify(fleet::StartFailed{tickets["a"], "410 gone", false, false});
  EXPECT_FALSE(ran.at(tickets["a"]));  // it costs nothing
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b"));
  notify(fleet::StartFailed{tickets["b"], "429", true, false});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
  notify(fleet::StartFailed{tickets["c"], "500", true, false});
  pass(seconds(61));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c", "b"));  // after a while, what may be asked for again
}

// A create call that returns an error although it rented.
TEST_F(Fleet, AMachineThatMayBeRentedIsLookedUpAndStopped) {
  make({offer("a", 120, 0.1), offer("b", 120, 0.2)}, {"a"});
  auto_start = false;
  pass(seconds(1));
  notify(fleet::StartFailed{tickets["a"], "time-out", true, true});
  EXPECT_THAT(find_requests, ElementsAre(tickets["a"]));
  EXPECT_THAT(ended, IsEmpty());
  pass(seconds(70));
  EXPECT_GE(find_requests.size(), 2u);  // no answer yet
  notify(fleet::Found{tickets["a"], InstanceId{"vast:7"}});
  EXPECT_THAT(stop_requests, ElementsAre(tickets["a"]));
  EXPECT_THAT(ended, ElementsAre(tickets["a"]));
  notify(fleet::StartFailed{tickets["b"], "time-out", true, true});
  notify(fleet::Found{tickets["b"], {}});
  EXPECT_THAT(ended, ElementsAre(tickets["a"], tickets["b"]));
  EXPECT_FALSE(ran.at(tickets["b"]));
}

TEST_F(Fleet, AStartWithoutAnAnswerIsLookedUpUntilItIsKnown) {
  rules.fleet.queue_timeout = seconds(60);
  make({offer("a", 120, 0.1), offer("b", 120, 0.2)}, {"a"});
  auto_start = false;
  pass(seconds(62));
  EXPECT_EQ(state("a"), MachineState::kDoubtful);
  EXPECT_THAT(rented, ElementsAre("a", "b"));
  notify(fleet::Found{tickets["a"], {}});  // not yet; it may still come to be
  EXPECT_EQ(state("a"), MachineState::kDoubtful);
  notify(fleet::Started{tickets["a"], {"late"}, {}});
  EXPECT_THAT(stop_requests, ElementsAre(tickets["a"]));
  EXPECT_THAT(ended, ElementsAre(tickets["a"]));
}

TEST_F(Fleet, MachinesOfAnEarlierProcessAreUsed) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.1)}, {"a", "b"});
  tickets["a"] = 71;
  tickets["c"] = 72;
  last_ticket = 100;
  notify(fleet::Recovered{71, offer("a", 60, 0.1), {"vast:1"}});
  notify(fleet::Recovered{72, offer("c", 60, 0.1), {}});
  EXPECT_THAT(find_requests, ElementsAre(71, 72));
  pass(seconds(1));
  EXPECT_THAT(rented, IsEmpty());  // a and c may be enough
  notify(fleet::Found{71, InstanceId{"vast:1"}});
  notify(fleet::Found{72, InstanceId{"vast:2"}});
  join("a");
  join("c");
  pass(minutes(5));
  EXPECT_THAT(rented, IsEmpty());
  EXPECT_THAT(noted("adopted"), ElementsAre("a", "c"));
  EXPECT_EQ(core->numbers().working, 2u);
}

TEST_F(Fleet, AGoneMachineOfAnEarlierProcessIsBookedAndReplaced) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1)}, {"a", "b"});
  last_ticket = 100;
  notify(fleet::Recovered{71, offer("a", 60, 0.1), {"local:1"}});
  notify(fleet::Found{71, {}});
  EXPECT_THAT(ended, ElementsAre(71));
  EXPECT_TRUE(ran.at(71));
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b"));
}

// The learner was killed before it asked for the machine, or before it was answered. The end of a resumed run waits for
// it only as long as listings may be late.
TEST_F(Fleet, AMachineThatAnEarlierProcessMayHaveRequestedIsGivenUpAfterAMinute) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1)}, {"a", "b"});
  notify(fleet::Recovered{71, offer("c", 60, 0.1), {}});
  const auto list_nothing = [&](int) { notify(fleet::Found{.ticket = 71, .instance = {}, .certain = false}); };
  pass(seconds(55), list_nothing);
  EXPECT_THAT(ended, IsEmpty());
  pass(seconds(10), list_nothing);
  EXPECT_THAT(ended, ElementsAre(71));
}

TEST_F(Fleet, ASlowerHostThanPromisedIsCompensatedAndDemoted) {
  rules.fleet.usd_per_hour_max = 10;
  make({offer("liar", 60, 0.1, "h1"), offer("b", 60, 0.2), offer("c", 60, 0.3), offer("liar2", 90, 0.1, "h1")},
       {"liar", "b"});
  pass(seconds(1));
  wait_for_next_batch();
  pass(seconds(40), [&](int) {
    heartbeat("liar", 12, 1);
    heartbeat("b", 60, 1);
  });
  EXPECT_THAT(noted("demoted"), ElementsAre("liar"));
  EXPECT_THAT(rented, ElementsAre("liar", "b", "c"));
  notify(fleet::Exited{tickets["liar"], "gone"});
  notify(fleet::Exited{tickets["c"], "gone"});
  notify(fleet::OffersRefreshed{{offer("liar2", 90, 0.1, "h1"), offer("d", 60, 0.4)}});
  pass(seconds(2), [&](int) { heartbeat("b", 60, 1); });
  // The host keeps a fifth of its promises, so liar2 counts with 18 rollouts/s instead of 90, and d is rented.
  EXPECT_THAT(rented, ElementsAre("liar", "b", "c", "d"));
}

TEST_F(Fleet, AWorkerThatHandsInNothingWhileOthersDoIsReplaced) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.2), offer("c", 60, 0.3)}, {"a", "b"});
  pass(minutes(5) + seconds(5), [&](int) { heartbeat("a", 60, 1); });
  EXPECT_THAT(stop_requests, ElementsAre(tickets["b"]));
  EXPECT_THAT(rented, ElementsAre("a", "b", "c"));
}

// If capacity exceeds the run's use, the worker that gets each policy last finds no work.
TEST_F(Fleet, AWorkerThatFindsNoWorkIsNotStalled) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.2), offer("c", 60, 0.3)}, {"a", "b"});
  pass(minutes(20), [&](int s) {
    heartbeat("a", 60, 1);
    if (tickets.contains("b")) notify(fleet::Heartbeat{worker("b"), 0, 0, s % 120 == 0});
  });
  EXPECT_THAT(stop_requests, IsEmpty());
  EXPECT_THAT(rented, ElementsAre("a", "b"));
  pass(minutes(5) + seconds(5), [&](int) { heartbeat("a", 60, 1); });
  EXPECT_THAT(stop_requests, ElementsAre(tickets["b"])) << "there is work, and it submits nothing";
}

// A policy of gigabytes over a home uplink takes longer than the patience with a stalled worker.
TEST_F(Fleet, ANewcomerIsNotStalledWhileItReceivesItsFirstPolicy) {
  rules.snapshot = Bytes{8'000'000};
  make({offer("a", 60, 0.1), offer("b", 60, 0.2), offer("c", 60, 0.3)}, {"a", "b"});
  const auto receives = [&](int s, std::uint64_t per_s) {
    heartbeat("a", 60, 1);
    if (tickets.contains("b")) notify(fleet::TrafficMeasured{worker("b"), Bytes{s * per_s}, Bytes{}});
  };
  pass(minutes(32), [&](int s) { receives(s, 4'167); });  // whole after 32 minutes
  EXPECT_THAT(stop_requests, IsEmpty());
  pass(minutes(4), [&](int s) { receives(32 * 60 + s, 4'167); });
  EXPECT_THAT(stop_requests, IsEmpty()) << "it has five minutes for its first group";
  pass(minutes(2), [&](int s) { receives(36 * 60 + s, 4'167); });
  EXPECT_THAT(stop_requests, ElementsAre(tickets["b"])) << "received bytes are no sign of work";
}

TEST_F(Fleet, ANewcomerThatHardlyReceivesAnythingIsReplaced) {
  rules.snapshot = Bytes{8'000'000};
  make({offer("a", 60, 0.1), offer("b", 60, 0.2), offer("c", 60, 0.3)}, {"a", "b"});
  pass(minutes(5) + seconds(5), [&](int s) {
    heartbeat("a", 60, 1);
    if (tickets.contains("b")) notify(fleet::TrafficMeasured{worker("b"), Bytes{s * 3'000ull}, Bytes{}});
  });
  EXPECT_THAT(stop_requests, ElementsAre(tickets["b"]));
}

TEST_F(Fleet, TheBudgetPerHourIsNeverPassed) {
  rules.fleet.usd_per_hour_max = 0.35;
  make({offer("a", 40, 0.1), offer("b", 40, 0.1), offer("c", 40, 0.2), offer("d", 40, 0.1)}, {"a", "b", "c"});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b"));
  pass(minutes(5));
  wait_for_next_batch();
  pass(minutes(5));
  EXPECT_THAT(rented, ElementsAre("a", "b", "d"));
  notify(fleet::PriceChanged{tickets["a"], 0.2});
  pass(seconds(1));
  EXPECT_THAT(stop_requests, ElementsAre(tickets["a"]));
  EXPECT_LE(core->numbers().usd_per_hour, 0.35);
}

TEST_F(Fleet, TheTotalBudgetIsNeverPassedAndEverythingIsGivenBack) {
  rules.fleet.usd_max = 1;
  make({offer("a", 60, 3), offer("b", 60, 3)}, {"a", "b"});
  pass(minutes(1));
  EXPECT_THAT(rented, ElementsAre("a", "b"));
  pass(minutes(20));
  EXPECT_TRUE(core->numbers().money_spent);
  EXPECT_TRUE(core->machines().empty());
  EXPECT_THAT(noted("budget"), testing::SizeIs(1));
  // $6 an hour: $1 pays for 10 minutes, of which 3 are reserved for the release.
  EXPECT_LE(core->numbers().usd, 0.75);
  notify(fleet::OffersRefreshed{{offer("c", 60, 0.1)}});
  pass(minutes(20));
  EXPECT_EQ(rented.size(), 2u);
}

// The ledger's sum counts: it includes traffic and the spending of the run's earlier processes.
TEST_F(Fleet, TheLedgersSumCountsAsSpent) {
  rules.fleet.usd_max = 1;
  make({offer("a", 120, 1)}, {"a"});
  notify(fleet::SpendingMeasured{0.99});
  pass(minutes(5));
  EXPECT_THAT(rented, IsEmpty());
  EXPECT_THAT(noted("budget"), testing::SizeIs(1));
}

TEST_F(Fleet, RentalsPerMinuteAreBounded) {
  rules.fleet.workers_max = 8;
  std::vector<FleetOffer> offers;
  for (int i = 0; i < 100; ++i) offers.push_back(offer("o" + std::to_string(i), 30, 0.1));
  make(offers, {"o0", "o1", "o2", "o3"});
  auto_start = false;
  pass(seconds(1));
  const auto refuse_all = [&](int) {
    for (const auto& [name, ticket] : tickets) notify(fleet::StartFailed{ticket, "503", true, false});
  };
  pass(seconds(59), refuse_all);
  EXPECT_EQ(rented.size(), 4 + rules::kRentalsPerMinute);
  pass(minutes(1), refuse_all);
  EXPECT_EQ(rented.size(), 4 + 2 * rules::kRentalsPerMinute);
}

// The learner's machine slept, or its clock was set: time during which the process did not run causes no timeout.
TEST_F(Fleet, TimeInWhichTheProcessDidNotRunCausesNoTimeout) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.1)}, {"a", "b"});
  auto_join = false;
  pass(seconds(30));
  clock.advance(std::chrono::hours(10));
  pass(seconds(1));
  join("a");
  join("b");
  clock.set(TimePoint(seconds(1)));
  pass(minutes(5));
  EXPECT_THAT(rented, ElementsAre("a", "b"));
  EXPECT_THAT(stop_requests, IsEmpty());
}

TEST_F(Fleet, NothingIsRentedThatCouldNotBeBooked) {
  make({offer("a", 120, 0.1), offer("b", 120, 0.2)}, {"a"});
  auto_book = false;
  pass(seconds(1));
  notify(fleet::BookingFailed{"a", "disk full"});
  EXPECT_EQ(core->machines().find("a"), nullptr);
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b"));
  carry_out(core->close("the run has ended", clock.now()));
  notify(fleet::Booked{"b", tickets["b"]});  // too late: it is not asked for
  EXPECT_THAT(ended, ElementsAre(tickets["b"]));
  EXPECT_TRUE(core->machines().empty());
}

TEST_F(Fleet, ClosingReleasesMachinesInEveryState) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 30, 0.1)}, {"a", "b", "c"});
  auto_join = false;
  pass(seconds(1));
  join("a");
  auto_start = false;
  notify(fleet::Exited{tickets["c"], "gone"});
  pass(seconds(1));
  notify(fleet::Recovered{50, offer("z", 60, 0.1), {}});
  carry_out(core->close("the run has ended", clock.now()));
  EXPECT_THAT(stop_requests, UnorderedElementsAre(tickets["a"], tickets["b"]));
  notify(fleet::Found{50, InstanceId{"x"}});
  EXPECT_THAT(stop_requests, testing::Contains(50));
  EXPECT_TRUE(core->machines().empty());
  pass(minutes(30));
  EXPECT_EQ(rented.size(), 3u);
}

TEST_F(Fleet, TwoOffersOfOneMachineAreNeverRentedTogether) {
  make({offer("a", 120, 0.1, "h"), offer("a2", 120, 0.1, "h"), offer("b", 120, 0.9, "k")}, {"a"});
  pass(seconds(1));
  auto_stop = false;
  notify(fleet::Left{worker("a"), "expelled"});
  pass(seconds(1));
  EXPECT_THAT(rented, ElementsAre("a", "b"));  // a is not gone yet
}

TEST_F(Fleet, GpusOfOneMachineAreRentedOnceAndAHostNotTooOften) {
  rules.fleet.per_host_max = 2;
  rules.fleet.usd_per_hour_max = 10;
  std::vector<FleetOffer> offers{offer("a", 50, 0.1, "h"), offer("a0", 50, 0.1, "h"), offer("a1", 50, 0.1, "h"),
                                 offer("a2", 50, 0.1, "h"), offer("z", 50, 0.9, "k")};
  offers[1].gpus = 1, offers[2].gpus = 2, offers[3].gpus = 4;
  for (int i = 0; i < 4; ++i) offers[static_cast<std::size_t>(i)].owner = "somebody";
  make(offers, {"a0"});
  pass(seconds(1));
  wait_for_next_batch();
  pass(minutes(5));
  EXPECT_THAT(rented, ElementsAre("a0", "a1", "z"));  // a has a0's GPU, a2 would be the third
}

TEST_F(Fleet, EveryDecisionCarriesItsNumbers) {
  make({offer("a", 60, 0.1), offer("b", 60, 0.1), offer("c", 60, 0.2)}, {"a", "b"});
  pass(seconds(5));
  notify(fleet::Exited{tickets["a"], "killed by signal 9"});
  pass(seconds(1));
  ASSERT_EQ(noted("replaced"), Names{"c"});
  EXPECT_THAT(
      notes.back().why,
      HasSubstr("a machine was lost: 60 rollouts/s are rented or on their way, 110 are wanted (M* 100; T 10 s"));
  EXPECT_THAT(notes.back().why, HasSubstr("an hour"));
}

}  // namespace
}  // namespace echoline::provisioner
