// A random fleet under virtual time, with any speeds, losses and publication period. A submission within its lease is
// never too stale, no stored group is thrown away, every group is consumed once, and a worker that makes progress keeps
// its lease.
#include <algorithm>
#include <map>
#include <set>

#include "base/random.hpp"
#include "tests/replay_buffer/fixtures.hpp"

namespace echoline::replay_buffer {
namespace {

// The behavior of a worker that asks for as many leases as it can get and does not work.
enum class Hoarder {
  kNone,
  kSilent,      // keeps its leases
  kPretends,    // keeps its leases and reports progress
  kReconnects,  // reconnects before its leases expire
  kSprints,     // submits at once until it may hold many leases, then keeps them
  kDawdles      // submits as late as possible without being late
};

struct Scenario {
  std::uint32_t group_size, groups_per_step, staleness_budget, lookahead_steps, publish_every, steps;
  bool waits_for_stranded;    // the learner asks stranded_by_next_step() before it trains
  bool short_leases = false;  // that live by progress; otherwise they are long and cannot be renewed
  bool steady = false;        // no absence or loss, and the workers together are a tenth faster than needed
  Hoarder hoarder = Hoarder::kNone;
  bool as_shipped = false;  // leases as runs have them, and the learner tells how long its steps take
};

constexpr double kLeaseMax = 40;       // seconds
constexpr double kTickS = 0.05;        // of virtual time
constexpr double kSecondsMax = 5'000;  // after which a run counts as stuck

struct Outcome {
  std::uint64_t steps = 0, accepted = 0, too_stale = 0, dropped = 0, expired = 0, duplicates = 0;
  std::uint64_t expired_at_work = 0;            // leases that expired while their worker made progress
  std::map<std::uint64_t, std::uint64_t> ages;  // trained groups by staleness
  double idle_s = 0, finished_s = 0;
  std::optional<double> hoarder_expelled_s;  // absent: it was not expelled
  std::uint64_t honest_expelled = 0;         // workers that are no hoarders and were expelled
  std::uint64_t hoarder_groups_max = 0;      // most groups that the hoarder held at once
};

struct SimWorker {
  WorkerId id;
  double seconds_per_group = 1, broadcast_s = 0;
  std::uint64_t version = 0;
  std::vector<LeaseRecord> leases;  // its leases, whose groups it generates one after the other
  double next_done_s = 0, away_until_s = 0;
  std::uint64_t progress = 0;
  double report_s = 0;    // time of its next report of progress
  bool was_away = false;  // since it took its leases
  bool hoards = false, expelled = false;
  std::uint64_t batches = 0;
};

class Simulation {
 public:
  Simulation(const Scenario& scenario, std::uint64_t seed) : scenario_(scenario), random_(seed) {
    buffer_ = must(ReplayBuffer::open(folder_.file(), options_for(scenario.group_size, scenario.staleness_budget)));
    LedgerOptions options;
    options.pacing = {{scenario.staleness_budget, 1, scenario.lookahead_steps},
                      scenario.groups_per_step * scenario.group_size};
    if (scenario.hoarder != Hoarder::kNone || scenario.as_shipped)
      options.lease = LeaseLength{{from_seconds(60), from_seconds(10), from_seconds(7200)}, 3};
    else
      options.lease = scenario.short_leases
                          ? LeaseLength{{from_seconds(2), from_seconds(0.5), from_seconds(kLeaseMax)}, 3}
                          : LeaseLength{{from_seconds(12), from_seconds(12), from_seconds(12)}, 3};
    ledger_ = must(JobLedger::open(*buffer_, options));
    const std::uint64_t workers = 2 + random_.below(5);
    for (std::uint64_t i = 0; i < workers; ++i) {
      SimWorker worker;
      worker.id = WorkerId{i + 1};
      worker.seconds_per_group = i == 0 ? 0.2 : 0.1 + 4 * random_.uniform() * random_.uniform();
      if (scenario.short_leases && i == 1) worker.seconds_per_group = 5 + 10 * random_.uniform();
      worker.broadcast_s = 1.5 * random_.uniform();
      if (scenario.steady) {  // kStepSeconds a step on average, T_b half of it
        worker.seconds_per_group = static_cast<double>(workers) * kStepSeconds / (1.1 * scenario.groups_per_step);
        worker.broadcast_s = kStepSeconds / 2;
      }
      workers_.push_back(worker);
    }
    if (scenario.hoarder == Hoarder::kNone) return;
    SimWorker hoarder;
    hoarder.id = WorkerId{workers + 1};
    hoarder.hoards = true;
    workers_.insert(workers_.begin(), hoarder);  // it asks before the others
  }

