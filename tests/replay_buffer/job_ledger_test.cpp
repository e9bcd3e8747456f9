// The job ledger: leases that survive restarts, expiry, refusals, and submissions that count once.
#include <sqlite3.h>

#include <set>

#include "tests/replay_buffer/fixtures.hpp"
#include "tests/replay_buffer/refusing_disk.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::uint32_t kGroup = 2;
const WorkerId kAda{1}, kBob{2};

class Ledger : public testing::Test {
 protected:
  void SetUp() override {
    options_.pacing = {.staleness = {.budget = 2, .publish_every = 1, .lookahead = 2},
                       .trajectories_per_step = 4};  // S = 2, R = 4: two groups a step
    options_.lease = {.limits = {.first = from_seconds(100), .min = from_seconds(5), .max = from_seconds(1000)},
                      .tokens_max = 6,
                      .initial_groups = 64};
    reopen();
  }
  void reopen() {
    ledger_.reset(), buffer_.reset();
    buffer_ = must(ReplayBuffer::open(folder_.file(), options_for(kGroup, 2)));
    ledger_ = must(JobLedger::open(*buffer_, options_));
  }
  std::vector<LeaseRecord> grant(WorkerId worker, std::uint32_t groups, std::uint64_t step = 0, double now = 1000,
                                 std::uint64_t version = 0) {
    return must(ledger_->grant({worker, Version{version}, "digest", groups}, step, now));
  }
  Verdict submit(WorkerId worker, const schema::Submission& submission, double now = 1001, std::uint64_t step = 0) {
    const Delivery delivery{worker, &submission};
    return must(ledger_->submit({&delivery, 1}, step, now))[0];
  }
  std::uint64_t stored() { return must(buffer_->counts(0)).stored; }
  static std::set<std::uint64_t> groups_of(const std::vector<LeaseRecord>& leases) {
    std::set<std::uint64_t> groups;
    for (const LeaseRecord& lease : leases) groups.insert(lease.group.value);
    return groups;
  }
  using Set = std::set<std::uint64_t>;
  TemporaryFolder folder_;
  LedgerOptions options_;
  std::unique_ptr<ReplayBuffer> buffer_;
  std::unique_ptr<JobLedger> ledger_;
};

TEST_F(Ledger, GrantsInOrderUpToThePacing) {
  const auto first = grant(kAda, 2);
  EXPECT_EQ(groups_of(first), (Set{0, 1}));
  EXPECT_EQ(first[0].rollouts, kGroup);
  EXPECT_EQ(first[0].expires_unix_s, 1100);
  EXPECT_LT(first[0].id, first[1].id);
  EXPECT_EQ(groups_of(grant(kBob, 100)), (Set{2, 3, 4, 5}));  // (S + v + 1)*R = 12 trajectories
  EXPECT_TRUE(grant(kAda, 1).empty());
  EXPECT_EQ(grant(kAda, 9, 0, 1000, 0).size(), 0u);
  EXPECT_FALSE(ledger_->grant({kAda, Version{0}, "", 1}, 0, 1000));
}

TEST_F(Ledger, StepsInWhichWorkersCouldHaveTakenMoreAreCountedByTheBound) {
  const auto limited_steps = [&](Bound bound) { return must(ledger_->counts()).limited_steps.count(bound); };
  grant(kAda, 2);
  EXPECT_EQ(limited_steps(Bound::kBudget) + limited_steps(Bound::kLookahead), 0u) << "it got all requested leases";
  grant(kBob, 100);
  grant(kBob, 100);
  EXPECT_EQ(limited_steps(Bound::kBudget), 1u) << "S and the lookahead allow the same";
  options_.pacing.staleness.lookahead = 1;
  reopen();
  grant(kAda, 100, 2, 1000, 2);
  grant(kBob, 100, 2, 1000, 2);
  EXPECT_EQ(limited_steps(Bound::kLookahead), 1u);
  EXPECT_EQ(limited_steps(Bound::kBudget), 0u) << "since the ledger was opened";
}

// All grants of one turn fail together on a disk that refuses writes.
TEST(LedgerOnAFullDisk, CallsThatAreMadeTogetherHappenTogetherOrNotAtAll) {
  const TemporaryFolder folder;
  RefusingDisk disk;
  auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroup, 2)));
  LedgerOptions options;
  options.pacing = {.staleness = {.budget = 2, .publish_every = 1, .lookahead = 2}, .trajectories_per_step = 8};
  options.lease = {.limits = {.first = from_seconds(100), .min = from_seconds(5), .max = from_seconds(1000)},
                   .tokens_max = 6,
                   .initial_groups = 64};
  auto ledger = must(JobLedger::open(*buffer, options));
  std::vector<LeaseRecord> granted;
  const auto turn = [&] {
    return ledger->run_in_transaction([&] {
      granted.clear();
      for (const WorkerId worker : {kAda, kBob})
        for (const LeaseRecord& lease : must(ledger->grant({worker, Version{0}, "digest", 1}, 0, 1000)))
          granted.push_back(lease);
      must(ledger->set_aside(granted.at(0).id, "prompt cannot be used", "too long"));
      must(ledger->store_misconduct(kBob, {.malformed = 1}));
    });
  };
  disk.be_full();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(turn().error().code, Code::kExhausted);
  EXPECT_EQ(ledger->leases_held(kBob), 0u);
  EXPECT_TRUE(ledger->newly_set_aside().empty());
  EXPECT_TRUE(ledger->misconduct().empty());
  disk.accept();
  must(turn());
  EXPECT_EQ(granted[1].group, GroupId{1}) << "no group was lost";
  EXPECT_EQ(ledger->newly_set_aside().size(), 1u);
  ledger.reset(), buffer.reset();
  buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroup, 2)));
  ledger = must(JobLedger::open(*buffer, options));
  EXPECT_EQ(ledger->leases_held(kAda), 0u);
  EXPECT_EQ(ledger->leases_held(kBob), 1u);
  EXPECT_EQ(ledger->misconduct().at(kBob), (Misconduct{.malformed = 1}));
  EXPECT_EQ(must(ledger->counts()).set_aside.at("prompt cannot be used"), 1u);
}

