// The decisions of the job ledger. They are the same with a database whose disk fails, without one, and after the file
// was read again.
#include "replay_buffer/lease_core.hpp"

#include <random>

#include "replay_buffer/fleet_paces.hpp"
#include "replay_buffer/step_pace.hpp"
#include "tests/replay_buffer/fixtures.hpp"
#include "tests/replay_buffer/refusing_disk.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::uint32_t kGroup = 2;

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t below(std::uint64_t end) { return engine_() % end; }
  bool chance(double probability) { return static_cast<double>(engine_() >> 11) * 0x1p-53 < probability; }
  double up_to(double max) { return static_cast<double>(engine_() >> 11) * 0x1p-53 * max; }

 private:
  std::mt19937_64 engine_;
};

TEST(FleetPaces, AgreeWithAFullComputation) {
  Random random(1);
  std::vector<double> values;
  RunningMedian running;
  CappedRates rates;
  for (int i = 0; i < 4000; ++i) {
    if (values.empty() || random.chance(0.6)) {
      // Rates far apart and often equal: their counted values change with the median.
      values.push_back(random.chance(0.3) ? 1.0 : std::exp2(static_cast<double>(random.below(24)) - 12));
      running.insert(values.back());
      rates.insert(values.back());
    } else {
      std::swap(values[random.below(values.size())], values.back());
      running.erase(values.back());
      rates.erase(values.back());
      values.pop_back();
    }
    const std::optional<double> middle = median(values);
    ASSERT_EQ(running.value(), middle);
    ASSERT_EQ(rates.size(), values.size());
    double sum = 0;
    for (const double value : values) sum += capped_rate(value, middle);
    ASSERT_NEAR(rates.sum(), sum, 1e-6 * (1 + sum));
  }
}

TEST(WaitingGroups, GiveTheOldestThatAreWholeAndScored) {
  WaitingGroups groups(kGroup);
  groups.put(GroupId{7}, {Version{1}, 2, true});
  groups.put(GroupId{3}, {Version{2}, 2, true});
  groups.put(GroupId{5}, {Version{1}, 1, true});
  groups.put(GroupId{6}, {Version{1}, 2, false});
  EXPECT_EQ(groups.trajectories(Version{1}), 7u);
  EXPECT_EQ(groups.trajectories(Version{2}), 2u);
  EXPECT_EQ(groups.complete_trajectories(Version{0}),
            (std::map<Version, std::uint64_t>{{Version{1}, 4}, {Version{2}, 2}}));
  EXPECT_EQ(groups.next_batch(Version{0}, 3), std::nullopt);
  EXPECT_EQ(groups.next_batch(Version{0}, 2), (std::vector{GroupId{7}, GroupId{3}}));
  groups.put(GroupId{6}, {Version{1}, 2, true});
  groups.put(GroupId{5}, {Version{0}, 2, true});  // a member of an older version came
  EXPECT_EQ(groups.next_batch(Version{0}, 3), (std::vector{GroupId{5}, GroupId{6}, GroupId{7}}));
  EXPECT_EQ(groups.older_than(Version{2}), (std::vector{GroupId{5}, GroupId{6}, GroupId{7}}));
  groups.remove(GroupId{6});
  EXPECT_EQ(groups.next_batch(Version{1}, 2), (std::vector{GroupId{7}, GroupId{3}}));
  EXPECT_EQ(groups.find(GroupId{6}), nullptr);
}

LeaseOptions small_options() {
  LeaseOptions options;
  options.pacing = {.staleness = {.budget = 2, .publish_every = 1, .lookahead = 2}, .trajectories_per_step = 12};
  options.lease = {.limits = {.first = from_seconds(100), .min = from_seconds(5), .max = from_seconds(300)},
                   .tokens_max = 6,
                   .initial_groups = 4};
  options.pacing.group_size = kGroup;
  return options;
}

std::string text_of(const LeaseRecord& lease) {
  return fmt::format("{}:{}:{}:{}:{}:{} ", lease.id, lease.group, lease.worker, lease.version, lease.expires_unix_s,
                     lease.lease_s);
}

// Random events of a fleet go to the ledger, whose disk fails now and then, and to a core without a file. Both decide
// the same.
class Twins {
 public:
  explicit Twins(std::uint64_t seed)
      : random_(seed),
        buffer_(must(ReplayBuffer::open(folder_.file(), options_for(kGroup, 2)))),
        ledger_(must(JobLedger::open(*buffer_, small_options()))) {}