  Outcome run() {
    while (outcome_.steps < scenario_.steps && now_s_ < kSecondsMax) {
      run_learner();
      for (SimWorker& worker : workers_)
        if (worker.hoards)
          run_hoarder(worker);
        else
          run_honest(worker);
      for (const UnproductiveWorker& unproductive : ledger_->newly_unproductive())
        for (SimWorker& worker : workers_) {
          if (worker.id != unproductive.worker || worker.expelled) continue;
          worker.expelled = worker.hoards;
          if (worker.hoards) must(ledger_->release_worker(worker.id, unix_s()));
          if (worker.hoards) outcome_.hoarder_expelled_s = now_s_;
          outcome_.honest_expelled += worker.hoards ? 0 : 1;
        }
      now_s_ += kTickS;
    }
    outcome_.finished_s = now_s_;
    return outcome_;
  }

 private:
  static constexpr double kStepSeconds = 0.65;
  double unix_s() const { return 1e9 + now_s_; }

  void run_learner() {
    const std::uint64_t step = outcome_.steps;
    if (!batch_) {
      outcome_.idle_s += kTickS;
      if (scenario_.waits_for_stranded && must(ledger_->stranded_by_next_step(step, unix_s())) > 0) {
        step_began_s_ += kTickS;  // waiting does not count as time of the step
        return;
      }
      batch_ = must(buffer_->sample(step, scenario_.groups_per_step));
      if (!batch_) return;
      for (const Group& group : batch_->groups) {
        EXPECT_LE(step - std::min(step, group.version.value), scenario_.staleness_budget);
        EXPECT_EQ(group.trajectories.size(), scenario_.group_size);
        ++outcome_.ages[step - std::min(step, group.version.value)];
        EXPECT_TRUE(consumed_.insert(group.id.value).second) << "group " << group.id.value << " twice";
      }
      step_done_s_ = now_s_ + 0.3 + 0.7 * random_.uniform();
    }
    if (now_s_ < step_done_s_) return;
    must(buffer_->consume(step, batch_->ids()));
    batch_.reset();
    ++outcome_.steps;
    const double step_s = now_s_ - step_began_s_;
    mean_step_s_ = outcome_.steps == 1 ? step_s : 0.7 * mean_step_s_ + 0.3 * step_s;
    step_began_s_ = now_s_;
    outcome_.dropped += must(buffer_->drop_stale(outcome_.steps));
    if (outcome_.steps % scenario_.publish_every == 0) published_.emplace_back(now_s_, outcome_.steps);
    if (outcome_.steps % 8 == 0) must(buffer_->prune(outcome_.steps - 4));
  }