// A call that fails on a full disk changes nothing, in memory either. No worker is blamed, however often it is retried.
TEST(LedgerOnAFullDisk, NothingHappensUntilThereIsRoom) {
  const TemporaryFolder folder;
  RefusingDisk disk;
  LedgerOptions options;
  options.pacing = {.staleness = {.budget = 2, .publish_every = 1, .lookahead = 2}, .trajectories_per_step = 4};
  options.lease = {.limits = {.first = from_seconds(100), .min = from_seconds(5), .max = from_seconds(1000)},
                   .tokens_max = 6,
                   .initial_groups = 64};
  auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroup, 2)));
  auto ledger = must(JobLedger::open(*buffer, options));
  const auto leases = must(ledger->grant({kAda, Version{0}, "digest", 2}, 0, 1000));
  ASSERT_EQ(leases.size(), 2u);
  const schema::Submission first = submission_for(leases[0]);
  const Delivery delivery{kAda, &first};
  const auto fails = [&](const auto& result, int line = __builtin_LINE()) {
    ASSERT_FALSE(result) << "line " << line;
    const Error& error = result.error();
    EXPECT_EQ(error.code, Code::kExhausted) << "line " << line;
    EXPECT_NE(error.detail.find(folder.file().string() + ": the disk is full"), std::string::npos) << error.detail;
  };
  disk.be_full();
  for (int i = 0; i < 20; ++i) {
    fails(ledger->submit({&delivery, 1}, 0, 1001));
    fails(ledger->expire(2000));
    fails(ledger->release_worker(kAda, 2000));
    fails(ledger->on_group_failed({kAda, leases[1].id, "prompt", ""}));
    fails(ledger->grant({kAda, Version{0}, "digest", 1}, 0, 2000));
    fails(ledger->extend_all_leases(1000, 2000));
  }
  EXPECT_TRUE(ledger->newly_unproductive().empty());
  EXPECT_TRUE(ledger->newly_set_aside().empty());
  EXPECT_EQ(ledger->leases_held(kAda), 2u);
  disk.accept();
  disk.fail_syncs(ENOSPC);
  fails(ledger->extend_all_leases(1000, 2000));
  disk.accept();
  EXPECT_EQ(must(ledger->extend_all_leases(1000, 2000)), 2u);
  EXPECT_TRUE(must(ledger->submit({&delivery, 1}, 0, 2001))[0].accepted);
  EXPECT_EQ(must(ledger->expire(2200)), 1u);
  EXPECT_EQ(must(ledger->counts()).expired, 1u);
  disk.fail_writes();
  const auto without_lease = ledger->extend_all_leases(1, 2300);
  ASSERT_FALSE(without_lease);
  EXPECT_EQ(without_lease.error().code, Code::kIo);
}

TEST_F(Ledger, APauseOfTheLearnerMakesNoWorkerSlow) {
  const auto lease = grant(kAda, 1)[0];
  ASSERT_EQ(must(ledger_->extend_all_leases(500, 1501)), 1u);
  ASSERT_TRUE(submit(kAda, submission_for(lease), 1502).accepted);
  EXPECT_LT(grant(kAda, 1, 0, 1502)[0].lease_s, 100) << "it took 2 s, not 502";
}

TEST_F(Ledger, EveryLeaseOfAWorkerCanBeGivenBack) {
  grant(kAda, 2), grant(kBob, 1);
  EXPECT_EQ(must(ledger_->return_all_leases(kAda)), 2u);
  EXPECT_EQ(ledger_->leases_held(kAda), 0u);
  EXPECT_EQ(ledger_->leases_held(kBob), 1u);
  EXPECT_TRUE(ledger_->newly_unproductive().empty());
}

TEST_F(Ledger, AGroupWithoutScoresIsKeptAndNotTrainedOnBeforeItHasThem) {
  const auto leases = grant(kAda, 3);
  std::vector<schema::Submission> submissions;
  for (const LeaseRecord& lease : leases) {
    submissions.push_back(submission_for(lease));
    for (Trajectory& t : *submissions.back().mutable_trajectories()) t.set_reward(0);
  }
  for (const schema::Submission& submission : submissions) {
    const Delivery delivery{kAda, &submission, {}, {}, /*unscored=*/true};
    EXPECT_TRUE(must(ledger_->submit({&delivery, 1}, 0, 1001))[0].accepted);
  }
  reopen();
  EXPECT_FALSE(must(buffer_->sample(0, 1)));
  EXPECT_EQ(must(buffer_->counts(0)).unscored_groups, 3u);
  EXPECT_EQ(must(buffer_->counts(0)).admissible_groups, 0u);
  auto waiting = must(buffer_->unscored_groups(2));
  ASSERT_EQ(waiting.size(), 2u);
  EXPECT_EQ(must(buffer_->unscored_groups(9, {waiting[0].id, waiting[1].id})).size(), 1u);
  ASSERT_EQ(waiting[0].trajectories.size(), kGroup);
  for (Trajectory& t : waiting[0].trajectories) t.set_reward(0.5), (*t.mutable_components())["tests"] = 0.5;
  EXPECT_TRUE(must(buffer_->store_scores(waiting[0])));
  EXPECT_FALSE(must(buffer_->store_scores(waiting[0]))) << "once";
  const auto batch = must(buffer_->sample(0, 1));
  ASSERT_TRUE(batch);
  EXPECT_EQ(batch->groups[0].trajectories[1].reward(), 0.5);
  EXPECT_TRUE(submit(kAda, submissions[0]).duplicate) << "an identical submission counts as the same";
  // A group is discarded and generated again: scores of the first try do not count.
  must(buffer_->discard(waiting[1].id, "wrong score"));
  EXPECT_FALSE(must(buffer_->awaits_scores(waiting[1])));
  const LeaseRecord second_lease = grant(kBob, 1)[0];
  EXPECT_EQ(second_lease.group, waiting[1].id);
  const schema::Submission second_submission = submission_for(second_lease);
  const Delivery delivery{kBob, &second_submission, {}, {}, true};
  EXPECT_TRUE(must(ledger_->submit({&delivery, 1}, 0, 1002))[0].accepted);
  EXPECT_FALSE(must(buffer_->store_scores(waiting[1])));
  EXPECT_EQ(must(buffer_->counts(0)).unscored_groups, 2u);
  reopen();
  EXPECT_EQ(must(buffer_->counts(0)).stored, 3 * kGroup) << "sizes still add up";
}