  void run_events(int events) {
    for (int i = 0; i < events && !testing::Test::HasFailure(); ++i) {
      now_ += random_.up_to(random_.chance(0.05) ? 200 : 3);
      run_random_event();
      core_.check();
      ASSERT_EQ(must(ledger_->stranded_by_next_step(step_, now_)), core_.stranded_by_next_step(step_, now_))
          << "event " << i;
      compare();
    }
  }
  std::uint64_t refused() const { return refused_; }
  std::uint64_t kinds_seen() const { return kinds_.size(); }

 private:
  // Repeats the call until the disk accepts it. Failed attempts must not change the result.
  template <class Call>
  auto retry_until_written(Call&& call) {
    while (random_.chance(0.15)) {
      if (random_.chance(0.5))
        disk_.be_full();
      else
        disk_.fail_syncs(ENOSPC);
      const auto refused = call();
      disk_.accept();
      if (refused.has_value()) return refused;  // there was nothing to write
      ++refused_;
    }
    auto done = call();
    EXPECT_TRUE(done.has_value()) << (done ? "" : done.error().message());
    return done;
  }

  WorkerId some_worker() { return WorkerId{1 + random_.below(6)}; }
  LeaseRecord some_lease() {
    auto it = held_.begin();
    std::advance(it, static_cast<std::ptrdiff_t>(random_.below(held_.size())));
    return it->second;
  }

  void run_random_event() {
    const std::uint64_t kind = held_.empty() ? 0 : random_.below(12);
    kinds_.insert(kind);
    switch (kind) {
      default:
        return grant();
      case 3:
      case 4:
      case 5:
      case 6:
        return submit();
      case 7:
        return renew();
      case 8:
        return fail_or_return();
      case 9:
        return lose_worker();
      case 10:
        return train_step();
      case 11:
        return expire();
    }
  }
  void grant() {
    const std::uint64_t version = step_ - random_.below(std::min<std::uint64_t>(step_, 2) + 1);
    GrantRequest request{some_worker(), Version{version}, "digest", static_cast<std::uint32_t>(1 + random_.below(5))};
    if (random_.chance(0.7)) request.step_seconds = 5 + random_.up_to(20);
    const auto leases = retry_until_written([&] { return ledger_->grant(request, step_, now_); });
    const auto core_leases = core_.grant(request, step_, now_);
    std::string of_ledger, of_core;
    for (const LeaseRecord& lease : *leases) {
      of_ledger += text_of(lease);
      held_[lease.id] = lease;
    }
    for (const LiveLease& lease : core_leases) of_core += text_of(lease.record);
    EXPECT_EQ(of_ledger, of_core);
  }
  void submit() {
    const LeaseRecord lease = some_lease();
    held_.erase(lease.id);
    const schema::Submission submission = submission_for(lease);
    const bool refused = random_.chance(0.1), unscored = random_.chance(0.1);
    const Delivery delivery{lease.worker, &submission, refused ? "made up" : "", {}, unscored};
    const auto verdicts = retry_until_written([&] { return ledger_->submit({&delivery, 1}, step_, now_); });
    const Verdict& verdict = verdicts->front();
    const LiveLease* live = core_.find(lease.id);
    const auto tokens = static_cast<std::uint64_t>(submission.trajectories(0).response_tokens_size());
    if (live == nullptr) {
      EXPECT_FALSE(verdict.accepted);
      if (verdict.reason == "lease expired") core_.record_late_result(lease.worker, lease.granted_unix_s, tokens, now_);
    } else if (refused || now_ > live->record.expires_unix_s || !admissible(step_, lease.version, 2)) {
      EXPECT_FALSE(verdict.accepted);
      core_.refuse(lease.id, tokens, now_);
    } else {
      EXPECT_TRUE(verdict.accepted) << verdict.reason << " " << verdict.detail;
      EXPECT_EQ(verdict.lease_seconds, core_.settle(lease.id, {lease.version, tokens, !unscored}, now_));
    }
  }
  void renew() {
    const LeaseRecord lease = some_lease();
    const std::uint64_t progress = ++progress_;
    const auto renewed = retry_until_written([&] {
      return ledger_->renew(lease.worker, {&lease.id, 1}, progress, now_);
    });
    EXPECT_EQ(*renewed, core_.renew(lease.worker, {&lease.id, 1}, progress, now_));
  }
  void fail_or_return() {
    const LeaseRecord lease = some_lease();
    held_.erase(lease.id);
    if (random_.chance(0.5)) {
      const auto was_live = retry_until_written([&] {
        return ledger_->on_group_failed({lease.worker, lease.id, "memory", "none left"});
      });
      EXPECT_EQ(*was_live, core_.on_group_failed(lease.worker, lease.id, "memory", "none left"));
    } else {
      const auto returned = retry_until_written([&] { return ledger_->return_leases(lease.worker, {&lease.id, 1}); });
      EXPECT_EQ(*returned, core_.return_leases(lease.worker, {&lease.id, 1}));
    }
  }
  void lose_worker() {
    const WorkerId worker = some_worker();
    const auto released = retry_until_written([&] { return ledger_->release_worker(worker, now_); });
    EXPECT_EQ(*released, core_.release_worker(worker, now_));
    if (!random_.chance(0.2)) return;
    const double late_s = 1 + random_.up_to(30);
    now_ += late_s;
    const auto extended = retry_until_written([&] { return ledger_->extend_all_leases(late_s, now_); });
    EXPECT_EQ(*extended, core_.extend_all_leases(late_s, now_));
  }
  // Runs a learner step, if there is a batch for it.
  void train_step() {
    if (core_.stranded_by_next_step(step_, now_) > 0) return;
    const auto batch = must(buffer_->sample(step_, 6));
    const auto core_batch = waiting_.next_batch(core_.version_min(step_), 6);
    ASSERT_EQ(batch.has_value(), core_batch.has_value());
    if (!batch) return;
    EXPECT_EQ(batch->ids(), *core_batch);
    must(buffer_->consume(step_, batch->ids()));
    for (const GroupId group : *core_batch) waiting_.remove(group);
    must(buffer_->drop_stale(++step_));
    for (const GroupId group : waiting_.older_than(core_.version_min(step_))) waiting_.remove(group);
  }
  void expire() {
    const auto expired = retry_until_written([&] { return ledger_->expire(now_); });
    EXPECT_EQ(*expired, core_.expire(now_));
  }

