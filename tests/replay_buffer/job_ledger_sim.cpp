// A random fleet under virtual time: whatever the speeds, losses and publication period, a result handed in within
// its lease is never too stale, nothing that was stored is thrown away, every group is consumed once, and a worker that
// makes progress keeps its lease.
#include <algorithm>
#include <map>
#include <set>

#include "base/random.hpp"
#include "tests/replay_buffer/fixtures.hpp"

namespace echoline::replay_buffer {
namespace {

struct Scenario {
  std::uint32_t group_size, groups_per_step, staleness_budget, lookahead_steps, publish_every, steps;
  bool waits_for_stranded;    // the learner asks stranded_by_next_step() before it trains
  bool short_leases = false;  // that live by progress; otherwise they are long and cannot be renewed
  bool steady = false;        // nobody is away, nothing is lost, and together the workers are a tenth faster than needed
};

constexpr double kLeaseMax = 40;

struct Outcome {
  std::uint64_t steps = 0, accepted = 0, too_stale = 0, dropped = 0, expired = 0, duplicates = 0;
  std::uint64_t starved = 0;  // leases that ended while their worker was at work
  std::map<std::uint64_t, std::uint64_t> ages;  // trained groups by staleness
  double idle_s = 0, finished_s = 0;
};

struct SimWorker {
  WorkerId id;
  double seconds_per_group = 1, broadcast_s = 0;
  std::uint64_t version = 0;
  std::vector<LeaseRecord> leases;  // in hand, generated one after the other
  double next_done_s = 0, away_until_s = 0;
  std::uint64_t progress = 0;
  double report_s = 0;  // when it says next that it makes progress
  bool was_away = false;  // since it took its leases
};

class Simulation {
 public:
  Simulation(const Scenario& scenario, std::uint64_t seed) : scenario_(scenario), random_(seed) {
    buffer_ = must(ReplayBuffer::open(folder_.file(), options_for(scenario.group_size, scenario.staleness_budget)));
    LedgerOptions options;
    options.pacing = {scenario.staleness_budget, scenario.lookahead_steps,
                      scenario.groups_per_step * scenario.group_size};
    options.lease = scenario.short_leases ? LeaseLength{2, 0.5, kLeaseMax, 3} : LeaseLength{12, 12, 12, 3};
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
  }

  Outcome run() {
    while (outcome_.steps < scenario_.steps && now_s_ < 5'000) {
      learner();
      for (SimWorker& worker : workers_) act(worker);
      now_s_ += 0.05;
    }
    outcome_.finished_s = now_s_;
    return outcome_;
  }

 private:
  static constexpr double kStepSeconds = 0.65;
  double unix_s() const { return 1e9 + now_s_; }