TEST_F(Ledger, AGroupThatTwiceFailsScoringIsSetAside) {
  const auto submit_unscorable = [&](WorkerId worker) {
    const LeaseRecord lease = grant(worker, 1)[0];
    const schema::Submission submission = submission_for(lease);
    const Delivery delivery{worker, &submission, {}, {}, true};
    EXPECT_TRUE(must(ledger_->submit({&delivery, 1}, 0, 1001))[0].accepted);
    must(buffer_->discard(lease.group, "scoring failed"));
    must(ledger_->on_result_unscorable(lease.group, worker, "scoring failed", "no sandbox"));
    return lease.group;
  };
  const GroupId group = submit_unscorable(kAda);
  EXPECT_TRUE(ledger_->newly_set_aside().empty());
  EXPECT_EQ(submit_unscorable(kBob), group) << "another worker tries";
  const auto aside = ledger_->newly_set_aside();
  ASSERT_EQ(aside.size(), 1u);
  EXPECT_EQ(aside[0].group, group);
  EXPECT_EQ(aside[0].detail, "no sandbox");
  EXPECT_NE(grant(kAda, 1)[0].group, group);
  EXPECT_EQ(must(buffer_->counts(0)).rejected.at("scoring failed"), 2 * kGroup);
}

TEST_F(Ledger, SubmissionIsStoredSettledAndCountedOnce) {
  const auto lease = grant(kAda, 1)[0];
  const auto submission = submission_for(lease);
  for (int i = 0; i < 3; ++i) {
    const Verdict verdict = submit(kAda, submission, i == 2 ? 5000 : 1001);  // even long after the lease
    EXPECT_TRUE(verdict.accepted) << verdict.reason;
    EXPECT_EQ(verdict.duplicate, i > 0);
    if (i == 1) reopen();
  }
  EXPECT_EQ(stored(), 2u);
  EXPECT_EQ(must(ledger_->counts()).settled, 1u);
  EXPECT_EQ(must(ledger_->counts()).live, 0u);
  EXPECT_TRUE(must(buffer_->counts(0)).rejected.empty());
  auto other = submission;
  other.mutable_trajectories(0)->set_id("other");
  EXPECT_EQ(submit(kAda, other).reason, "lease already settled");
  EXPECT_EQ(stored(), 2u);
}

TEST_F(Ledger, TheSameSubmissionTwiceInOneCall) {
  const auto submission = submission_for(grant(kAda, 1)[0]);
  const std::vector<Delivery> deliveries(2, Delivery{kAda, &submission});
  const auto verdicts = must(ledger_->submit(deliveries, 0, 1001));
  EXPECT_TRUE(verdicts[0].accepted && !verdicts[0].duplicate);
  EXPECT_TRUE(verdicts[1].accepted && verdicts[1].duplicate);
  EXPECT_EQ(stored(), 2u);
}

TEST_F(Ledger, ExpiredGroupsGoToAnotherWorkerFirst) {
  const auto lost = grant(kAda, 2);
  EXPECT_EQ(must(ledger_->expire(1100)), 0u);
  EXPECT_EQ(must(ledger_->expire(1100.5)), 2u);
  EXPECT_EQ(must(ledger_->counts()).pooled, 2u);
  reopen();
  const auto again = grant(kBob, 3, 0, 1101);
  EXPECT_EQ(groups_of(again), (Set{0, 1, 2}));
  EXPECT_EQ(submit(kAda, submission_for(lost[0]), 1102).reason, "lease expired");
  EXPECT_TRUE(submit(kBob, submission_for(again[0]), 1102).accepted);
  EXPECT_EQ(submit(kAda, submission_for(lost[0]), 1103).reason, "lease expired");
  EXPECT_EQ(must(buffer_->counts(0)).rejected.at("lease expired"), 4u);
  EXPECT_EQ(stored(), 2u);
}

TEST_F(Ledger, OverdueResultReturnsItsGroup) {
  const auto lease = grant(kAda, 1)[0];
  EXPECT_EQ(submit(kAda, submission_for(lease), 1101).reason, "lease expired");
  EXPECT_EQ(must(ledger_->counts()).expired, 1u);
  EXPECT_EQ(groups_of(grant(kBob, 1, 0, 1102)), Set{0});
}

