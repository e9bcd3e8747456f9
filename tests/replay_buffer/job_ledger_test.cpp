// The job ledger: leases that survive restarts, expiry, refusals, and submissions that count once.
#include <set>

#include "tests/replay_buffer/fixtures.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::uint32_t kGroup = 2;
const WorkerId kAda{1}, kBob{2};

class Ledger : public testing::Test {
 protected:
  void SetUp() override {
    options_.pacing = {2, 2, 4};  // S = 2, R = 4: two groups a step
    options_.lease = {5, 100};
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
  EXPECT_EQ(must(ledger_->release_worker(kAda)), 2u);
  EXPECT_EQ(must(ledger_->release_worker(kAda)), 0u);
  EXPECT_EQ(submit(kAda, submission_for(leases[1])).reason, "lease released");
  EXPECT_EQ(groups_of(grant(kBob, 2)), (Set{1, 2}));
}

TEST_F(Ledger, RestartNeitherLosesNorDoublesAGroup) {
  const auto before = grant(kAda, 2);
  reopen();
  EXPECT_EQ(groups_of(grant(kBob, 2)), (Set{2, 3}));
  EXPECT_EQ(must(ledger_->resume(1090)), 4u);  // the learner was away: everybody gets a full term
  EXPECT_EQ(must(ledger_->expire(1150)), 0u);
  EXPECT_TRUE(submit(kAda, submission_for(before[1]), 1150).accepted);
  EXPECT_EQ(must(ledger_->expire(1191)), 3u);
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
      {"wrong version", kAda, [](auto& s) { s.mutable_trajectories(1)->mutable_spans(0)->set_version(1); }},
      {"wrong digest", kAda, [](auto& s) { s.mutable_trajectories(1)->set_policy_digest("forged"); }},
      {"malformed", kAda, [](auto& s) { s.clear_trajectories(); }},
      {"malformed", kAda, [](auto& s) { s.mutable_trajectories()->RemoveLast(); }},
      {"malformed", kAda, [](auto& s) { *s.add_trajectories() = s.trajectories(0); }},
      {"malformed", kAda, [](auto& s) { *s.mutable_trajectories(1) = s.trajectories(0); }},
      {"malformed", kAda, [](auto& s) { s.mutable_trajectories(1)->set_member(0); }},
      {"malformed", kAda, [](auto& s) { s.mutable_trajectories(1)->set_group(77); }},
      {"malformed", kAda, [](auto& s) { s.mutable_trajectories(1)->set_lease(77); }},
      {"malformed", kAda, [](auto& s) { s.mutable_trajectories(1)->set_worker(77); }},
      {"malformed", kAda, [](auto& s) { s.mutable_trajectories(1)->mutable_logprobs()->Truncate(1); }},
  };
  std::map<std::string, std::uint64_t> expected;
  for (const Case& c : cases) {
    const auto lease = grant(kAda, 1)[0];
    EXPECT_EQ(lease.group, GroupId{0});
    auto submission = submission_for(lease);
    c.spoil(submission);
    const Verdict verdict = submit(c.worker, submission);
    EXPECT_FALSE(verdict.accepted);
    EXPECT_EQ(verdict.reason, c.reason) << verdict.detail;
    expected[c.reason] += static_cast<std::uint64_t>(submission.trajectories_size());
    must(ledger_->release_worker(kAda));
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

TEST_F(Ledger, LeaseFollowsTheMedianCompletionTime) {
  EXPECT_EQ(ledger_->lease_seconds_now(), 100);
  for (const double took : {4.0, 8.0, 15.0}) {
    const auto lease = grant(kAda, 1);
    ASSERT_EQ(lease.size(), 1u);
    EXPECT_TRUE(submit(kAda, submission_for(lease[0]), 1000 + took).accepted);
  }
  EXPECT_EQ(ledger_->lease_seconds_now(), 20);  // 2.5 x 8
  reopen();
  EXPECT_EQ(ledger_->lease_seconds_now(), 20);
}

TEST_F(Ledger, SharesFollowMeasuredThroughput) {
  const auto ada = grant(kAda, 1), bob = grant(kBob, 1);
  EXPECT_TRUE(submit(kAda, submission_for(ada[0]), 1002).accepted);  // 6 tokens in 2 s
  EXPECT_TRUE(submit(kBob, submission_for(bob[0]), 1006).accepted);  // 6 tokens in 6 s
  const std::vector<WorkerId> everyone = {kAda, kBob}, bob_only = {kBob};
  auto shares = ledger_->shares(8, everyone);
  EXPECT_EQ(shares[0].groups, 6u);
  EXPECT_EQ(shares[1].groups, 2u);
  shares = ledger_->shares(8, bob_only);
  EXPECT_EQ(shares[1].groups, 8u);
  EXPECT_DOUBLE_EQ(ledger_->shares(8, everyone)[0].tokens_per_s, 1.5);  // decayed while not eligible
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
  EXPECT_NE(with([](auto& o) { o.pacing.staleness_budget = 3; }).find("staleness budget 3"), std::string::npos);
  EXPECT_NE(with([](auto& o) { o.pacing.lookahead_steps = 3; }).find("lookahead_steps is 3"), std::string::npos);
  EXPECT_NE(with([](auto& o) { o.pacing.trajectories_per_step = 5; }).find("multiple of the group size"),
            std::string::npos);
  EXPECT_NE(with([](auto& o) { o.lease.lease_s_min = 0; }).find("0 < min"), std::string::npos);
}

}  // namespace
}  // namespace echoline::replay_buffer