  void compare() {
    const LedgerCounts counts = must(ledger_->counts());
    EXPECT_EQ(counts.live, core_.live());
    EXPECT_EQ(counts.pooled, core_.pooled());
    EXPECT_EQ((std::tuple(counts.settled, counts.expired, counts.released)),
              (std::tuple(core_.totals().settled, core_.totals().expired, core_.totals().released)));
    // The new groups set aside and the new unproductive workers, by the ledger or the core.
    const auto new_results = [](auto& owner) {
      std::string text;
      for (const SetAsideGroup& group : owner.newly_set_aside())
        text += fmt::format("{} {} ", group.group, group.reason);
      for (const UnproductiveWorker& unproductive : owner.newly_unproductive())
        text += fmt::format("{} {}", unproductive.worker, unproductive.reason);
      return text;
    };
    EXPECT_EQ(new_results(*ledger_), new_results(core_));
  }

  Random random_;
  TemporaryFolder folder_{TemporaryFolder::On::kMemory};
  RefusingDisk disk_;
  std::unique_ptr<ReplayBuffer> buffer_;
  std::unique_ptr<JobLedger> ledger_;
  WaitingGroups waiting_{kGroup};
  LeaseCore core_{small_options(), waiting_};
  std::map<LeaseId, LeaseRecord> held_;  // leases in the workers' view
  std::set<std::uint64_t> kinds_;
  double now_ = 1000;
  std::uint64_t step_ = 0, progress_ = 0, refused_ = 0;
};

TEST(LeaseCore, DecidesTheSameWithoutAFile) {
  std::uint64_t refused = 0;
  for (std::uint64_t seed = 1; seed <= 12 && !HasFailure(); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Twins twins(seed);
    twins.run_events(400);
    refused += twins.refused();
    EXPECT_EQ(twins.kinds_seen(), 12u);
  }
  EXPECT_GT(refused, 200u) << "otherwise the test hardly covers failing disks";
}

// Compares the ledger's state in memory with the state read from its file.
TEST(LeaseCore, IsTheSameWhenItsJournalIsReadAgain) {
  Random random(7);
  const TemporaryFolder folder(TemporaryFolder::On::kMemory);
  auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroup, 2)));
  auto ledger = must(JobLedger::open(*buffer, small_options()));
  double now = 1000;
  for (int round = 0; round < 30; ++round) {
    std::vector<LeaseRecord> leases;
    for (int i = 0; i < 8; ++i) {
      now += random.up_to(5);
      const WorkerId worker{1 + random.below(5)};
      for (const LeaseRecord& lease : must(ledger->grant({worker, Version{0}, "digest", 3}, 0, now)))
        leases.push_back(lease);
      if (leases.empty()) continue;
      const LeaseRecord lease = leases[random.below(leases.size())];
      if (random.chance(0.3)) must(ledger->on_group_failed({lease.worker, lease.id, "memory", ""}));
      if (random.chance(0.2)) must(ledger->release_worker(lease.worker, now));
      if (random.chance(0.3))
        must(ledger->renew(lease.worker, {&lease.id, 1}, static_cast<std::uint64_t>(round + 1), now));
      must(ledger->expire(now));
    }
    const LedgerCounts before = must(ledger->counts());
    std::vector<std::uint64_t> held;
    for (std::uint64_t worker = 1; worker <= 5; ++worker) held.push_back(ledger->leases_held(WorkerId{worker}));
    ledger.reset(), buffer.reset();
    buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroup, 2)));
    ledger = must(JobLedger::open(*buffer, small_options()));
    const LedgerCounts after = must(ledger->counts());
    EXPECT_EQ((std::tuple(after.live, after.pooled, after.settled, after.expired, after.released)),
              (std::tuple(before.live, before.pooled, before.settled, before.expired, before.released)));
    EXPECT_EQ(after.set_aside, before.set_aside);
    for (std::uint64_t worker = 1; worker <= 5; ++worker)
      EXPECT_EQ(ledger->leases_held(WorkerId{worker}), held[worker - 1]);
    // Every group is in one place: leased, in the pool or set aside.
    std::uint64_t groups_set_aside = 0;
    for (const auto& [reason, groups] : after.set_aside) groups_set_aside += groups;
    const auto next = must(ledger->grant({WorkerId{9}, Version{0}, "digest", 1}, 0, now));
    if (!next.empty() && before.pooled == 0) {
      EXPECT_EQ(next[0].group.value, after.live + groups_set_aside);
    }
  }
}