  void run_honest(SimWorker& worker) {
    if (now_s_ < worker.away_until_s) return;
    if (worker.leases.empty()) {
      for (const auto& [at_s, version] : published_)  // flips between batches only
        if (at_s + worker.broadcast_s <= now_s_) worker.version = std::max(worker.version, version);
      worker.leases = must(ledger_->grant(
          {worker.id, Version{worker.version}, "digest", static_cast<std::uint32_t>(1 + random_.below(3)), step_time()},
          outcome_.steps, unix_s()));
      worker.was_away = false;
      worker.report_s = now_s_;
      worker.next_done_s = now_s_ + worker.seconds_per_group * (0.5 + random_.uniform());
      return;
    }
    if (!scenario_.steady && random_.below(2'000) == 0) {  // gone for a while, sometimes noticed
      worker.was_away = true;
      if (random_.below(2) == 0) must(ledger_->release_worker(worker.id, unix_s()));
      worker.away_until_s = now_s_ + 20 * random_.uniform();
      if (random_.below(2) == 0) worker.leases.clear();
      return;
    }
    if (now_s_ >= worker.report_s) {
      std::vector<LeaseId> ids;
      for (const LeaseRecord& lease : worker.leases) ids.push_back(lease.id);
      must(ledger_->renew(worker.id, ids, ++worker.progress, unix_s()));
      worker.report_s = now_s_ + worker.leases.front().lease_s / 3;
    }
    if (now_s_ < worker.next_done_s) return;
    worker.next_done_s = now_s_ + worker.seconds_per_group * (0.5 + random_.uniform());
    const LeaseRecord lease = worker.leases.front();
    worker.leases.erase(worker.leases.begin());
    submit(worker, lease);
    if (random_.below(20) == 0) submit(worker, lease);  // again, as if the acknowledgement was lost
  }

  std::optional<double> step_time() const {
    const bool is_measured = scenario_.as_shipped && outcome_.steps > 0;
    return is_measured ? std::optional(mean_step_s_) : std::nullopt;
  }

  void run_hoarder(SimWorker& worker) {
    if (worker.expelled) return;
    const bool sprints = scenario_.hoarder == Hoarder::kSprints && worker.batches % 40 != 39;
    const bool dawdles = scenario_.hoarder == Hoarder::kDawdles;
    if (!worker.leases.empty()) {
      std::vector<LeaseId> ids;
      for (const LeaseRecord& lease : worker.leases) ids.push_back(lease.id);
      if (scenario_.hoarder == Hoarder::kPretends || dawdles)
        must(ledger_->renew(worker.id, ids, ++worker.progress, unix_s()));
      // The learner waits for 2.5 x the worker's previous time.
      const double held_s = unix_s() - worker.leases.front().granted_unix_s;
      if (sprints || (dawdles && held_s >= worker.seconds_per_group)) {
        worker.seconds_per_group = std::min(2.3 * worker.seconds_per_group, 20.0);
        for (const LeaseRecord& lease : std::exchange(worker.leases, {})) submit(worker, lease);
        ++worker.batches;
      } else if (scenario_.hoarder == Hoarder::kReconnects && held_s > 1.5) {
        must(ledger_->release_worker(worker.id, unix_s()));
        worker.leases.clear();
        ++worker.batches;
      } else if (held_s > 10 && scenario_.hoarder != Hoarder::kPretends) {
        worker.leases.clear();  // they have run out by now
        ++worker.batches;
      }
    }
    for (const auto& [at_s, version] : published_) worker.version = std::max(worker.version, version);
    if ((sprints || dawdles) && !worker.leases.empty()) return;
    for (LeaseRecord& lease : must(ledger_->grant(
             {worker.id, Version{worker.version}, "digest", 1'000'000, step_time()}, outcome_.steps, unix_s())))
      worker.leases.push_back(std::move(lease));
    outcome_.hoarder_groups_max = std::max<std::uint64_t>(outcome_.hoarder_groups_max, worker.leases.size());
  }

  void submit(const SimWorker& worker, const LeaseRecord& lease) {
    const schema::Submission submission = submission_for(lease);
    const Delivery delivery{worker.id, &submission};
    const Verdict verdict = must(ledger_->submit({&delivery, 1}, outcome_.steps, unix_s()))[0];
    if (verdict.duplicate) {
      ++outcome_.duplicates;
    } else if (verdict.accepted) {
      ++outcome_.accepted;
    } else if (verdict.reason == "stale") {
      ++outcome_.too_stale;
    } else if (verdict.reason == "lease expired" || verdict.reason == "lease released") {
      ++outcome_.expired;
      const bool is_past_max = unix_s() > lease.granted_unix_s + kLeaseMax;
      if (!worker.was_away && !is_past_max && verdict.reason == "lease expired") ++outcome_.expired_at_work;
    } else if (verdict.reason != "unknown lease") {
      ADD_FAILURE() << verdict.reason << ": " << verdict.detail;
    }
  }

  Scenario scenario_;
  Random random_;
  TemporaryFolder folder_{TemporaryFolder::On::kMemory};
  std::unique_ptr<ReplayBuffer> buffer_;
  std::unique_ptr<JobLedger> ledger_;
  std::vector<SimWorker> workers_;
  std::vector<std::pair<double, std::uint64_t>> published_;
  std::optional<Batch> batch_;
  std::set<std::uint64_t> consumed_;
  double now_s_ = 0, step_done_s_ = 0, step_began_s_ = 0, mean_step_s_ = 0;
  Outcome outcome_;
};

Scenario random_scenario(Random& random, bool waits) {
  Scenario s{};
  s.group_size = 1 + static_cast<std::uint32_t>(random.below(3));
  s.groups_per_step = 1 + static_cast<std::uint32_t>(random.below(4));
  s.staleness_budget = static_cast<std::uint32_t>(random.below(5));
  s.lookahead_steps = static_cast<std::uint32_t>(random.below(s.staleness_budget + 1));
  s.publish_every = 1 + static_cast<std::uint32_t>(random.below(s.staleness_budget + 1));  // kappa <= S + 1
  s.steps = 40;
  s.waits_for_stranded = waits;
  return s;
}

std::string scenario_text(const Scenario& s, std::uint64_t seed) {
  return fmt::format("replay with seed {}: G={} groups={} S={} L={} kappa={}", seed, s.group_size, s.groups_per_step,
                     s.staleness_budget, s.lookahead_steps, s.publish_every);
}

// Nearly nothing is stranded: newcomers far slower than the others, and workers lost with their work, are not waited
// for.
TEST(LedgerSim, NothingWithinItsLeaseIsTooStale) {
  Outcome totals;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    const Scenario scenario = random_scenario(random, true);
    SCOPED_TRACE(scenario_text(scenario, seed));
    const Outcome outcome = Simulation(scenario, seed).run();
    EXPECT_EQ(outcome.steps, scenario.steps) << "stuck at " << outcome.finished_s << " s";
    totals.too_stale += outcome.too_stale;
    totals.dropped += outcome.dropped;
    totals.accepted += outcome.accepted;
    totals.expired += outcome.expired;
    totals.duplicates += outcome.duplicates;
  }
  fmt::print("{} accepted, {} too stale, {} dropped\n", totals.accepted, totals.too_stale, totals.dropped);
  EXPECT_LT(20 * (totals.too_stale + totals.dropped), totals.accepted);
  // Checks that the scenarios exercised their cases.
  EXPECT_GT(totals.accepted, 2'000u);
  EXPECT_GT(totals.expired, 5u);
  EXPECT_GT(totals.duplicates, 20u);
}

// A learner that never waits does strand slow workers, so the check above prevents a real problem. Even then it trains
// on nothing stale.
TEST(LedgerSim, ALearnerThatDoesNotWaitLosesWork) {
  std::uint64_t lost = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    const Scenario scenario = random_scenario(random, false);
    SCOPED_TRACE(scenario_text(scenario, seed));
    const Outcome outcome = Simulation(scenario, seed).run();
    EXPECT_EQ(outcome.steps, scenario.steps);
    lost += outcome.too_stale + outcome.dropped;
  }
  fmt::print("a learner that never waits lost {} groups in 20 runs\n", lost);
  EXPECT_GT(lost, 0u);
}

// A worker is twenty times as slow as the others, and its leases are far shorter than its groups take. It keeps them by
// making progress. The learner waits for it no longer than usual, so a little of its work may come too late.
TEST(LedgerSim, AWorkerThatMakesProgressKeepsItsLeases) {
  Outcome totals;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    Scenario scenario = random_scenario(random, true);
    scenario.short_leases = true;
    SCOPED_TRACE(scenario_text(scenario, seed));
    const Outcome outcome = Simulation(scenario, seed).run();
    EXPECT_EQ(outcome.steps, scenario.steps) << "stuck at " << outcome.finished_s << " s";
    EXPECT_EQ(outcome.expired_at_work, 0u);
    totals.accepted += outcome.accepted;
    totals.dropped += outcome.dropped + outcome.too_stale;
  }
  fmt::print("{} groups in time, {} too late\n", totals.accepted, totals.dropped);
  EXPECT_LT(15 * totals.dropped, totals.accepted);
}

// One worker asks for all leases, before the others, and returns little or nothing. The others keep the learner as busy
// as without it. Only a worker that returns nothing is expelled.
TEST(LedgerSim, AHoarderDoesNotStarveTheLearner) {
  const auto run = [](Hoarder hoarder) {
    Outcome totals;
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      Scenario scenario{1, 16, 6, 2, 1, 150, true, false, true, hoarder, true};
      const Outcome outcome = Simulation(scenario, seed).run();
      EXPECT_EQ(outcome.steps, scenario.steps) << "seed " << seed;
      totals.finished_s += outcome.finished_s;
      totals.idle_s += outcome.idle_s;
      totals.honest_expelled += outcome.honest_expelled;
      totals.hoarder_groups_max = std::max(totals.hoarder_groups_max, outcome.hoarder_groups_max);
      totals.dropped += outcome.dropped + outcome.too_stale;
      const bool returns_nothing = hoarder == Hoarder::kSilent || hoarder == Hoarder::kReconnects;
      EXPECT_TRUE(outcome.hoarder_expelled_s || !returns_nothing) << "seed " << seed;
      if (outcome.hoarder_expelled_s)
        totals.hoarder_expelled_s = std::max(totals.hoarder_expelled_s.value_or(0), *outcome.hoarder_expelled_s);
    }
    return totals;
  };
  const Outcome without_hoarder = run(Hoarder::kNone);
  const std::pair<Hoarder, const char*> hoarders[] = {{Hoarder::kSilent, "silent"},
                                                      {Hoarder::kPretends, "pretends"},
                                                      {Hoarder::kReconnects, "reconnects"},
                                                      {Hoarder::kSprints, "sprints"},
                                                      {Hoarder::kDawdles, "dawdles"}};
  for (const auto& [hoarder, name] : hoarders) {
    const Outcome outcome = run(hoarder);
    const double speed = without_hoarder.finished_s / outcome.finished_s;  // 1: as without a hoarder
    fmt::print("{:<10} steps/s x {:.3f}, held {} of 48 groups, dropped {}, expelled after {:.0f} s\n", name, speed,
               outcome.hoarder_groups_max, outcome.dropped, outcome.hoarder_expelled_s.value_or(0));
    EXPECT_GE(speed, 0.9) << name;
    EXPECT_EQ(outcome.honest_expelled, 0u) << name;
  }
}