TEST_F(Ledger, LostWorkerGivesItsGroupsBack) {
  const auto leases = grant(kAda, 3);
  grant(kBob, 1);
  EXPECT_TRUE(submit(kAda, submission_for(leases[0])).accepted);
  EXPECT_EQ(must(ledger_->release_worker(kAda, 1001)), 2u);
  EXPECT_EQ(must(ledger_->release_worker(kAda, 1001)), 0u);
  EXPECT_EQ(submit(kAda, submission_for(leases[1])).reason, "lease released");
  EXPECT_EQ(groups_of(grant(kBob, 2)), (Set{1, 2}));
}

TEST_F(Ledger, RestartNeitherLosesNorDoublesAGroup) {
  const auto before = grant(kAda, 2);
  reopen();
  EXPECT_EQ(groups_of(grant(kBob, 2)), (Set{2, 3}));
  EXPECT_EQ(must(ledger_->extend_all_leases(90, 1090)), 4u);  // the learner was away: no worker could submit meanwhile
  EXPECT_EQ(must(ledger_->expire(1150)), 0u);
  EXPECT_TRUE(submit(kAda, submission_for(before[1]), 1150).accepted);
  EXPECT_EQ(must(ledger_->expire(1191)), 3u);
}

TEST_F(Ledger, ReturnedLeasesGoToOthersAtOnceWithoutBlame) {
  const auto leases = grant(kAda, 3);
  const std::vector<LeaseId> ids{leases[0].id, leases[2].id, LeaseId{99}};
  EXPECT_EQ(must(ledger_->return_leases(kBob, ids)), 0u) << "the leases are another worker's";
  EXPECT_EQ(must(ledger_->return_leases(kAda, ids)), 2u);
  EXPECT_EQ(must(ledger_->return_leases(kAda, ids)), 0u);
  EXPECT_EQ(submit(kAda, submission_for(leases[0])).reason, "lease released");
  EXPECT_EQ(groups_of(grant(kAda, 1)), Set{0}) << "the same worker may try again";
  EXPECT_EQ(groups_of(grant(kBob, 1)), Set{2});
  EXPECT_TRUE(ledger_->newly_set_aside().empty());
}

// A newer policy arrived while the worker generated, for a part of the tokens or for all.
TEST_F(Ledger, TokensOfANewerPolicyThanTheLeasedOneAreWelcome) {
  const auto lease = grant(kAda, 1)[0];
  auto submission = submission_for(lease);
  submission.mutable_trajectories(1)->mutable_spans(0)->set_version(2);
  EXPECT_TRUE(submit(kAda, submission).accepted);
}

