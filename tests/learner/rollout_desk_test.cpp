// The desk between workers and training, with real storage and no network: leases, durable acceptance, batches, resume.
#include "learner/rollout_desk.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "learner/credibility.hpp"
#include "learner/worker_meter.hpp"
#include "tests/learner/desk.hpp"

namespace echoline::learner {
namespace {

TEST_F(DeskTest, LeasesBecomeABatchOnceHandedIn) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 2);
  ASSERT_EQ(grant.leases_size(), 2);
  EXPECT_EQ(grant.leases(0).problem().id(), (*adapter_->problem(grant.leases(0).group())).id());
  EXPECT_TRUE(submit_and_wait(grant.leases(0)).accepted());
  auto early = desk_->wait_batch(0, std::chrono::milliseconds(1));
  ASSERT_TRUE(early);
  EXPECT_FALSE(early->has_value());  // one group of the two in a batch
  EXPECT_TRUE(submit_and_wait(grant.leases(1)).accepted());
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  EXPECT_EQ((*batch)->groups.size(), 2u);
  EXPECT_TRUE(desk_->consume(0, **batch));
  EXPECT_EQ(accepted_, 4u);
  EXPECT_EQ(desk_->counts()->buffer.consumed, 4u);
}

TEST_F(DeskTest, HandsOutNoMoreThanTheLookaheadAndTheRunAllow) {
  open(0);
  EXPECT_EQ(request_work(0, 64).leases_size(), 4);  // two steps of two groups
  const schema::WorkGrant nothing = request_work(0, 64);
  EXPECT_EQ(nothing.leases_size(), 0);
  EXPECT_TRUE(turned_away_.empty()) << "it holds all available groups";
  EXPECT_EQ(request_work(0, 1, WorkerId{2}).leases_size(), 0);
  EXPECT_EQ(turned_away_, std::vector<std::uint64_t>{2});
  EXPECT_GT(nothing.retry_after_ms(), 0u);
  request_work(0, 1, WorkerId{2});
  EXPECT_GT(seconds_without_work_[2], 0) << "since it was turned away";
  open(3);  // the last of four steps
  EXPECT_EQ(request_work(3, 64).leases_size(), 2);
}

// A released worker gets no more leases, and the desk still accepts its submissions.
TEST_F(DeskTest, AReleasedWorkerSubmitsItsRemainingLeases) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 1);
  ASSERT_EQ(grant.leases_size(), 1);
  desk_->on_presence_change({PresenceChange::Kind::kRetired, WorkerId{1}});
  EXPECT_EQ(request_work(0, 1).leases_size(), 0);
  (void)desk_->counts();
  EXPECT_TRUE(drained_.empty()) << "it asks while it still holds leases";
  EXPECT_TRUE(submit_and_wait(grant.leases(0)).accepted());
  EXPECT_TRUE(drained_.empty());
  EXPECT_EQ(request_work(0, 1).leases_size(), 0);
  (void)desk_->counts();
  EXPECT_EQ(drained_, std::vector<std::uint64_t>{1});
  EXPECT_EQ(request_work(0, 1, WorkerId{2}).leases_size(), 1);
  desk_->on_presence_change({PresenceChange::Kind::kBack, WorkerId{1}});
  EXPECT_EQ(request_work(0, 1).leases_size(), 1);
}

TEST_F(DeskTest, ALeavingWorkerIsStoppedOnceTheRunHasEnded) {
  open(0);
  ASSERT_EQ(request_work(0, 1).leases_size(), 1);
  schema::WorkerMessage message;
  message.mutable_leaving();
  desk_->receive(WorkerId{1}, message.SerializeAsString());
  EXPECT_EQ(request_work(0, 1).leases_size(), 0);
  EXPECT_EQ(leaving_, std::vector<std::uint64_t>{1});
  desk_->on_run_ended();
  desk_->receive(WorkerId{1}, message.SerializeAsString());
  EXPECT_TRUE(next_message().has_stop());
  EXPECT_EQ(leaving_.size(), 1u);  // the run has ended, and every worker is stopped
}