TEST(StepPace, LeavesOutTheWaitingForSlowWorkersAndPauses) {
  StepPace pace;
  pace.end_wait(1);
  pace.exclude_pause(4);  // of the first step, so it must not shorten the second
  pace.end_step(10);
  EXPECT_EQ(pace.seconds(), std::nullopt) << "the first step began at an unknown time";
  pace.begin_wait(12), pace.begin_wait(13), pace.end_wait(17), pace.end_wait(18);
  pace.exclude_pause(3);
  pace.end_step(30);
  EXPECT_DOUBLE_EQ(pace.seconds().value(), 20 - 5 - 3);
  pace.end_step(52);
  EXPECT_DOUBLE_EQ(pace.seconds().value(), 0.7 * 12 + 0.3 * 22);
  pace.end_step(52);
  EXPECT_DOUBLE_EQ(pace.seconds().value(), 0.7 * 12 + 0.3 * 22) << "the same moment";
}

// The dead worker's lease expires first; that of the living worker behind it goes on up to its maximum term.
TEST(LeaseCore, WithoutHeartbeatsOnlyLeasesOfDeadWorkersExpire) {
  WaitingGroups waiting(kGroup);
  LeaseCore core(small_options(), waiting);
  const WorkerId dead{1}, living{2};
  ASSERT_EQ(core.grant({.worker = dead, .version = Version{0}, .policy_digest = {}}, 0, 0).size(), 1u);
  ASSERT_EQ(core.grant({.worker = living, .version = Version{0}, .policy_digest = {}}, 0, 1).size(), 1u);
  const auto is_alive = [&](WorkerId worker) { return worker == living; };
  EXPECT_EQ(core.renew_or_expire(150, is_alive), 1u);
  EXPECT_EQ(core.leases_held(dead), 0u);
  EXPECT_EQ(core.leases_held(living), 1u);
  EXPECT_EQ(core.renew_or_expire(290, is_alive), 0u);
  EXPECT_EQ(core.renew_or_expire(400, is_alive), 1u) << "the maximum term is 300 s";
  core.check();
}

TEST(LeaseTable, AWorkerThatLetALeaseBecomeOverdueIsLeftOutForAWhile) {
  LeaseTable table;
  const auto lease = [](std::uint64_t id, std::uint64_t worker, double granted_s, double due_s) {
    return LiveLease{
        {LeaseId{id}, GroupId{id}, WorkerId{worker}, Version{0}, "", 8, granted_s, 1000, LeaseState::kLive, 100},
        due_s};
  };
  table.add(lease(1, 1, 0, 10));
  table.add(lease(2, 1, 0, 50));
  table.add(lease(3, 2, 0, 50));
  EXPECT_EQ(table.awaited().at(Version{0}), 24u);
  table.advance_to(11);
  EXPECT_EQ(table.awaited().at(Version{0}), 8u) << "no step waits for the other lease of worker 1 either";
  EXPECT_EQ(table.trajectories_not_overdue(), 16u);
  table.check();
  table.remove(LeaseId{1});
  table.advance_to(11 + LeaseTable::kLeftOutFactor * 10 - 1);
  table.check();
  table.add(lease(4, 1, 210, 300));
  EXPECT_EQ(table.awaited().count(Version{0}), 0u) << "lease 2 was due meanwhile";
  table.remove(LeaseId{2}), table.remove(LeaseId{3});
  table.advance_to(210 + LeaseTable::kLeftOutFactor * 50);
  table.check();
}

}  // namespace
}  // namespace echoline::replay_buffer
