// Whole runs under virtual time: properties of every scenario, and effects that a researcher would expect.
#include <gtest/gtest.h>

#include <algorithm>

#include "sim/broadcast_scenario.hpp"
#include "sim/run_scenario.hpp"

namespace echoline::sim {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

// Machines of 2 rollouts/s for $0.20 an hour; 160 rollouts every 20 s, so five of them keep the learner busy.
RunScenario scenario(std::size_t machines = 20) {
  RunScenario s;
  s.pacing = {{3, 1, 2}, 160, 40, 8};
  s.lease.tokens_max = 4000;
  s.tokens = {500, 900};
  s.step_time = seconds(20);
  s.request.full_bytes = Bytes{200'000'000};
  s.delta_bytes = {Bytes{8'000'000}};
  s.boot_s = {20, 40};
  s.heartbeat_timeout = seconds(3);
  s.request.learner_usd_per_hour = 1.5;
  provisioner::PlanRequest& r = s.request;
  r.pace = {160, 1, s.step_time};
  r.staleness_budget = 3;
  r.lookahead = 2;
  r.group_size = 8;
  r.fleet.headroom = 0.2;
  r.delta_bytes = s.delta_bytes.front();
  r.fleet.provider = "none";  // the market is made up
  r.learner_up = BitRate::from_mbit_per_s(400);
  r.chunk = Bytes{256 * 1024};
  r.paths.delay_expected = milliseconds(10);
  r.fleet.install_time_expected = milliseconds(500);
  r.fleet.join_timeout = minutes(3);
  r.fleet.workers_max = 64;
  for (std::size_t i = 0; i < machines; ++i) {
    RunOffer o;
    o.offer.id = "m" + std::to_string(i + 1);
    o.offer.provider = "sim";
    o.offer.up = o.offer.down = BitRate::from_mbit_per_s(100);
    o.offer.rollouts_per_s = 2;
    o.offer.rollouts_source = provisioner::RateSource::kMeasured;
    o.offer.gpu_usd_per_hour = 0.2;
    o.offer.storage_usd_per_hour = 0;
    o.offer.upload_usd_per_gb = 0.01;
    o.offer.download_usd_per_gb = 0.005;
    o.offer.reliability = 1;
    s.offers.push_back(std::move(o));
  }
  return s;
}

RunResult simulated(const RunScenario& s) {
  auto result = simulate_run(s);
  EXPECT_TRUE(result.has_value()) << (result ? "" : result.error().message());
  return result ? std::move(*result) : RunResult{};
}

// Unstated links are assumed, and all are capped: the plan's T_b equals the simulated one.
TEST(RunSim, PlanAndRunTakeTheSameLinks) {
  RunScenario s = scenario(8);
  for (std::size_t i = 0; i < s.offers.size(); ++i) {
    s.offers[i].offer.up.reset();
    if (i % 2 == 0) s.offers[i].offer.down.reset();
  }
  s.request.fleet.assume.up = BitRate::from_mbit_per_s(12);
  s.request.fleet.assume.down = BitRate::from_mbit_per_s(40);
  s.request.paths.worker_rate = BitRate::from_mbit_per_s(30);
  s.pacing.steps_total = 4;
  const RunResult r = simulated(s);
  ASSERT_EQ(r.plan_error, "");
  ASSERT_GE(r.publications.size(), 2u);
  EXPECT_NEAR(r.publications[1].predicted_s + echoline::seconds(s.request.fleet.install_time_expected),
              echoline::seconds(r.plan.broadcast_time), 0.01 * echoline::seconds(r.plan.broadcast_time));
  for (RunOffer& o : s.offers) o.offer.up = BitRate::from_mbit_per_s(12), o.offer.down = BitRate::from_mbit_per_s(100);
  EXPECT_EQ(simulated(s).plan.broadcast_time, r.plan.broadcast_time) << "stated or assumed";
}

// The share of waiting in all steps but the first few, which wait for machines to boot.
double idle_share(const RunResult& r, std::size_t from = 5) {
  double waits = 0, all = 0;
  for (std::size_t i = from; i < r.by_step.size(); ++i)
    waits += r.by_step[i].wait_s, all += r.by_step[i].wait_s + r.by_step[i].train_s;
  return all > 0 ? waits / all : 1;
}

std::uint64_t oldest_age(const RunResult& r) {
  std::uint64_t age = 0;
  for (const SimStep& step : r.by_step)
    for (const auto& [a, n] : step.staleness) age = std::max(age, a);
  return age;
}

// All results of a run, to the last bit.
std::string fingerprint(const RunResult& r) {
  std::string text =
      fmt::format("{} {} {} {} {} {}\n", r.ended, r.wall_s, r.usd_fleet, r.events, r.learner_bytes_sent, r.topology);
  for (const SimStep& s : r.by_step)
    text += fmt::format("{} {} {} {} {} {}\n", s.step, s.at_s, s.wait_s, s.tokens, s.usd, s.working);
  for (const SimPublication& p : r.publications)
    text += fmt::format("{} {} {}\n", p.version, p.at_s, p.t_b_s.value_or(-1));
  for (const SimMachine& m : r.machines)
    text += fmt::format("{} {} {} {} {}\n", m.offer, m.paid_from_s, m.paid_to_s, m.rollouts, m.bytes_in);
  for (const SimDecision& d : r.decisions) text += fmt::format("{} {} {} {}\n", d.at_s, d.what, d.offer, d.why);
  return text;
}

double mean_in_flight(const RunResult& r) {
  double sum = 0;
  for (const SimStep& step : r.by_step) sum += static_cast<double>(step.in_flight);
  return sum / static_cast<double>(r.by_step.size());
}

TEST(RunSim, ActualValuesMayDifferFromThePlan) {
  const RunResult plain = simulated(scenario());
  RunScenario s = scenario();
  s.install_time = seconds(4);
  EXPECT_NEAR(*simulated(s).publications.at(10).t_b_s - *plain.publications.at(10).t_b_s, 3.5, 1e-6)
      << "of which the plan knows 0.5";
  s = scenario();
  s.wire_overhead = 0.25;
  const double transfer = *plain.publications.at(10).t_b_s - 0.5;
  EXPECT_NEAR((*simulated(s).publications.at(10).t_b_s - 0.5) / transfer, 1.25, 0.05)
      << "except for the delay and the last chunk";
  EXPECT_EQ(simulated(s).publications.at(10).bytes, plain.publications.at(10).bytes);
  s = scenario();
  s.step_seconds = {10, 30};
  const RunResult by_turns = simulated(s);
  EXPECT_EQ(by_turns.by_step.at(6).train_s, 10);
  EXPECT_EQ(by_turns.by_step.at(7).train_s, 30);
  s = scenario();
  s.encode_time = seconds(3);
  s.acknowledge_time = seconds(2);
  EXPECT_NEAR(*simulated(s).publications.at(10).t_b_s - *plain.publications.at(10).t_b_s, 5, 1e-6);
  s = scenario();
  s.work_ahead = seconds(16);  // 2 rollouts/s: four groups of 8 more
  EXPECT_GT(mean_in_flight(simulated(s)), 1.5 * mean_in_flight(plain));
}

TEST(RunSim, TheSameSeedGivesTheSameRunAndAnotherSeedAnother) {
  RunScenario s = scenario();
  s.churn.per_hour = 1;
  const std::string first = fingerprint(simulated(s));
  EXPECT_EQ(fingerprint(simulated(s)), first);
  s.seed = 2;
  EXPECT_NE(fingerprint(simulated(s)), first);
}

TEST(RunSim, DoesEveryStepAndTrainsOnTheRightNumberOfRollouts) {
  const RunScenario s = scenario();
  const RunResult r = simulated(s);
  EXPECT_EQ(r.ended, "completed");
  EXPECT_EQ(r.plan_error, "");
  ASSERT_EQ(r.by_step.size(), s.pacing.steps_total);
  std::uint64_t generated = 0, trained = 0;
  for (const SimStep& step : r.by_step) {
    std::uint64_t rollouts = 0;
    for (const auto& [age, n] : step.staleness) rollouts += n;
    EXPECT_EQ(rollouts, 160u) << step.step;
    trained += rollouts;
  }
  for (const SimMachine& m : r.machines) generated += m.rollouts;
  EXPECT_GE(generated, trained);
  EXPECT_EQ(r.publications.size(), *s.pacing.steps_total + 1);  // version 0, and after every step
  EXPECT_EQ(r.version, *s.pacing.steps_total);
  EXPECT_EQ(r.publications.back().installed, r.publications.back().workers);
}

TEST(RunSim, KeepsItsMachinesUntilTheyHaveTheLastPolicyButNotForLong) {
  RunScenario s = scenario();
  const RunResult usual = simulated(s);
  EXPECT_NEAR(usual.wall_s, usual.by_step.back().at_s + *usual.publications.back().t_b_s, 0.5);
  s.install_time = std::chrono::seconds(300);
  const RunResult slow = simulated(s);
  EXPECT_NEAR(slow.wall_s, slow.by_step.back().at_s + echoline::seconds(provisioner::rules::kFinalInstallWait), 1e-3);
}

TEST(RunSim, ASnapshotHasTheBytesThatItIsSentWith) {
  RunScenario s = scenario();
  EXPECT_EQ(simulated(s).publications.front().bytes, s.request.full_bytes);
  s.snapshot_bytes = Bytes{s.request.full_bytes.count / 3};
  EXPECT_EQ(simulated(s).publications.front().bytes, *s.snapshot_bytes);
}

TEST(RunSim, TheLearnerNeverWaitsWithPlentyAndWaitsTheMoreTheLessThereIs) {
  RunScenario s = scenario();
  s.request.fleet.headroom = 1;
  EXPECT_LT(idle_share(simulated(s)), 0.02);
  // Four machines make half of five machines' output in 20 s beside a broadcast; two a quarter.
  std::vector<double> idles;
  for (const std::size_t machines : {6, 4, 3, 2, 1}) {
    idles.push_back(idle_share(simulated(scenario(machines))));
    if (idles.size() > 1) {
      EXPECT_GT(idles.back(), idles[idles.size() - 2]) << machines;
    }
  }
  // With one machine of 2 rollouts/s a step of 160 takes 80 s, of which the learner trains 20.
  EXPECT_NEAR(idles.back(), 0.75, 0.05);
}

TEST(RunSim, StrictlyOnPolicyTheLearnerWaitsForEveryBatch) {
  RunScenario s = scenario();
  s.pacing.staleness = {0, 1, 0};
  s.request.staleness_budget = s.request.lookahead = 0;
  const RunResult r = simulated(s);
  EXPECT_EQ(oldest_age(r), 0u);
  EXPECT_GT(idle_share(r), 0.3);  // the batch itself takes most of a step
  for (const SimStep& step : r.by_step) EXPECT_GT(step.wait_s, 0) << step.step;
}

TEST(RunSim, NothingStalerThanTheBudgetIsTrainedOn) {
  for (const std::uint32_t budget : {1u, 2u, 4u}) {
    RunScenario s = scenario();
    s.churn.per_hour = 4;
    s.pacing.staleness.budget = budget;
    s.pacing.staleness.lookahead = budget;
    s.request.staleness_budget = static_cast<int>(budget);
    // Workers of very different speeds: results overtake each other.
    for (std::size_t i = 0; i < s.offers.size(); ++i) s.offers[i].offer.rollouts_per_s = i % 3 == 0 ? 0.3 : 3;
    for (const std::uint64_t seed : {1, 2, 3}) {
      s.seed = seed;
      EXPECT_LE(oldest_age(simulated(s)), budget) << seed;
    }
  }
}

TEST(RunSim, WorkOfAnyAgeIsLeasedAndTooStaleWorkIsRejected) {
  RunScenario s = scenario();
  s.pacing.staleness.budget = 5;
  s.request.staleness_budget = 5;
  s.request.pace.publish_every = 4;
  s.publication_form = PublicationForm::kSnapshot;
  s.request.topology = chains::TopologyPolicy::kStar;
  for (std::size_t i = 0; i < s.offers.size(); i += 2)
    s.offers[i].offer.down = BitRate::from_mbit_per_s(16);  // 100 s: five steps
  const RunResult in_time = simulated(s);
  EXPECT_FALSE(in_time.rejected.contains("stale"));
  EXPECT_TRUE(in_time.stale_by_age.empty());
  s.lease_rule = LeaseRule::kAnyAge;
  const RunResult any_age = simulated(s);
  EXPECT_EQ(any_age.ended, "completed");
  EXPECT_LE(oldest_age(any_age), 5u) << "the rules of the buffer are the same";
  EXPECT_GT(any_age.rejected.at("stale"), 160u);
  std::uint64_t stale = 0;
  for (const auto& [age, n] : any_age.stale_by_age) stale += n;
  EXPECT_EQ(stale, any_age.rejected.at("stale"));
  EXPECT_GT(any_age.stale_by_age.begin()->first, 5u);
}

TEST(RunSim, ASlowdownIsMeasuredAndCompensated) {
  RunScenario s = scenario();
  const RunResult planned = simulated(s);
  s.faults.slowdowns = {Slowdown{.at = minutes(5),
                                 .share = 0.5,
                                 .token_rate_left = 0.2,
                                 .link_rate_left = 1,
                                 .lasts = std::nullopt,
                                 .region = std::nullopt}};
  // Only the run file may allow a dearer fleet than planned.
  const auto highest_usd_per_hour = [](const RunResult& r) {
    double highest = 0;
    for (const SimStep& step : r.by_step) highest = std::max(highest, step.usd_per_hour);
    return highest;
  };
  EXPECT_LE(highest_usd_per_hour(simulated(s)), (1 + s.request.fleet.headroom) * highest_usd_per_hour(planned));
  s.request.fleet.usd_per_hour_max = 1000;
  const RunResult r = simulated(s);
  EXPECT_EQ(r.ended, "completed");
  EXPECT_EQ(r.machines_lost, 0u);
  EXPECT_GT(r.decision_counts.at("demoted"), 0u) << "a machine below 70 % of its promised rate";
  EXPECT_GT(r.decision_counts.at("added"), 0u);
  EXPECT_GT(r.workers_peak, planned.workers_peak);
  EXPECT_FALSE(r.recoveries_s.empty());
  EXPECT_LT(idle_share(r, 30), 0.05);
  // With nothing else to rent, the learner waits until the machines are fast again.
  s.offers.resize(6);
  const double all = idle_share(simulated(s), 30);
  EXPECT_GT(all, 0.15);
  s.faults.slowdowns.front().lasts = minutes(3);
  const RunResult passes = simulated(s);
  ASSERT_EQ(passes.recoveries_s.size(), 1u);
  EXPECT_NEAR(passes.recoveries_s.front(), 180, 2);
  EXPECT_LT(idle_share(passes, 30), 0.05);
}

TEST(RunSim, ASlowdownDelaysTheRestOfATransfer) {
  RunScenario s = scenario(1);
  s.publication_form = PublicationForm::kSnapshot;  // 16 s
  s.request.topology = chains::TopologyPolicy::kStar;
  const RunResult plain = simulated(s);
  const SimPublication& p = plain.publications.at(5);
  const double install_s = 0.5, transfer_s = *p.t_b_s - install_s;
  const auto with = [&](double links, std::optional<Duration> lasts) {
    s.faults.slowdowns = {Slowdown{.at = from_seconds(p.at_s + transfer_s / 4),
                                   .share = 1,
                                   .token_rate_left = 1,
                                   .link_rate_left = links,
                                   .lasts = lasts,
                                   .region = std::nullopt}};
    return simulated(s);
  };
  const RunResult slow = with(0.5, std::nullopt);
  EXPECT_NEAR(*slow.publications.at(5).t_b_s, transfer_s / 4 + 2 * transfer_s * 3 / 4 + install_s, 0.1);
  EXPECT_NEAR(*slow.publications.at(6).t_b_s, 2 * transfer_s + install_s, 0.1);
  EXPECT_EQ(*slow.publications.at(4).t_b_s, *plain.publications.at(4).t_b_s);
  const RunResult passes = with(0.5, from_seconds(transfer_s / 2));  // in which it gets a quarter
  EXPECT_NEAR(*passes.publications.at(5).t_b_s, transfer_s * 5 / 4 + install_s, 0.1);
  EXPECT_NEAR(*passes.publications.at(6).t_b_s, *plain.publications.at(6).t_b_s, 0.1);
}

TEST(RunSim, DollarsAreHoursTimesPriceAndBytesTimesPrice) {
  RunScenario s = scenario();
  s.churn.per_hour = 2;
  s.faults.never_joins = 0.1;
  const RunResult r = simulated(s);
  double rent = 0, traffic = 0, hours = 0;
  for (const SimMachine& m : r.machines) {
    EXPECT_GE(m.paid_to_s, m.paid_from_s) << m.offer;
    EXPECT_GT(m.paid_to_s, 0) << m.offer << " was never released";
    hours += (m.paid_to_s - m.paid_from_s) / 3600;
    rent += m.usd_per_hour * (m.paid_to_s - m.paid_from_s) / 3600;
    traffic += (m.bytes_in * 0.005 + m.bytes_forwarded * 0.01) / 1e9;
  }
  EXPECT_GT(rent, 0);
  EXPECT_NEAR(r.usd_rent, rent, 1e-6);
  EXPECT_NEAR(r.usd_traffic, traffic, 1e-6);
  EXPECT_NEAR(r.usd_fleet, rent + traffic, 1e-6);
  EXPECT_NEAR(r.machine_hours, hours, 1e-6);
  EXPECT_NEAR(r.usd_learner, 1.5 * r.wall_s / 3600, 1e-9);
}

// Every byte that a worker received was sent by the learner or by a worker.
TEST(RunSim, BytesAreConserved) {
  RunScenario s = scenario();
  const RunResult r = simulated(s);
  double in = 0, forwarded = 0, joined = 0;
  for (const SimMachine& m : r.machines) in += m.bytes_in, forwarded += m.bytes_forwarded;
  for (const SimPublication& p : r.publications)
    joined += static_cast<double>(p.workers) * static_cast<double>(p.bytes.count);
  EXPECT_NEAR(in, joined, 1);
  EXPECT_NEAR(in, forwarded + r.learner_bytes_sent, 1);
}

TEST(RunSim, LostMachinesAreReplacedAndCapacityComesBack) {
  RunScenario s = scenario();
  s.pacing.steps_total = 120;
  s.churn.per_hour = 6;
  const RunResult r = simulated(s);
  EXPECT_EQ(r.ended, "completed");
  EXPECT_GT(r.machines_lost, 5u);
  // A loss within the deadband is not replaced, and a replacement may be faster than the lost machine.
  EXPECT_GE(r.machines_replaced, r.machines_lost / 2);
  ASSERT_FALSE(r.recoveries_s.empty());
  for (const double took : r.recoveries_s)
    EXPECT_LT(took, 400);  // noticed, booted and sent the policy, some of them twice
  EXPECT_GT(r.unfinished.at("worker lost"), 0u);

  s.churn.per_hour = 0;
  s.churn.preemptions = {Preemption{.at = minutes(10), .share = 0.5, .region = std::nullopt}};
  const RunResult p = simulated(s);
  EXPECT_GE(p.machines_lost, 1u);
  EXPECT_EQ(p.machines_replaced, p.machines_lost);
}

TEST(RunSim, LossesThatAreAnnouncedCostLessWork) {
  RunScenario s = scenario();
  s.pacing.steps_total = 120;
  s.churn.per_hour = 10;
  const auto lost_work = [&] {
    std::uint64_t lost = 0;
    for (const auto& [reason, n] : simulated(s).unfinished) lost += n;
    return lost;
  };
  const std::uint64_t sudden = lost_work();
  s.churn.announced = 1;
  s.churn.notice = minutes(1);
  EXPECT_LT(lost_work(), sudden / 2);
}

TEST(RunSim, AStarAndWholePoliciesTakeLonger) {
  RunScenario s = scenario();
  const auto t_b = [&] {
    const RunResult r = simulated(s);
    EXPECT_TRUE(r.publications.at(10).t_b_s.has_value());
    return r.publications.at(10).t_b_s.value_or(0);
  };
  const double trees = t_b();
  s.request.topology = chains::TopologyPolicy::kStar;
  EXPECT_GT(t_b(), trees);
  s.request.topology = chains::TopologyPolicy::kTrees;
  s.publication_form = PublicationForm::kSnapshot;
  s.request.delta_bytes = s.request.full_bytes;
  EXPECT_GT(t_b(), 10 * trees);
}

TEST(RunSim, RandomActivationCostsMore) {
  RunScenario s = scenario(60);
  for (std::size_t i = 0; i < s.offers.size(); ++i)
    s.offers[i].offer.gpu_usd_per_hour = 0.1 + 0.01 * static_cast<double>(i);
  const RunResult cheapest = simulated(s);
  s.offer_choice = OfferChoice::kRandom;
  const RunResult random = simulated(s);
  EXPECT_GT(random.usd_rent, 1.5 * cheapest.usd_rent);
  EXPECT_NEAR(
      random.usd_rent,
      [&] {
        double usd = 0;
        for (const SimMachine& m : random.machines) usd += m.usd_per_hour * (m.paid_to_s - m.paid_from_s) / 3600;
        return usd;
      }(),
      1e-6);
}

TEST(RunSim, TheBudgetEndsTheRunAndIsKept) {
  RunScenario s = scenario();
  s.request.fleet.usd_max = 0.6;
  s.pacing.steps_total = 100'000;
  const RunResult r = simulated(s);
  EXPECT_EQ(r.ended, "the budget is spent");
  EXPECT_LE(r.usd_fleet + r.usd_learner, 0.65);
  EXPECT_GT(r.usd_fleet, 0.1);
}

TEST(RunSim, WithoutAnythingThatWorksARunEnds) {
  RunScenario s = scenario(3);
  s.faults.never_joins = 1;
  const RunResult r = simulated(s);
  EXPECT_EQ(r.ended, "no workers");
  EXPECT_EQ(r.steps, 0u);
  EXPECT_GT(r.usd_rent, 0);
}

TEST(RunSim, HungWorkersAreGivenUpAndReplaced) {
  RunScenario s = scenario();
  s.pacing.steps_total = 150;
  s.faults.hangs_per_hour = 3;
  s.request.fleet.away_max = minutes(2);
  const RunResult r = simulated(s);
  EXPECT_EQ(r.ended, "completed");
  EXPECT_GT(r.machines_lost, 3u);
  EXPECT_LT(idle_share(r), 0.3);
}

// With four times the used capacity, a machine waits several steps for its next work. None of them is at fault, and
// none is replaced.
TEST(RunSim, AnIdleMachineIsNotStalled) {
  RunScenario s = scenario(80);
  s.pacing.steps_total = 80;
  s.request.fleet.headroom = 3;
  s.fleet_size = FleetSize::kPlanned;
  s.request.topology = chains::TopologyPolicy::kTrees;
  s.request.fleet.workers_max = 80;
  for (std::size_t i = 0; i < s.offers.size(); ++i) {
    s.offers[i].offer.rollouts_per_s = 0.5;
    s.offers[i].offer.down = BitRate::from_mbit_per_s(20 + 15.0 * static_cast<double>(i % 20));
  }
  const RunResult r = simulated(s);
  EXPECT_EQ(r.ended, "completed");
  EXPECT_EQ(r.machines_lost, 0u);
  ASSERT_GT(r.machines.size(), 2 * s.pacing.groups_per_step()) << "otherwise the test shows nothing";
  for (const auto& machine : r.machines)
    EXPECT_LT(machine.rollouts, s.pacing.group_size * *s.pacing.steps_total / 2) << "otherwise the test shows nothing";
}

TEST(RunSim, EveryPolicyForNewPoliciesFinishes) {
  for (const OnNewPolicy policy : {OnNewPolicy::kContinue, OnNewPolicy::kFinish, OnNewPolicy::kAbort}) {
    RunScenario s = scenario();
    s.on_new_policy = policy;
    s.churn.per_hour = 2;
    const RunResult r = simulated(s);
    EXPECT_EQ(r.ended, "completed") << static_cast<int>(policy);
    EXPECT_EQ(r.unfinished.contains("given back"), policy == OnNewPolicy::kAbort);
    std::uint64_t mixed = 0;
    for (const SimStep& step : r.by_step) mixed += step.mixed_version_rollouts;
    EXPECT_EQ(mixed > 0, policy == OnNewPolicy::kContinue);
  }
}

TEST(RunSim, WithEqualSharesAllWaitForTheSlowest) {
  RunScenario s = scenario(4);  // all of them are needed
  for (std::size_t i = 0; i < s.offers.size(); ++i) s.offers[i].offer.rollouts_per_s = i % 2 ? 0.5 : 2.5;
  const auto took = [](const RunResult& r) { return r.by_step.back().at_s; };
  const auto most_over_least = [](const RunResult& r) {
    std::uint64_t most = 0, least = ~0ull;
    for (const SimMachine& m : r.machines)
      if (m.rollouts > 0) most = std::max(most, m.rollouts), least = std::min(least, m.rollouts);
    return static_cast<double>(most) / static_cast<double>(least);
  };
  const RunResult by_speed = simulated(s);
  s.lease_shares = LeaseShares::kEqual;
  const RunResult equal = simulated(s);
  EXPECT_EQ(equal.ended, "completed");
  EXPECT_GT(took(equal), 1.2 * took(by_speed));
  EXPECT_GT(most_over_least(by_speed), 3);
  EXPECT_LT(most_over_least(equal), 1.5);
}

TEST(RunSim, FarRegionsMakeTheBroadcastLonger) {
  RunScenario s = scenario();
  s.request.paths.regions.regions = {{"near", {"near"}}, {"far", {"far"}}};
  s.request.paths.regions.graph.links.assign(2, std::vector<chains::RegionLink>(2));
  for (std::size_t i = 0; i < s.offers.size(); ++i) s.offers[i].offer.place = i % 2 ? "far" : "near";
  const auto run = [&](Duration far, BitRate rate) {
    for (auto& way : {&s.request.paths.regions.graph.links[0][1], &s.request.paths.regions.graph.links[1][0]})
      *way = {rate, far};
    return simulated(s);
  };
  // When all workers have their first policy, which takes minutes over the narrow link.
  const auto t_b = [](const RunResult& r) { return r.publications.at(20).t_b_s.value_or(0); };
  const BitRate wide = BitRate::from_mbit_per_s(10'000), narrow = BitRate::from_mbit_per_s(5);
  const RunResult near = run(milliseconds(5), wide);
  EXPECT_GT(t_b(run(milliseconds(400), wide)), t_b(near) + 0.3);
  // Over a narrow link, every policy crosses once for any number of workers behind it.
  const RunResult once = run(milliseconds(5), narrow);
  EXPECT_GT(t_b(once), t_b(near));
  double published = 0;
  for (const SimPublication& p : once.publications) published += static_cast<double>(p.bytes.count);
  EXPECT_NEAR(once.crossing_bytes_sent / published, 1, 0.05);
  s.request.topology = chains::TopologyPolicy::kStar;
  EXPECT_GT(run(milliseconds(5), narrow).crossing_bytes_sent, 1.9 * once.crossing_bytes_sent);
}

TEST(RunSim, InvalidScenariosAreRefused) {
  RunScenario s = scenario();
  s.offers.clear();
  EXPECT_EQ(simulate_run(s).error().code, Code::kInvalid);
  s = scenario();
  s.offers.push_back(s.offers.front());
  EXPECT_EQ(simulate_run(s).error().message(), "simulate a run: offer 'm1' occurs twice");
  s = scenario();
  s.request.full_bytes = {};
  EXPECT_EQ(simulate_run(s).error().code, Code::kInvalid);
}

// The planner's model matches the protocol: the cores themselves, over the same links, take about as long.
TEST(RunSim, BroadcastTimesAreThoseOfTheProtocol) {
  struct Fleet {
    std::size_t workers;
    double up, down;
    chains::TopologyPolicy topology;
  };
  for (const Fleet& f :
       {Fleet{4, 50, 100, chains::TopologyPolicy::kTrees}, Fleet{12, 80, 80, chains::TopologyPolicy::kTrees},
        Fleet{12, 80, 80, chains::TopologyPolicy::kEcho2}, Fleet{12, 80, 80, chains::TopologyPolicy::kStar},
        Fleet{30, 40, 200, chains::TopologyPolicy::kTrees}, Fleet{24, 40, 60, chains::TopologyPolicy::kStripes}}) {
    BroadcastScenario real;
    real.workers = f.workers;
    real.learner_up = BitRate::from_mbit_per_s(400);
    for (std::size_t w = 0; w < f.workers; ++w) {
      const double factor = 0.7 + 0.6 * static_cast<double>(w % 4) / 3;
      real.worker_links.push_back({BitRate::from_mbit_per_s(f.up * factor), BitRate::from_mbit_per_s(f.down * factor)});
    }
    real.cores_limit_rate = true;  // workers say what their links carry
    real.delay = milliseconds(10);
    real.chain_rate = BitRate::from_mbit_per_s(f.up * 0.7);
    real.payload = Bytes{40'000'000};
    real.delta = Bytes{20'000'000};
    real.chunk = Bytes{128 * 1024};
    real.publications = 2;
    real.one_at_a_time = true;
    real.topology = f.topology;
    const auto protocol = simulate_broadcast(real);
    ASSERT_TRUE(protocol.has_value());
    ASSERT_TRUE(protocol->finished) << protocol->unfinished;

    RunScenario s = scenario(f.workers);
    s.pacing.steps_total = 4;
    s.request.topology = f.topology;
    s.request.fleet.install_time_expected = {};
    s.request.chunk = real.chunk;
    s.request.fleet.headroom = 1000;  // all machines are rented
    s.request.fleet.workers_max = f.workers;
    s.delta_bytes = {Bytes{20'000'000}};
    s.request.delta_bytes = s.delta_bytes.front();
    for (std::size_t w = 0; w < f.workers; ++w) {
      s.offers[w].offer.up = real.worker_links[w].up;
      s.offers[w].offer.down = real.worker_links[w].down;
    }
    const RunResult simulation = simulated(s);
    ASSERT_GE(simulation.publications.size(), 3u);
    ASSERT_EQ(simulation.publications[1].workers, f.workers);
    ASSERT_TRUE(simulation.publications[1].t_b_s && protocol->publications[1].t_b);
    const double model = *simulation.publications[1].t_b_s, cores = echoline::seconds(*protocol->publications[1].t_b);
    std::printf("%zu workers, %s: model %.3f s, protocol %.3f s\n", f.workers,
                std::string(chains::to_string(f.topology)).c_str(), model, cores);
    EXPECT_NEAR(model / cores, 1, 0.15) << f.workers << " workers, " << chains::to_string(f.topology);
  }
}

}  // namespace
}  // namespace echoline::sim