// A worker may use a new policy before the learner has ended its publication.
TEST_F(DeskTest, TokensOfAPolicyThatIsBeingPublishedAreTaken) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 2);  // for version 0
  const auto submit_with_next_version = [&](int lease) {
    schema::Submission submission = honest_submission(grant.leases(lease));
    for (auto& trajectory : *submission.mutable_trajectories()) trajectory.mutable_spans(0)->set_version(1);
    return submit_and_wait(submission);
  };
  EXPECT_EQ(submit_with_next_version(0).reason(), "malformed");
  desk_->begin_publishing(Version{1});
  EXPECT_TRUE(submit_with_next_version(1).accepted());
  EXPECT_EQ(misbehaved(), "");
}

TEST_F(DeskTest, ReturnedLeasesGoToOtherWorkers) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 1);
  schema::WorkerMessage message;
  message.mutable_returned()->add_leases(grant.leases(0).id());
  desk_->receive(WorkerId{1}, message.SerializeAsString());
  EXPECT_EQ(request_work(0, 1, WorkerId{2}).leases(0).group(), grant.leases(0).group());
  EXPECT_EQ(misbehaved(), "");
}

TEST_F(DeskTest, RefusesAnUnknownVersionAndAForeignDigest) {
  open(0);
  EXPECT_EQ(request_work(9, 1).leases_size(), 0);
  digest_[0] = std::byte{8};
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(misbehaved(), "") << "bad memory is no attack";
    const schema::WorkGrant refused = request_work(0, 1);
    EXPECT_EQ(refused.leases_size(), 0);
    EXPECT_EQ(refused.retry_after_ms(), 1000u);
  }
  EXPECT_NE(misbehaved().find("digest"), std::string::npos);
}

// Misconduct belongs to the identity: neither a new connection nor a new learner resets it.
TEST_F(DeskTest, ConductOutlivesConnectionsAndTheLearner) {
  open(0);
  for (int i = 0; i < 2; ++i) desk_->receive(WorkerId{1}, "\xff\xff\xff");
  desk_->on_presence_change({PresenceChange::Kind::kLost, WorkerId{1}});
  desk_->receive(WorkerId{1}, "\xff\xff\xff");
  EXPECT_EQ(misbehaved(), "");
  open(0);
  desk_->receive(WorkerId{1}, "\xff\xff\xff");
  desk_->receive(WorkerId{2}, "\xff\xff\xff");
  EXPECT_EQ(misbehaved(), "");
  desk_->on_presence_change({PresenceChange::Kind::kLost, WorkerId{1}});
  desk_->receive(WorkerId{1}, "\xff\xff\xff");
  EXPECT_NE(misbehaved(), "");
}

// Discarded groups of a worker that invented them are leased to other workers.
TEST_F(DeskTest, DiscardedGroupsAreNotTrainedOn) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 1);
  ASSERT_EQ(grant.leases_size(), 1);
  ASSERT_TRUE(submit_and_wait(honest_submission(grant.leases(0), WorkerId{1}), WorkerId{1}).accepted());
  ASSERT_TRUE(desk_->discard_groups_of(WorkerId{2}));
  EXPECT_EQ(desk_->counts()->buffer.admissible_groups, 1u);
  ASSERT_TRUE(desk_->discard_groups_of(WorkerId{1}));
  const auto counts = desk_->counts();
  EXPECT_EQ(counts->buffer.admissible_groups, 0u);
  EXPECT_EQ(counts->buffer.rejected.at("not of the policy"), grant.leases(0).rollouts());
  EXPECT_EQ(counts->leases.pooled, 1u);
}

// ---- answers of another policy ----

// One step's evidence about one worker: the number of responses, and their mean surprise and dispute (credibility.hpp)
// in nats per token.
std::pair<WorkerId, Scrutiny> evidence(std::uint64_t worker, double surprise, double dispute,
                                       std::uint64_t responses = 8) {
  const auto count = static_cast<double>(responses);
  return {WorkerId{worker}, {.responses = responses, .surprise = surprise * count, .dispute = dispute * count}};
}

