// A random fleet under virtual time: whatever the speeds, losses and publication period, a result handed in within
// its lease is never too stale, nothing that was stored is thrown away, and every group is consumed once.
#include <algorithm>
#include <map>
#include <set>

#include "base/random.hpp"
#include "tests/replay_buffer/fixtures.hpp"

namespace echoline::replay_buffer {
namespace {

struct Scenario {
  std::uint32_t group_size, groups_per_step, staleness_budget, lookahead_steps, publish_every, steps;
  bool waits_for_stranded;  // the learner asks stranded_by_next_step() before it trains
};

struct Outcome {
  std::uint64_t steps = 0, accepted = 0, too_stale = 0, dropped = 0, expired = 0, duplicates = 0;
  double finished_s = 0;
};

struct SimWorker {
  WorkerId id;
  double seconds_per_group = 1, broadcast_s = 0;
  std::uint64_t version = 0;
  std::vector<LeaseRecord> leases;  // in hand, generated one after the other
  double next_done_s = 0, away_until_s = 0;
};

class Simulation {
 public:
  Simulation(const Scenario& scenario, std::uint64_t seed) : scenario_(scenario), random_(seed) {
    buffer_ = must(ReplayBuffer::open(folder_.file(), options_for(scenario.group_size, scenario.staleness_budget)));
    LedgerOptions options;
    options.pacing = {scenario.staleness_budget, scenario.lookahead_steps,
                      scenario.groups_per_step * scenario.group_size};
    options.lease = {2, 12};
    ledger_ = must(JobLedger::open(*buffer_, options));
    for (std::uint64_t i = 0; i < 2 + random_.below(5); ++i) {
      SimWorker worker;
      worker.id = WorkerId{i + 1};
      worker.seconds_per_group = i == 0 ? 0.2 : 0.1 + 4 * random_.uniform() * random_.uniform();
      worker.broadcast_s = 1.5 * random_.uniform();
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
  double unix_s() const { return 1e9 + now_s_; }

  void learner() {
    const std::uint64_t step = outcome_.steps;
    if (!batch_) {
      if (scenario_.waits_for_stranded && must(ledger_->stranded_by_next_step(step, unix_s())) > 0) return;
      batch_ = must(buffer_->sample(step, scenario_.groups_per_step));
      if (!batch_) return;
      for (const Group& group : batch_->groups) {
        EXPECT_LE(step - std::min(step, group.version.value), scenario_.staleness_budget);
        EXPECT_EQ(group.trajectories.size(), scenario_.group_size);
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
      worker.next_done_s = now_s_ + worker.seconds_per_group * (0.5 + random_.uniform());
      return;
    }
    if (random_.below(2'000) == 0) {  // gone for a while, sometimes noticed
      if (random_.below(2) == 0) must(ledger_->release_worker(worker.id));
      worker.away_until_s = now_s_ + 20 * random_.uniform();
      if (random_.below(2) == 0) worker.leases.clear();
      return;
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
    if (verdict.duplicate)
      ++outcome_.duplicates;
    else if (verdict.accepted)
      ++outcome_.accepted;
    else if (verdict.reason == "stale")
      ++outcome_.too_stale;
    else if (verdict.reason == "lease expired" || verdict.reason == "lease released")
      ++outcome_.expired;
    else if (verdict.reason != "unknown lease")
      ADD_FAILURE() << verdict.reason << ": " << verdict.detail;
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
  EXPECT_GT(all.expired, 20u);
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

}  // namespace
}  // namespace echoline::replay_buffer