TEST_F(Ledger, EveryRefusalIsNamedCountedAndReturnsTheGroup) {
  struct Case {
    std::string reason;
    WorkerId worker;
    std::function<void(schema::Submission&)> spoil;
  };
  const std::vector<Case> cases = {
      {"unknown lease", kAda, [](auto& s) { s.set_lease(99'999); }},
      {"unknown lease", kAda, [](auto& s) { s.set_lease(~0ull); }},
      {"lease of another worker", kBob, [](auto&) {}},
      {"wrong version", kAda, [](auto& s) { s.mutable_trajectories(1)->mutable_spans(0)->set_version(0); }},
      {"wrong digest", kAda, [](auto& s) { s.mutable_trajectories(1)->set_policy_digest("forged"); }},
      {"malformed", kAda, [](auto& s) { s.clear_trajectories(); }},
      {"malformed", kAda, [](auto& s) { s.mutable_trajectories()->RemoveLast(); }},
      {"malformed", kAda, [](auto& s) { *s.add_trajectories() = s.trajectories(0); }},
      {"malformed", kAda, [](auto& s) { *s.mutable_trajectories(1) = s.trajectories(0); }},
      {"malformed", kAda, [](auto& s) { s.mutable_trajectories(1)->set_member(0); }},
      {"malformed", kAda, [](auto& s) { s.mutable_trajectories(1)->set_group(77); }},
      {"malformed", kAda, [](auto& s) { s.mutable_trajectories(1)->set_lease(77); }},
      {"malformed", kAda, [](auto& s) { s.mutable_trajectories(1)->set_worker(77); }},
  };
  std::map<std::string, std::uint64_t> expected;
  for (const Case& c : cases) {
    const auto lease = grant(kAda, 1, 1, 1000, 1)[0];
    EXPECT_EQ(lease.group, GroupId{0});
    auto submission = submission_for(lease);
    c.spoil(submission);
    const Verdict verdict = submit(c.worker, submission);
    EXPECT_FALSE(verdict.accepted);
    EXPECT_EQ(verdict.reason, c.reason) << verdict.detail;
    expected[c.reason] += static_cast<std::uint64_t>(submission.trajectories_size());
    must(ledger_->release_worker(kAda, 1001));
  }
  EXPECT_EQ(stored(), 0u);
  EXPECT_EQ(must(buffer_->counts(0)).rejected, expected);
  EXPECT_EQ(must(ledger_->counts()).live, 0u);
  EXPECT_EQ(must(buffer_->counts(0)).incomplete_groups, 0u);
}

TEST_F(Ledger, TooStaleAtTheDoor) {
  const auto lease = grant(kAda, 1)[0];
  EXPECT_EQ(submit(kAda, submission_for(lease), 1001, 3).reason, "stale");
  EXPECT_EQ(must(buffer_->counts(3)).rejected.at("stale"), 2u);
  EXPECT_EQ(groups_of(grant(kAda, 1, 3, 1002, 3)), Set{0});
}

TEST_F(Ledger, OneBadDeliveryDoesNotHarmTheOthers) {
  const auto leases = grant(kAda, 3);
  std::vector<schema::Submission> submissions;
  for (const auto& lease : leases) submissions.push_back(submission_for(lease));
  submissions[1].mutable_trajectories(1)->set_id(submissions[0].trajectories(0).id());  // collides after a write
  std::vector<Delivery> deliveries;
  for (const auto& submission : submissions) deliveries.push_back({kAda, &submission});
  const auto verdicts = must(ledger_->submit(deliveries, 0, 1001));
  EXPECT_TRUE(verdicts[0].accepted);
  EXPECT_EQ(verdicts[1].reason, "malformed");
  EXPECT_TRUE(verdicts[2].accepted);
  EXPECT_EQ(stored(), 4u);
  reopen();
  EXPECT_EQ(stored(), 4u);
  EXPECT_EQ(must(buffer_->counts(0)).incomplete_groups, 0u);
}

TEST_F(Ledger, FullBufferIsAnErrorAndNothingIsLost) {
  ledger_.reset(), buffer_.reset();
  BufferOptions small = options_for(kGroup, 2);
  small.rows_max = 3;
  buffer_ = must(ReplayBuffer::open(folder_.file(), small));
  ledger_ = must(JobLedger::open(*buffer_, options_));
  const auto leases = grant(kAda, 2);
  const auto a = submission_for(leases[0]), b = submission_for(leases[1]);
  const std::vector<Delivery> both = {{kAda, &a}, {kAda, &b}};
  EXPECT_EQ(ledger_->submit(both, 0, 1001).error().code, Code::kExhausted);
  EXPECT_EQ(stored(), 0u);
  EXPECT_EQ(must(ledger_->counts()).live, 2u);  // they may send again
  EXPECT_TRUE(submit(kAda, a).accepted);
}

// The fleet's median is a second. Its slow worker needs 40 s per group, and submits every one.
TEST_F(Ledger, ALeaseFollowsItsOwnWorkersTimeAndNotTheFleets) {
  double now = 1000;
  std::uint64_t step = 0;
  for (int i = 0; i < 8; ++i) {
    const auto slow = grant(kAda, 1, step, now, step);
    ASSERT_EQ(slow.size(), 1u);
    for (int k = 0; k < 3; ++k) {
      const auto fast = grant(kBob, 1, step, now + k, step);
      ASSERT_EQ(fast.size(), 1u);
      EXPECT_TRUE(submit(kBob, submission_for(fast[0]), now + k + 1, step).accepted);
    }
    now += 40;
    EXPECT_TRUE(submit(kAda, submission_for(slow[0]), now, step).accepted) << "group " << i;
    EXPECT_EQ(slow[0].lease_s, i == 0 ? 100 : 2 * 6 * 40.0 / 3);  // twice 6 tokens at 40 s for 3
    const auto batch = must(buffer_->sample(step, 2));
    must(buffer_->consume(step++, batch->ids()));
    const auto more = must(buffer_->sample(step, 2));
    must(buffer_->consume(step++, more->ids()));
  }
  EXPECT_EQ(grant(kBob, 1, step, now, step)[0].lease_s, 5);  // the shortest: 2 x 6 x 1/3 s
  must(ledger_->release_worker(kAda, 1001));
  EXPECT_EQ(grant(kAda, 1, step, now, step)[0].lease_s, 16);  // forgotten: a newcomer, by what is usual
}

TEST_F(Ledger, ProgressRenewsALease) {
  const auto leases = grant(kAda, 2);
  const std::vector<LeaseId> first = {leases[0].id};
  double now = 1000;
  for (std::uint64_t tokens = 1; tokens < 12; ++tokens) {  // a group that takes 15 minutes
    now += 80;
    EXPECT_EQ(must(ledger_->renew(kAda, first, tokens, now)), 1u);
    EXPECT_EQ(must(ledger_->renew(kAda, first, tokens, now)), 0u);  // no progress since
    EXPECT_EQ(must(ledger_->renew(kBob, first, tokens + 1, now)), 0u);
  }
  EXPECT_EQ(must(ledger_->expire(now)), 1u);  // the other lease was not worked on
  EXPECT_EQ(must(ledger_->renew(kAda, std::vector{leases[1].id}, 99, now)), 0u);
  EXPECT_EQ(must(ledger_->renew(kAda, first, 99, now + 90)), 1u);
  EXPECT_EQ(must(ledger_->expire(2000)), 0u);
  EXPECT_EQ(must(ledger_->expire(2001)), 1u);  // 1000 s is the most
}

TEST_F(Ledger, ARenewedLeaseIsNotWaitedForLongerThanTheWorkerUsuallyTakes) {
  const auto slow = grant(kAda, 1);
  const auto fast = grant(kBob, 2);
  for (const auto& lease : fast) EXPECT_TRUE(submit(kBob, submission_for(lease)).accepted);
  EXPECT_EQ(must(ledger_->renew(kAda, std::vector{slow[0].id}, 1, 1090)), 1u);
  EXPECT_EQ(must(ledger_->stranded_by_next_step(2, 1004)), 2u);  // four times what the other one took
  EXPECT_EQ(must(ledger_->stranded_by_next_step(2, 1005)), 0u);
  EXPECT_TRUE(submit(kAda, submission_for(slow[0]), 1150).accepted);
}

TEST_F(Ledger, LeasesAreBoundedByAWorkersShareAndSpeed) {
  options_.pacing = {.staleness = {.budget = 2, .publish_every = 1, .lookahead = 2},
                     .trajectories_per_step = 40};  // 60 groups in stock
  reopen();
  const auto ada = grant(kAda, 1), bob = grant(kBob, 10);
  EXPECT_TRUE(submit(kAda, submission_for(ada[0]), 1090).accepted);
  for (const auto& lease : bob) EXPECT_TRUE(submit(kBob, submission_for(lease), 1010).accepted);
  EXPECT_EQ(grant(kAda, 50, 0, 1091).size(), 2u);  // 1 of 91 groups: twice 60/91 of a group
  EXPECT_EQ(grant(kBob, 30, 0, 1091).size(), 30u);
  EXPECT_FALSE(ledger_->too_slow_batch_seconds(kAda));
  const auto ask = [&](double step_s) {
    return must(ledger_->grant({kBob, Version{1}, "digest", 1, step_s}, 1, 1092)).size();
  };
  EXPECT_EQ(ask(3.0), 0u);  // version 1 is of use for three steps, and it takes 10 s
  EXPECT_TRUE(ledger_->too_slow_batch_seconds(kBob));
  must(ledger_->release_worker(kAda, 1001));
  EXPECT_EQ(ask(4.0), 1u);
}

// A worker without leases is not to blame if the others hold all of them. A worker with an outdated policy is to blame
// while there is work for the newest.
TEST_F(Ledger, TurnedAwayMeansThatNoWorkerCouldGetALease) {
  options_.pacing = {.staleness = {.budget = 2, .publish_every = 1, .lookahead = 0},
                     .trajectories_per_step = 4};  // one batch in stock
  reopen();
  const auto ask = [&](WorkerId worker, std::uint64_t version, std::uint64_t newest, std::uint64_t step,
                       std::uint32_t groups = 1) {
    const GrantRequest request{worker, Version{version}, "digest", groups, {}, Version{newest}};
    return must(ledger_->grant(request, step, 1000)).size();
  };
  EXPECT_FALSE(ledger_->was_turned_away(kBob));
  EXPECT_EQ(ask(kBob, 0, 9, 9), 0u);
  EXPECT_FALSE(ledger_->was_turned_away(kBob)) << "there is work for version 9";
  EXPECT_GT(ask(kAda, 9, 9, 9, 8), 0u);
  EXPECT_FALSE(ledger_->was_turned_away(kAda));
  EXPECT_EQ(ask(kAda, 9, 9, 9, 8), 0u);
  EXPECT_FALSE(ledger_->was_turned_away(kAda)) << "it holds all available groups";
  EXPECT_EQ(ask(kBob, 9, 9, 9), 0u);
  EXPECT_TRUE(ledger_->was_turned_away(kBob));
  EXPECT_EQ(ask(kBob, 9, 9, 9, 0), 0u);
  EXPECT_FALSE(ledger_->was_turned_away(kBob)) << "it asks for no group";
}

// One batch of two groups is in stock at a time. Bob asks for two groups that do not exist, and later gets one of two.
TEST_F(Ledger, SecondsWithoutWorkCountTheFreePartOfAWorker) {
  options_.pacing = {.staleness = {.budget = 2, .publish_every = 1, .lookahead = 0}, .trajectories_per_step = 4};
  reopen();
  const auto ask = [&](WorkerId worker, std::uint32_t groups, double now_s, std::optional<double> free_share = {}) {
    const GrantRequest request{worker, Version{1}, "digest", groups, {}, {}, free_share};
    return must(ledger_->grant(request, 1, now_s));
  };
  const auto take = [&](double now_s) { return ledger_->take_seconds_without_work(kBob, now_s); };
  EXPECT_EQ(take(1000), 0) << "it never asked";
  const auto leases = ask(kAda, 2, 1000);
  ASSERT_EQ(leases.size(), 2u);
  EXPECT_TRUE(ask(kBob, 2, 1000).empty());
  EXPECT_DOUBLE_EQ(take(1003), 3);
  EXPECT_DOUBLE_EQ(take(1004), 1) << "since the last call";
  EXPECT_TRUE(ask(kBob, 2, 1005, 0.25).empty());
  EXPECT_DOUBLE_EQ(take(1009), 1 + 0.25 * 4) << "the rest of its capacity was busy";
  must(ledger_->return_leases(kAda, std::vector<LeaseId>{leases[0].id}));
  EXPECT_EQ(ask(kBob, 2, 1009).size(), 1u);
  EXPECT_DOUBLE_EQ(take(1013), 2) << "it got half of what it asked for";
  EXPECT_TRUE(ask(kBob, 0, 1013).empty());
  EXPECT_EQ(take(1020), 0) << "it asks for nothing";
}

// The leases that a worker may hold grow with its submissions, and shrink with every batch that lapses.
TEST_F(Ledger, ANewcomerGetsLittleAndEarnsMore) {
  options_.pacing = {.staleness = {.budget = 2, .publish_every = 1, .lookahead = 2},
                     .trajectories_per_step = 32};  // 48 groups in stock, 16 a step
  options_.lease.initial_groups.reset();
  reopen();
  const auto first = grant(kAda, 1000);
  ASSERT_EQ(first.size(), 2u);  // although it is alone
  EXPECT_TRUE(grant(kAda, 1000).empty());
  for (const auto& lease : first) EXPECT_TRUE(submit(kAda, submission_for(lease)).accepted);
  const auto second = grant(kAda, 1000, 0, 1002);
  EXPECT_EQ(second.size(), 4u);
  EXPECT_EQ(must(ledger_->expire(1200)), 4u);
  EXPECT_EQ(grant(kAda, 1000, 0, 1200).size(), 2u);
}

// The ledger names a worker that returns nothing, over all its connections and over restarts of the learner. It does
// not name one that returns most leases.
TEST_F(Ledger, AWorkerThatReturnsNothingIsNamed) {
  double now = 1000;
  const auto lapse = [&](WorkerId worker) {
    EXPECT_EQ(grant(worker, 1, 0, now).size(), 1u);
    now += 101;
    EXPECT_EQ(must(ledger_->expire(now)), 1u);
  };
  for (int i = 0; i < 2; ++i) lapse(kAda);
  must(ledger_->release_worker(kAda, now));
  for (int i = 0; i < 2; ++i) lapse(kAda);
  EXPECT_TRUE(ledger_->newly_unproductive().empty());
  reopen();
  lapse(kAda);
  const auto idle = ledger_->newly_unproductive();
  ASSERT_EQ(idle.size(), 1u);
  EXPECT_EQ(idle[0].worker, kAda);
  EXPECT_EQ(idle[0].reason, "it took 5 batches of work and returned none of them in time");
  EXPECT_TRUE(ledger_->newly_unproductive().empty());
  for (int i = 0; i < 6; ++i) {  // one of five comes to nothing
    lapse(kBob);
    for (int k = 0; k < 4; ++k) {
      const auto lease = grant(kBob, 1, 0, now);
      EXPECT_TRUE(submit(kBob, submission_for(lease[0]), now + 1).accepted);
      const auto batch = must(buffer_->sample(0, 1));
      must(buffer_->discard(batch->groups[0].id, "room for more"));
      now += 2;
    }
  }
  EXPECT_TRUE(ledger_->newly_unproductive().empty());
  // The worker is lost with its work again and again, as a hoarder that never lets a lease expire would be.
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(grant(WorkerId{3}, 1, 0, now).size(), 1u);
    must(ledger_->release_worker(WorkerId{3}, now + 1));
  }
  EXPECT_EQ(ledger_->newly_unproductive().size(), 1u);
}

// A verdict contains the time for which the worker had work, by the ledger's own clock.
TEST_F(Ledger, TheTimeWithWorkIsCountedOnce) {
  const auto first = grant(kAda, 2, 0, 1000);
  const schema::Submission a = submission_for(first[0]), b = submission_for(first[1]);
  EXPECT_DOUBLE_EQ(submit(kAda, a, 1010).lease_seconds, 10);
  EXPECT_DOUBLE_EQ(submit(kAda, b, 1012).lease_seconds, 2);
  const auto second = grant(kAda, 1, 0, 1020);
  EXPECT_DOUBLE_EQ(submit(kAda, submission_for(second[0]), 1021).lease_seconds, 1);
  const auto third = grant(kAda, 1, 0, 1030);
  must(ledger_->extend_all_leases(90, 1120));  // submitted long ago, but read only now
  EXPECT_DOUBLE_EQ(submit(kAda, submission_for(third[0]), 1121).lease_seconds, 1);
}

TEST_F(Ledger, MisconductIsPersisted) {
  must(ledger_->store_misconduct(kAda, {3, 1}));
  must(ledger_->store_misconduct(kBob, {1, 0}));
  must(ledger_->store_misconduct(kBob, {}));
  must(ledger_->release_worker(kAda, 1001));
  reopen();
  EXPECT_EQ(ledger_->misconduct(), (std::map<WorkerId, Misconduct>{{kAda, {3, 1}}}));
}

TEST_F(Ledger, AGroupThatFailsIsTriedOnOneOtherWorkerAndThenSetAside) {
  const auto ada = grant(kAda, 2);
  grant(kBob, 1);
  const auto fail_on = [&](WorkerId worker, LeaseId lease) {
    return must(ledger_->on_group_failed({worker, lease, "out of memory", "one row of 9 tokens"}));
  };
  EXPECT_FALSE(fail_on(kBob, ada[0].id));
  EXPECT_TRUE(fail_on(kAda, ada[0].id));
  EXPECT_FALSE(fail_on(kAda, ada[0].id));
  EXPECT_EQ(submit(kAda, submission_for(ada[0])).reason, "lease released");
  EXPECT_EQ(groups_of(grant(kAda, 1)), Set{3});  // not the same again
  reopen();                                      // what failed is on disk
  const auto again = grant(kBob, 1);
  EXPECT_EQ(groups_of(again), Set{0});
  EXPECT_TRUE(fail_on(kBob, again[0].id));
  const auto aside = ledger_->newly_set_aside();
  ASSERT_EQ(aside.size(), 1u);
  EXPECT_EQ(aside[0].group, GroupId{0});
  EXPECT_EQ(aside[0].reason, "out of memory");
  EXPECT_EQ(aside[0].detail, "one row of 9 tokens");
  EXPECT_TRUE(ledger_->newly_set_aside().empty());
  reopen();
  EXPECT_EQ(must(ledger_->counts()).set_aside, (std::map<std::string, std::uint64_t>{{"out of memory", 1}}));
  EXPECT_EQ(must(ledger_->counts()).pooled, 0u);
  EXPECT_TRUE(submit(kAda, submission_for(ada[1])).accepted);  // its neighbour in the batch
}

TEST_F(Ledger, ALoneWorkerTriesASecondTime) {
  for (int i = 0; i < 2; ++i) {
    const auto lease = grant(kAda, 1);
    EXPECT_EQ(groups_of(lease), Set{0});
    EXPECT_TRUE(must(ledger_->on_group_failed({kAda, lease[0].id, "prompt", ""})));
  }
  EXPECT_EQ(groups_of(grant(kAda, 1)), Set{1});
}

TEST_F(Ledger, AGroupThatKillsWorkersIsLeasedAloneAndThenSetAside) {
  for (std::uint64_t i = 1; i <= 4; ++i) {
    const auto leases = grant(WorkerId{i}, 2);
    EXPECT_EQ(groups_of(leases), i <= 2 ? (Set{0, 1}) : Set{0});  // at last alone, so that its neighbour is cleared
    EXPECT_TRUE(ledger_->newly_set_aside().empty());
    must(ledger_->release_worker(WorkerId{i}, 1001));
  }
  ASSERT_EQ(ledger_->newly_set_aside().size(), 1u);
  EXPECT_EQ(must(ledger_->counts()).set_aside.at("worker lost"), 1u);
  const auto neighbour = grant(kAda, 2);
  EXPECT_EQ(groups_of(neighbour), Set{1});
  EXPECT_TRUE(submit(kAda, submission_for(neighbour[0])).accepted);
}

TEST_F(Ledger, ARefusedSubmissionIsCountedAndItsGroupReturns) {
  const auto lease = grant(kAda, 1)[0];
  const auto submission = submission_for(lease);
  const Delivery stolen{kBob, &submission, "wrong score", "reward 1, expected 0"};
  EXPECT_EQ(must(ledger_->submit({&stolen, 1}, 0, 1001))[0].reason, "lease of another worker");
  const Delivery refused{kAda, &submission, "wrong score", "reward 1, expected 0"};
  const Verdict verdict = must(ledger_->submit({&refused, 1}, 0, 1001))[0];
  EXPECT_EQ(verdict.reason, "wrong score");
  EXPECT_EQ(verdict.detail, "reward 1, expected 0");
  EXPECT_EQ(must(buffer_->counts(0)).rejected.at("wrong score"), 2u);
  EXPECT_EQ(groups_of(grant(kBob, 1)), Set{0});
}

TEST_F(Ledger, AnUnusablePromptIsSetAsideAtOnce) {
  const auto leases = grant(kAda, 2);
  must(ledger_->set_aside(leases[0].id, "prompt", "is empty"));
  EXPECT_FALSE(ledger_->set_aside(leases[0].id, "prompt", "is empty"));
  EXPECT_EQ(must(ledger_->counts()).live, 1u);
  EXPECT_EQ(groups_of(grant(kAda, 1)), Set{2});
}

TEST_F(Ledger, SlowVersionIsStrandedByTheNextStep) {
  const auto slow = grant(kAda, 1), fast = grant(kBob, 2);
  for (const auto& lease : fast) EXPECT_TRUE(submit(kBob, submission_for(lease)).accepted);
  EXPECT_EQ(must(ledger_->stranded_by_next_step(0, 1001)), 0u);
  const auto newer = grant(kBob, 2, 2, 1001, 2);
  must(buffer_->consume(0, std::vector{fast[0].group, fast[1].group}));
  for (const auto& lease : newer) EXPECT_TRUE(submit(kBob, submission_for(lease), 1002, 2).accepted);
  EXPECT_EQ(must(ledger_->stranded_by_next_step(2, 1002)), 2u);
  EXPECT_EQ(must(ledger_->stranded_by_next_step(2, 1101)), 0u);  // the lease is over
  EXPECT_TRUE(submit(kAda, submission_for(slow[0]), 1003, 2).accepted);
  EXPECT_EQ(must(ledger_->stranded_by_next_step(2, 1003)), 0u);
}

TEST_F(Ledger, PruneRemovesSettledLeases) {
  const auto lease = grant(kAda, 1)[0];
  const auto submission = submission_for(lease);
  EXPECT_TRUE(submit(kAda, submission).accepted);
  must(buffer_->consume(0, std::vector{lease.group}));
  must(buffer_->prune(1));
  EXPECT_EQ(submit(kAda, submission).reason, "unknown lease");
  EXPECT_EQ(must(ledger_->counts()).settled, 1u);
  const auto next = grant(kAda, 1, 1, 1002, 1)[0];
  EXPECT_GT(next.id, lease.id);
  EXPECT_EQ(next.group, GroupId{1});
}

TEST_F(Ledger, WrongOptionsAreNamed) {
  const auto with = [&](const std::function<void(LedgerOptions&)>& change) {
    LedgerOptions options = options_;
    change(options);
    const auto ledger = JobLedger::open(*buffer_, options);
    return ledger ? std::string("accepted") : ledger.error().detail;
  };
  EXPECT_NE(with([](auto& o) { o.pacing.staleness.budget = 3; }).find("staleness budget 3"), std::string::npos);
  EXPECT_NE(with([](auto& o) { o.pacing.staleness.lookahead = 3; }).find("lookahead_steps is 3"), std::string::npos);
  EXPECT_NE(with([](auto& o) { o.pacing.trajectories_per_step = 5; }).find("multiple of the group size"),
            std::string::npos);
  EXPECT_NE(with([](auto& o) { o.lease.limits.min = {}; }).find("0 < min"), std::string::npos);
}

// The first result of a worker changes its live leases. Without an index by worker, 1,000 workers with 10 leases each
// read 10 million rows, and the desk stood still for 0.6 s.
TEST(LedgerFile, FindsLiveLeasesByWorker) {
  const TemporaryFolder folder(TemporaryFolder::On::kMemory);
  must(ReplayBuffer::open(folder.file(), options_for(2, 1)));
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(folder.file().c_str(), &db), SQLITE_OK);
  std::string plan;
  const auto append = [](void* to, int columns, char** values, char**) {
    *static_cast<std::string*>(to) += values[columns - 1];  // the last column is the step of the plan
    return 0;
  };
  EXPECT_EQ(sqlite3_exec(db, "EXPLAIN QUERY PLAN UPDATE lease SET due_unix_s = 0 WHERE state = 0 AND worker = 7",
                         append, &plan, nullptr),
            SQLITE_OK);
  EXPECT_NE(plan.find("lease_live (worker=?)"), std::string::npos) << plan;
  sqlite3_close(db);
}

}  // namespace
}  // namespace echoline::replay_buffer