  void learner() {
    const std::uint64_t step = outcome_.steps;
    if (!batch_) {
      outcome_.idle_s += 0.05;
      if (scenario_.waits_for_stranded && must(ledger_->stranded_by_next_step(step, unix_s())) > 0) return;
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
    outcome_.dropped += must(buffer_->drop_stale(outcome_.steps));
    if (outcome_.steps % scenario_.publish_every == 0) published_.emplace_back(now_s_, outcome_.steps);
    if (outcome_.steps % 8 == 0) must(buffer_->prune(outcome_.steps - 4));
  }

  void act(SimWorker& worker) {
    if (now_s_ < worker.away_until_s) return;
    if (worker.leases.empty()) {
      for (const auto& [at_s, version] : published_)  // flips between batches only
        if (at_s + worker.broadcast_s <= now_s_) worker.version = std::max(worker.version, version);
      worker.leases = must(ledger_->grant(
          {worker.id, Version{worker.version}, "digest", static_cast<std::uint32_t>(1 + random_.below(3))},
          outcome_.steps, unix_s()));
      worker.was_away = false;
      worker.report_s = now_s_;
      worker.next_done_s = now_s_ + worker.seconds_per_group * (0.5 + random_.uniform());
      return;
    }
    if (!scenario_.steady && random_.below(2'000) == 0) {  // gone for a while, sometimes noticed
      worker.was_away = true;
      if (random_.below(2) == 0) must(ledger_->release_worker(worker.id));
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
    hand_in(worker, lease);
    if (random_.below(20) == 0) hand_in(worker, lease);  // the acknowledgement was lost
  }

  void hand_in(const SimWorker& worker, const LeaseRecord& lease) {
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
      const bool outworn = unix_s() > lease.granted_unix_s + kLeaseMax;
      outcome_.starved += worker.was_away || outworn ? 0 : 1;
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
  double now_s_ = 0, step_done_s_ = 0;
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

std::string described(const Scenario& s, std::uint64_t seed) {
  return fmt::format("replay with seed {}: G={} groups={} S={} L={} kappa={}", seed, s.group_size, s.groups_per_step,
                     s.staleness_budget, s.lookahead_steps, s.publish_every);
}

TEST(LedgerSim, NothingWithinItsLeaseIsEverTooStale) {
  Outcome all;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    const Scenario scenario = random_scenario(random, true);
    SCOPED_TRACE(described(scenario, seed));
    const Outcome outcome = Simulation(scenario, seed).run();
    EXPECT_EQ(outcome.steps, scenario.steps) << "stuck at " << outcome.finished_s << " s";
    EXPECT_EQ(outcome.too_stale, 0u);
    EXPECT_EQ(outcome.dropped, 0u);
    all.accepted += outcome.accepted;
    all.expired += outcome.expired;
    all.duplicates += outcome.duplicates;
  }
  // The scenarios did exercise what they are for.
  EXPECT_GT(all.accepted, 2'000u);
  EXPECT_GT(all.expired, 5u);
  EXPECT_GT(all.duplicates, 20u);
}

// A learner that never waits does strand slow workers: what the check above prevents is real, and even then nothing
// stale is trained on.
TEST(LedgerSim, ALearnerThatDoesNotWaitLosesWork) {
  std::uint64_t lost = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    const Scenario scenario = random_scenario(random, false);
    SCOPED_TRACE(described(scenario, seed));
    const Outcome outcome = Simulation(scenario, seed).run();
    EXPECT_EQ(outcome.steps, scenario.steps);
    lost += outcome.too_stale + outcome.dropped;
  }
  fmt::print("a learner that never waits lost {} groups in 20 runs\n", lost);
  EXPECT_GT(lost, 0u);
}

// With a worker twenty times as slow as others and leases far shorter than its groups take: it keeps them by making
// progress. The learner does not wait for it longer than usual, so a little of its work may come too late.
TEST(LedgerSim, AWorkerThatMakesProgressKeepsItsLeases) {
  Outcome all;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    Scenario scenario = random_scenario(random, true);
    scenario.short_leases = true;
    SCOPED_TRACE(described(scenario, seed));
    const Outcome outcome = Simulation(scenario, seed).run();
    EXPECT_EQ(outcome.steps, scenario.steps) << "stuck at " << outcome.finished_s << " s";
    EXPECT_EQ(outcome.starved, 0u);
    all.accepted += outcome.accepted;
    all.dropped += outcome.dropped + outcome.too_stale;
  }
  fmt::print("{} groups in time, {} too late\n", all.accepted, all.dropped);
  EXPECT_LT(50 * all.dropped, all.accepted);
}

// S = 0: every step trains on rollouts of the very version that it updates, whatever the fleet does.
TEST(LedgerSim, StrictlyOnPolicy) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    Random random(seed);
    Scenario scenario = random_scenario(random, true);
    scenario.staleness_budget = scenario.lookahead_steps = 0;
    scenario.publish_every = 1;
    SCOPED_TRACE(described(scenario, seed));
    const Outcome outcome = Simulation(scenario, seed).run();
    EXPECT_EQ(outcome.steps, scenario.steps) << "stuck at " << outcome.finished_s << " s";
    EXPECT_EQ(outcome.ages.size(), 1u);
    EXPECT_EQ(outcome.ages.at(0), std::uint64_t{scenario.steps} * scenario.groups_per_step);
    EXPECT_EQ(outcome.dropped, 0u);
  }
}

// A fleet that is just fast enough keeps the learner as busy with the default lookahead as with S = 11 batches in stock,
// and the data is as old as the default allows instead of S.
TEST(LedgerSim, TheDefaultLookaheadFeedsTheLearner) {
  const auto run = [](std::uint32_t lookahead) {
    Outcome all;
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      const Outcome outcome = Simulation({1, 12, 11, lookahead, 1, 120, true, true, true}, seed).run();
      all.idle_s += outcome.idle_s, all.finished_s += outcome.finished_s;
      for (const auto& [age, groups] : outcome.ages) all.ages[age] += groups;
    }
    return all;
  };
  const std::uint32_t lookahead = default_lookahead(11, 1);
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