TEST(Credibility, AWorkerWithForeignAnswersIsExpelled) {
  for (const bool surprising : {true, false}) {
    Credibility credibility;
    const auto liar = evidence(9, surprising ? 8 : 0, surprising ? 0 : 2);
    for (std::uint64_t step = 1; step < Credibility::kInARowMax; ++step)
      EXPECT_TRUE(credibility.judge({evidence(1, 0.1, 0.2), evidence(2, -0.2, 0.1), liar}, step).empty());
    const auto verdicts =
        credibility.judge({evidence(1, 0.1, 0.2), evidence(2, -0.2, 0.1), liar}, Credibility::kInARowMax);
    ASSERT_EQ(verdicts.size(), 1u);
    EXPECT_EQ(verdicts[0].worker, WorkerId{9});
    EXPECT_NE(verdicts[0].reason.find(surprising ? "8.0 nats less likely" : "off by 2.0"), std::string::npos)
        << verdicts[0].reason;
  }
}

TEST(Credibility, FewResponsesOrNoOtherWorkersConvictNoWorker) {
  Credibility with_few_responses, without_others, interrupted;
  for (std::uint64_t step = 1; step < 8 * Credibility::kInARowMax; ++step)
    EXPECT_TRUE(with_few_responses.judge({evidence(1, 0, 0), evidence(2, 0, 0), evidence(9, 9, 9, 1)}, step).empty())
        << step;
  EXPECT_FALSE(with_few_responses.judge({evidence(9, 9, 9, 1)}, 24).empty()) << "24 responses: three times eight";
  for (std::uint64_t step = 1; step < 50; ++step)
    EXPECT_TRUE(without_others.judge({evidence(1, 0, 0), evidence(9, 9, 9)}, step).empty());
  for (std::uint64_t step = 1; step < 50; ++step)  // never often enough in a row, so it may be chance
    EXPECT_TRUE(
        interrupted.judge({evidence(1, 0, 0), evidence(2, 0, 0), evidence(9, step % 3 ? 9 : 0, 0)}, step).empty());
}

// A policy that changes fast differs from the policy that every worker generated with.
TEST(Credibility, OthersAreTheMeasure) {
  Credibility credibility;
  for (std::uint64_t step = 1; step < 50; ++step)
    EXPECT_TRUE(
        credibility.judge({evidence(1, 4, 2), evidence(2, 5, 3), evidence(3, 3, 2), evidence(4, 12, 9)}, step).empty());
}

// Submissions for leases of other workers, or of none: the desk tolerates a few, because a worker may mix them up.
TEST_F(DeskTest, LeasesThatItDoesNotHoldAreHeldAgainstAWorker) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 1);
  schema::Submission stolen = honest_submission(grant.leases(0), WorkerId{2});
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(misbehaved(), "");
    stolen.set_lease(i % 2 ? grant.leases(0).id() : 99);
    EXPECT_FALSE(submit_and_wait(stolen, WorkerId{2}).accepted());
  }
  EXPECT_NE(misbehaved(), "");
  EXPECT_TRUE(submit_and_wait(grant.leases(0)).accepted());
}

// Some messages without a result are part of the work, thousands are a flood.
TEST_F(DeskTest, AWorkerThatFloodsMessagesIsExpelled) {
  open(0);
  schema::WorkerMessage message;
  message.mutable_progress()->add_leases(1);
  const std::string bytes = message.SerializeAsString();
  for (int i = 0; i < 1500; ++i) desk_->receive(WorkerId{1}, bytes);
  EXPECT_EQ(misbehaved(), "");
  for (int i = 0; i < 1500; ++i) desk_->receive(WorkerId{2}, bytes);
  EXPECT_EQ(misbehaved(), "");
  for (int i = 0; i < 1500; ++i) desk_->receive(WorkerId{1}, bytes);
  EXPECT_NE(misbehaved().find("messages"), std::string::npos);
}

// The desk also limits a worker's unread messages and the length of each.
TEST_F(DeskTest, ASlowDeskBoundsUnreadMessages) {
  open(0);
  schema::WorkerMessage message;
  message.mutable_request()->set_policy_digest(digest_bytes());
  const std::string bytes = message.SerializeAsString();
  {
    const std::lock_guard desk_cannot_answer(mutex_);
    for (int i = 0; i < 5000; ++i) desk_->receive(WorkerId{1}, bytes);
    EXPECT_EQ(flooded_, 1);
  }
  (void)misbehaved();
  for (int i = 0; i < 5; ++i) desk_->receive(WorkerId{2}, std::string(2u << 20, 'x'));
  EXPECT_NE(misbehaved().find("at most"), std::string::npos);
}