// S = 0: every step trains on rollouts of the version that it updates, under any event of the fleet.
TEST(LedgerSim, StrictlyOnPolicy) {
  std::uint64_t accepted = 0, dropped = 0;
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    Random random(seed);
    Scenario scenario = random_scenario(random, true);
    scenario.staleness_budget = scenario.lookahead_steps = 0;
    scenario.publish_every = 1;
    SCOPED_TRACE(scenario_text(scenario, seed));
    const Outcome outcome = Simulation(scenario, seed).run();
    EXPECT_EQ(outcome.steps, scenario.steps) << "stuck at " << outcome.finished_s << " s";
    EXPECT_EQ(outcome.ages.size(), 1u);
    EXPECT_EQ(outcome.ages.at(0), std::uint64_t{scenario.steps} * scenario.groups_per_step);
    accepted += outcome.accepted;
    dropped += outcome.dropped;
  }
  EXPECT_LT(20 * dropped, accepted);
}

// A fleet that is just fast enough keeps the learner as busy with a lookahead of 2 as with S = 11 batches in stock. The
// age of the data then follows the lookahead instead of S.
TEST(LedgerSim, ALookaheadOfTwoFeedsTheLearner) {
  const auto run = [](std::uint32_t lookahead) {
    Outcome totals;
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      const Outcome outcome = Simulation({1, 12, 11, lookahead, 1, 120, true, true, true}, seed).run();
      totals.idle_s += outcome.idle_s, totals.finished_s += outcome.finished_s;
      for (const auto& [age, groups] : outcome.ages) totals.ages[age] += groups;
    }
    return totals;
  };
  const std::uint32_t lookahead = 2;
  const Outcome full = run(11), chosen = run(lookahead), less = run(lookahead - 1);
  const auto share = [](const Outcome& o) { return o.idle_s / o.finished_s; };
  fmt::print("idle with lookahead 11: {:.3f} (oldest {}), {}: {:.3f} (oldest {}), {}: {:.3f}\n", share(full),
             full.ages.rbegin()->first, lookahead, share(chosen), chosen.ages.rbegin()->first, lookahead - 1,
             share(less));
  EXPECT_LT(share(chosen), share(full) + 0.05);
  EXPECT_GT(share(less), share(chosen));
  EXPECT_LE(chosen.ages.rbegin()->first, staleness_worst(11, 1, lookahead, 1) + 1);  // one overtaken by others
  EXPECT_GE(full.ages.rbegin()->first, 8u);
}

}  // namespace
}  // namespace echoline::replay_buffer