TEST_F(DeskTest, ABrokenDriverIsNoAttackUntilItGoesOn) {
  open(0);
  for (int i = 0; i < 4; ++i) desk_->receive(WorkerId{1}, "\xff\xff\xff");
  EXPECT_EQ(misbehaved(), "");
  desk_->receive(WorkerId{2}, "\xff\xff\xff");
  EXPECT_EQ(misbehaved(), "");
  desk_->receive(WorkerId{1}, "\xff\xff\xff");
  EXPECT_NE(misbehaved(), "");
  EXPECT_EQ(desk_->counts()->refused.at("unreadable message"), 6u);
}

// A response may end with a stop string instead of a token, but a stop string within it is refused.
TEST_F(DeskTest, AStopStringEndsAResponse) {
  const auto stopping =
      *model::Phrasing::from_parts(tokenizer_, {*tokenizer_.end_of_text()}, R"({"text": "{prompt}", "stop": ["!?"]})");
  SubmissionChecker checker(checker_options_, *adapter_, stopping);
  const auto verdict_on = [&](const std::string& text, bool finished) {
    schema::Lease lease;
    lease.set_id(1);
    lease.set_group(1);
    lease.set_rollouts(1);
    lease.set_version(1);
    lease.set_policy_digest(digest_bytes());
    *lease.mutable_problem() = *adapter_->problem(1);
    schema::Submission submission = honest_submission(lease);
    schema::Trajectory& trajectory = *submission.mutable_trajectories(0);
    const auto tokens = *tokenizer_.encode(text);
    trajectory.clear_response_tokens();
    trajectory.clear_logprobs();
    for (const model::Token token : tokens)
      trajectory.add_response_tokens(static_cast<std::uint32_t>(token)), trajectory.add_logprobs(-0.5f);
    trajectory.mutable_spans(0)->set_end(static_cast<std::uint32_t>(tokens.size()));
    trajectory.set_finished(finished);
    trajectory.set_text(stopping.answer(tokens));
    const data_plane::Score score = *adapter_->score(lease.problem(), trajectory.text());
    trajectory.set_reward(score.reward);
    trajectory.set_correct(score.correct);
    trajectory.clear_components();
    for (const auto& [name, value] : score.components) (*trajectory.mutable_components())[name] = value;
    const auto refused = checker.refusal(submission);
    return refused ? refused->detail : std::string("accepted");
  };
  EXPECT_EQ(verdict_on("12!?", true), "accepted");
  EXPECT_EQ(verdict_on("12345678", false), "accepted") << "cut at the limit";
  EXPECT_NE(verdict_on("12!?", false), "accepted");
  EXPECT_NE(verdict_on("12!?3", true), "accepted") << "it goes on behind the stop string";
  EXPECT_NE(verdict_on("12!", true), "accepted");
}

// The fifth malformed message expels, as for other forms. None of it is stored.
TEST_F(DeskTest, MetadataBeyondTheRunsLimitIsRefusedWithTheReason) {
  options_.pacing.staleness.lookahead = 2;
  checker_options_.metadata_max = Bytes{1000};
  open(1);
  const auto submit_with_metadata = [&](std::size_t metadata_bytes) {
    schema::Submission submission = honest_submission(request_work(1, 1).leases(0));
    submission.mutable_trajectories(0)->set_metadata_json('"' + std::string(metadata_bytes - 2, 'x') + '"');
    return submit_and_wait(submission);
  };
  EXPECT_TRUE(submit_with_metadata(1000).accepted());
  for (int i = 1; i <= 5; ++i) {
    EXPECT_TRUE(misbehaved().empty()) << i;
    const schema::SubmissionAck ack = submit_with_metadata(1001);
    EXPECT_FALSE(ack.accepted());
    EXPECT_EQ(ack.reason(), "malformed");
  }
  EXPECT_THAT(misbehaved(),
              ::testing::HasSubstr("metadata_json has 1001 bytes, at most 1000 are allowed (rollout.metadata_max)"));
  EXPECT_EQ(desk_->counts()->buffer.stored, 2u);
}

TEST_F(DeskTest, TheDoorRefusesUntrainableSubmissions) {
  options_.pacing.staleness.lookahead = 2;
  struct SpoiledSubmission {
    std::string reason;
    bool expels;
    std::function<void(schema::Trajectory& t)> change;  // spoils an honest trajectory
  };
  const std::vector<SpoiledSubmission> cases = {
      {"malformed", false, [&](auto& t) { t.set_response_tokens(0, static_cast<std::uint32_t>(shape_.vocab_size)); }},
      {"malformed", false, [](auto& t) { t.set_logprobs(0, std::nanf("")); }},
      {"malformed", false, [](auto& t) { t.clear_logprobs(); }},
      {"malformed", false, [](auto& t) { t.set_id("another/1"); }},
      {"malformed", false,
       [](auto& t) {  // longer than was asked for
         for (int i = 0; i < 9; ++i) t.mutable_response_tokens()->Add(3), t.add_logprobs(-1);
         t.mutable_spans(0)->set_end(static_cast<std::uint32_t>(t.response_tokens_size()));
       }},
      {"malformed", false, [](auto& t) { t.set_finished(false); }},
      {"malformed", false,
       [](auto& t) {  // cut before its end
         t.mutable_response_tokens()->RemoveLast(), t.mutable_logprobs()->RemoveLast();
         t.mutable_spans(0)->set_end(static_cast<std::uint32_t>(t.response_tokens_size()));
         t.set_finished(false);
       }},
      {"malformed", false, [](auto& t) { t.mutable_response_tokens()->SwapElements(0, t.response_tokens_size() - 1); }},
      {"malformed", false,
       [](auto& t) {
         for (int i = 0; i < t.response_tokens_size(); ++i) t.add_loss_mask(0);
       }},
      {"malformed", false, [](auto& t) { t.set_member(9); }},
      {"malformed", false, [](auto& t) { t.set_metadata_json('"' + std::string(64'000, 'x') + '"'); }},
      {"malformed", false,
       [](auto& t) { t.GetReflection()->MutableUnknownFields(&t)->AddLengthDelimited(99, std::string(64'000, 'x')); }},
      {"wrong prompt", true, [](auto& t) { t.set_prompt_tokens(0, t.prompt_tokens(0) ^ 1); }},
      {"wrong prompt", true,
       [](auto& t) {  // longer than the model's positions
         for (int i = 0; i < 40; ++i) t.add_prompt_tokens(3);
       }},
      {"wrong prompt", true, [](auto& t) { t.set_problem_id("arithmetic/0+0"); }},
      {"wrong score", true, [](auto& t) { t.set_reward(1); }},
      {"wrong score", true, [](auto& t) { t.set_correct(true); }},
      {"wrong score", true, [](auto& t) { (*t.mutable_components())["exact"] = 1; }},
      {"wrong score", true, [](auto& t) { (*t.mutable_components())["bonus"] = 1; }},
      {"wrong score", true, [](auto& t) { t.set_text("95"); }},
      {"wrong version", false, [](auto& t) { t.mutable_spans(0)->set_version(0); }},
      {"malformed", false, [](auto& t) { t.mutable_spans(0)->set_version(2); }},  // not published yet
      {"wrong digest", false, [](auto& t) { t.set_policy_digest("another"); }},
  };
  open(1);
  std::uint64_t worker_number = 1;
  for (const SpoiledSubmission& spoiled : cases) {
    const WorkerId worker{worker_number++};
    const schema::WorkGrant grant = request_work(1, 1, worker);
    ASSERT_EQ(grant.leases_size(), 1);
    EXPECT_EQ(grant.leases(0).group(), 0u);  // the group comes back every time
    schema::Submission submission = honest_submission(grant.leases(0), worker);
    spoiled.change(*submission.mutable_trajectories(1));
    const schema::SubmissionAck ack = submit_and_wait(submission, worker);
    EXPECT_FALSE(ack.accepted());
    EXPECT_EQ(ack.reason(), spoiled.reason) << "case " << worker_number - 2;
    EXPECT_EQ(!misbehaved().empty(), spoiled.expels) << "case " << worker_number - 2;
  }
  EXPECT_EQ(desk_->counts()->buffer.stored, 0u);
  const schema::WorkGrant honest = request_work(1, 1);
  EXPECT_TRUE(submit_and_wait(honest.leases(0)).accepted());
}

// A resumed run has groups that an older version accepted.
TEST_F(DeskTest, StoredUntrainableGroupsAreDroppedOneByOne) {
  const auto correct_vocab_size = checker_options_.vocab_size;
  checker_options_.trainable = {};
  checker_options_.vocab_size = 1'000'000;
  open(0);
  const schema::WorkGrant grant = request_work(0, 2);
  ASSERT_EQ(grant.leases_size(), 2);
  schema::Submission untrainable = honest_submission(grant.leases(0));
  untrainable.mutable_trajectories(1)->set_response_tokens(0, 999'999);
  untrainable.mutable_trajectories(1)->set_text("");
  EXPECT_TRUE(submit_and_wait(untrainable).accepted());
  EXPECT_TRUE(submit_and_wait(grant.leases(1)).accepted());
  checker_options_.vocab_size = correct_vocab_size;
  checker_options_.trainable = [this](const schema::Trajectory& trajectory) {
    return check_trainable(trajectory, shape_);
  };
  open(0);
  EXPECT_FALSE((*desk_->wait_batch(0, std::chrono::milliseconds(100))).has_value());
  EXPECT_EQ(desk_->counts()->buffer.rejected.at("not trainable"), 2u);
  const schema::WorkGrant again = request_work(0, 1);
  EXPECT_EQ(again.leases(0).group(), grant.leases(0).group());
  EXPECT_TRUE(submit_and_wait(again.leases(0)).accepted());
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  for (const auto& group : (*batch)->groups)
    for (const schema::Trajectory& trajectory : group.trajectories) EXPECT_TRUE(check_trainable(trajectory, shape_));
}

TEST_F(DeskTest, AGroupThatFailsTwiceIsSetAsideForGood) {
  open(0);
  const WorkerId ada{1}, bob{2};
  const schema::WorkGrant first = request_work(0, 2, ada);
  ASSERT_EQ(first.leases_size(), 2);
  EXPECT_GT(first.progress_every_ms(), 0u);
  report_failure(first.leases(0), ada, schema::WORK_FAILURE_MEMORY);
  EXPECT_TRUE(submit_and_wait(first.leases(1)).accepted());
  const schema::WorkGrant second = request_work(0, 1, bob);
  EXPECT_EQ(second.leases(0).group(), first.leases(0).group());
  report_failure(second.leases(0), bob, schema::WORK_FAILURE_MEMORY);
  EXPECT_EQ(misbehaved(), "");
  ASSERT_EQ(set_aside_.size(), 1u);
  EXPECT_EQ(set_aside_[0].problem, first.leases(0).problem().id());
  EXPECT_EQ(set_aside_[0].reason, "out of memory");
  EXPECT_EQ(set_aside_[0].detail, "because\\nof this");
  open(0);
  EXPECT_NE(request_work(0, 1, ada).leases(0).group(), first.leases(0).group());
  EXPECT_EQ(desk_->counts()->leases.set_aside.at("out of memory"), 1u);
}

// Non-finite log-probabilities are the policy's fault. The desk keeps the problems, and stops leases for the policy
// after reports of two workers.
TEST_F(DeskTest, NoProblemIsSetAsideBecauseOfAPolicy) {
  open(0);
  const WorkerId ada{1}, bob{2}, carol{3};
  const schema::WorkGrant grant_of_ada = request_work(0, 2, ada), grant_of_bob = request_work(0, 1, bob);
  ASSERT_EQ(grant_of_ada.leases_size(), 2);
  ASSERT_EQ(grant_of_bob.leases_size(), 1);
  for (const schema::Lease& lease : grant_of_ada.leases()) report_failure(lease, ada, schema::WORK_FAILURE_GENERATION);
  EXPECT_EQ(request_work(0, 2, ada).leases_size(), 0) << "it would fail again";
  EXPECT_TRUE(unusable_.empty()) << "one worker's word";
  const schema::WorkGrant again = request_work(0, 1, bob);
  ASSERT_EQ(again.leases_size(), 1) << "others go on";
  EXPECT_EQ(again.leases(0).group(), grant_of_ada.leases(0).group());
  report_failure(again.leases(0), bob, schema::WORK_FAILURE_GENERATION);
  EXPECT_EQ(request_work(0, 2, carol).leases_size(), 0);
  EXPECT_EQ(misbehaved(), "");
  ASSERT_EQ(unusable_.size(), 1u);
  EXPECT_EQ(unusable_[0].version, Version{0});
  EXPECT_EQ(unusable_[0].workers, (std::vector{ada, bob}));
  EXPECT_TRUE(set_aside_.empty());
  // The next version gets the same problems.
  desk_->finish_publishing(Version{1}, digest_);
  const schema::WorkGrant later = request_work(1, 2, ada);
  ASSERT_EQ(later.leases_size(), 2);
  EXPECT_EQ(later.leases(0).group(), grant_of_ada.leases(0).group());
  EXPECT_TRUE(submit_and_wait(honest_submission(later.leases(0), ada), ada).accepted());
}

TEST_F(DeskTest, ARunThatNoWorkerCanGenerateForEndsWithTheReason) {
  options_.stuck_max = {};
  open(0);
  const schema::WorkGrant grant = request_work(0, 1);
  report_failure(grant.leases(0), WorkerId{1}, schema::WORK_FAILURE_GENERATION);
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_FALSE(batch);
  EXPECT_EQ(batch.error().code, Code::kInvalid);
  EXPECT_NE(batch.error().detail.find("no worker can generate with version 0"), std::string::npos)
      << batch.error().detail;
  EXPECT_EQ(unusable_.size(), 1u);
}

TEST_F(DeskTest, PromptsThatNoWorkerCouldTakeAreNotHandedOut) {
  shape_.positions_max = checker_options_.positions_max = 8 + 5;  // "12+34=" has six tokens, "1+34=" five
  adapter_ = *data_plane::make_adapter("arithmetic", R"({"operations":["+"]})", 1);
  open(0);
  const schema::WorkGrant grant = request_work(0, 4);
  for (const schema::Lease& lease : grant.leases()) EXPECT_LE(lease.problem().prompt().size(), 5u);
  (void)desk_->counts();
  const std::lock_guard lock(mutex_);
  ASSERT_GT(set_aside_.size(), 0u);
  EXPECT_EQ(set_aside_[0].reason, "prompt cannot be used");
  EXPECT_NE(set_aside_[0].detail.find("expected 1 to 5"), std::string::npos) << set_aside_[0].detail;
}

TEST_F(DeskTest, ARunWhoseGroupsAllFailEndsWithTheReason) {
  shape_.positions_max = checker_options_.positions_max = 9;
  open(0);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(request_work(0, 4).leases_size(), 0);
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_FALSE(batch);
  EXPECT_EQ(batch.error().code, Code::kInvalid);
  EXPECT_NE(batch.error().detail.find("prompt cannot be used"), std::string::npos) << batch.error().detail;
}

TEST(ConductTest, AWorkerIsToBlameOnlyWhereOthersGetOn) {
  MisconductTracker misconduct;
  const WorkerId ada{1}, bob{2};
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(misconduct.record_failure(ada));  // the task may be at fault
  misconduct.record_accepted(bob);
  EXPECT_TRUE(misconduct.record_failure(ada));
  misconduct.record_accepted(ada);
  for (int i = 0; i < 7; ++i) EXPECT_FALSE(misconduct.record_failure(ada));
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(misconduct.record_malformed(bob));
  for (int i = 0; i < 40; ++i) misconduct.record_accepted(bob);  // two are forgiven
  EXPECT_FALSE(misconduct.record_malformed(bob));
  EXPECT_FALSE(misconduct.record_malformed(bob));
  EXPECT_TRUE(misconduct.record_malformed(bob));
}

TEST(WorkerMeterTest, AWorkersSpeedIsMeasuredFromItsSubmissions) {
  using std::chrono::seconds;
  ManualClock clock;
  const auto take_heartbeat = [&](WorkerMeter& meter, double busy_s, std::uint64_t rollouts = 0) {
    schema::Vitals vitals;
    vitals.set_busy_s(busy_s);
    vitals.set_rollouts(rollouts);
    return meter.take_heartbeat(vitals, clock.now());
  };
  WorkerMeter honest, liar, mute, slow;
  for (WorkerMeter* meter : {&honest, &liar, &mute, &slow}) EXPECT_EQ(take_heartbeat(*meter, 0).rollouts, 0);
  clock.advance(seconds(20));
  honest.record_accepted(100, 12);
  EXPECT_EQ(take_heartbeat(honest, 0).rollouts, 0) << "the next heartbeat reports its time";
  const auto progress = take_heartbeat(honest, 10);
  EXPECT_EQ(progress.rollouts, 100);
  EXPECT_EQ(progress.busy_s, 10);
  EXPECT_EQ(take_heartbeat(honest, 10).rollouts, 0);
  liar.record_accepted(100, 12);
  EXPECT_EQ(take_heartbeat(liar, 1e-9, 1'000'000'000).busy_s, 6) << "half of its time with work";
  EXPECT_EQ(liar.total().rollouts, 100);
  slow.record_accepted(100, 12);
  EXPECT_EQ(take_heartbeat(slow, 1e9).busy_s, 20) << "no more than the elapsed time";
  mute.record_accepted(100, 12);
  EXPECT_EQ(take_heartbeat(mute, 0).rollouts, 0);
  clock.advance(seconds(10));
  EXPECT_EQ(take_heartbeat(mute, 0).busy_s, 12);
  honest.record_accepted(10, 3);
  EXPECT_EQ(take_heartbeat(honest, 2).busy_s, 2) << "a new process counts from zero";
  honest.record_turned_away();
  EXPECT_TRUE(take_heartbeat(honest, 2).turned_away);
  EXPECT_FALSE(take_heartbeat(honest, 2).turned_away) << "told once";
  honest.record_without_work(0.5);
  honest.record_without_work(0.25);
  EXPECT_EQ(take_heartbeat(honest, 2).without_work_s, 0.75);
  EXPECT_EQ(take_heartbeat(honest, 2).without_work_s, 0) << "told once";
}

// The batch at which the worker stopped took all that time, and its results are stale.
TEST(WorkerMeterTest, TimeAwayDoesNotCountForAWorkersSpeed) {
  using std::chrono::seconds;
  ManualClock clock;
  WorkerMeter meter;
  const auto take_heartbeat = [&](double busy_s) {
    schema::Vitals vitals;
    vitals.set_busy_s(busy_s);
    return meter.take_heartbeat(vitals, clock.now());
  };
  take_heartbeat(0);
  clock.advance(seconds(2));
  meter.record_accepted(10, 1);
  EXPECT_EQ(take_heartbeat(1).busy_s, 1);
  meter.record_accepted(10, 1);  // the heartbeat that would report its time never came
  clock.advance(seconds(60));
  meter.record_return(clock.now());
  EXPECT_EQ(take_heartbeat(1).rollouts, 0);
  clock.advance(seconds(30));
  EXPECT_EQ(take_heartbeat(92).rollouts, 0) << "30 s more for a stale batch";
  clock.advance(seconds(1));
  meter.record_accepted(10, 1.0);
  const auto progress = take_heartbeat(93);
  EXPECT_EQ(progress.rollouts, 10);
  EXPECT_EQ(progress.busy_s, 1) << "while it had leases";
  clock.advance(seconds(3));
  meter.record_accepted(10, 1);
  EXPECT_EQ(take_heartbeat(95).busy_s, 2) << "its own time, as before";
}

TEST_F(DeskTest, ALostWorkersGroupsAreLeasedAgain) {
  open(0);
  const schema::WorkGrant first = request_work(0, 4);
  ASSERT_EQ(first.leases_size(), 4);
  desk_->on_presence_change({PresenceChange::Kind::kLost, WorkerId{1}});
  const schema::WorkGrant second = request_work(0, 4);
  ASSERT_EQ(second.leases_size(), 4);
  EXPECT_EQ(second.leases(0).group(), first.leases(0).group());
  EXPECT_NE(second.leases(0).id(), first.leases(0).id());
  EXPECT_FALSE(submit_and_wait(first.leases(0)).accepted());
}

TEST_F(DeskTest, AcknowledgedWorkSurvivesAReopenAndARewind) {
  open(0);
  const schema::WorkGrant grant = request_work(0, 3);
  ASSERT_EQ(grant.leases_size(), 3);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(submit_and_wait(grant.leases(i)).accepted());
  auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  ASSERT_TRUE(desk_->consume(0, **batch));
  open(0);  // from a checkpoint before step 0 was trained
  batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  EXPECT_EQ(desk_->counts()->buffer.stored, 6u);
  EXPECT_EQ(desk_->counts()->buffer.consumed, 0u);
}

}  // namespace
}  // namespace echoline::learner
