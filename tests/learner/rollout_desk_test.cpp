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
  const schema::WorkGrant grant = ask(0, 2);
  ASSERT_EQ(grant.leases_size(), 2);
  EXPECT_EQ(grant.leases(0).problem().id(), (*adapter_->problem(grant.leases(0).group())).id());
  EXPECT_TRUE(hand_in(grant.leases(0)).accepted());
  auto early = desk_->wait_batch(0, std::chrono::milliseconds(1));
  ASSERT_TRUE(early);
  EXPECT_FALSE(early->has_value());  // one group of two
  EXPECT_TRUE(hand_in(grant.leases(1)).accepted());
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  EXPECT_EQ((*batch)->groups.size(), 2u);
  EXPECT_TRUE(desk_->consume(0, **batch));
  EXPECT_EQ(accepted_, 4u);
  EXPECT_EQ(desk_->counts()->buffer.consumed, 4u);
}

TEST_F(DeskTest, HandsOutNoMoreThanTheLookaheadAndTheRunAllow) {
  open(0);
  EXPECT_EQ(ask(0, 64).leases_size(), 4);  // two steps of two groups
  const schema::WorkGrant nothing = ask(0, 64);
  EXPECT_EQ(nothing.leases_size(), 0);
  EXPECT_TRUE(turned_away_.empty()) << "it holds all available groups";
  EXPECT_EQ(ask(0, 1, WorkerId{2}).leases_size(), 0);
  EXPECT_EQ(turned_away_, std::vector<std::uint64_t>{2});
  EXPECT_GT(nothing.retry_after_ms(), 0u);
  open(3);  // the last of four steps
  EXPECT_EQ(ask(3, 64).leases_size(), 2);
}

// A released worker gets no more leases, and the desk still accepts its submissions.
TEST_F(DeskTest, AReleasedWorkerSubmitsItsRemainingLeases) {
  open(0);
  const schema::WorkGrant grant = ask(0, 1);
  ASSERT_EQ(grant.leases_size(), 1);
  desk_->on_presence_change({PresenceChange::Kind::kRetired, WorkerId{1}});
  EXPECT_EQ(ask(0, 1).leases_size(), 0);
  (void)desk_->counts();
  EXPECT_TRUE(drained_.empty()) << "it asks while it still holds leases";
  EXPECT_TRUE(hand_in(grant.leases(0)).accepted());
  EXPECT_TRUE(drained_.empty());
  EXPECT_EQ(ask(0, 1).leases_size(), 0);
  (void)desk_->counts();
  EXPECT_EQ(drained_, std::vector<std::uint64_t>{1});
  EXPECT_EQ(ask(0, 1, WorkerId{2}).leases_size(), 1);
  desk_->on_presence_change({PresenceChange::Kind::kBack, WorkerId{1}});
  EXPECT_EQ(ask(0, 1).leases_size(), 1);
}

TEST_F(DeskTest, ALeavingWorkerIsStoppedOnceTheRunHasEnded) {
  open(0);
  ASSERT_EQ(ask(0, 1).leases_size(), 1);
  schema::WorkerMessage message;
  message.mutable_leaving();
  desk_->receive(WorkerId{1}, message.SerializeAsString());
  EXPECT_EQ(ask(0, 1).leases_size(), 0);
  EXPECT_EQ(leaving_, std::vector<std::uint64_t>{1});
  desk_->end_result_requests();
  desk_->receive(WorkerId{1}, message.SerializeAsString());
  EXPECT_TRUE(next_message().has_stop());
  EXPECT_EQ(leaving_.size(), 1u);  // the run has ended, and every worker is stopped
}

// A worker may use a new policy before the learner has ended its publication.
TEST_F(DeskTest, TokensOfAPolicyThatIsBeingPublishedAreTaken) {
  open(0);
  const schema::WorkGrant grant = ask(0, 2);
  const auto newer = [&](int lease) {
    schema::Submission submission = made(grant.leases(lease));
    for (auto& t : *submission.mutable_trajectories()) t.mutable_spans(0)->set_version(1);
    return hand_in(submission);
  };
  EXPECT_EQ(newer(0).reason(), "malformed");
  desk_->begin_publishing(Version{1});
  EXPECT_TRUE(newer(1).accepted());
  EXPECT_EQ(misbehaved(), "");
}

TEST_F(DeskTest, ReturnedLeasesGoToOtherWorkers) {
  open(0);
  const schema::WorkGrant grant = ask(0, 1);
  schema::WorkerMessage message;
  message.mutable_returned()->add_leases(grant.leases(0).id());
  desk_->receive(WorkerId{1}, message.SerializeAsString());
  EXPECT_EQ(ask(0, 1, WorkerId{2}).leases(0).group(), grant.leases(0).group());
  EXPECT_EQ(misbehaved(), "");
}

TEST_F(DeskTest, RefusesAnUnknownVersionAndAForeignDigest) {
  open(0);
  EXPECT_EQ(ask(9, 1).leases_size(), 0);
  digest_[0] = std::byte{8};
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(misbehaved(), "") << "bad memory is no attack";
    const schema::WorkGrant refused = ask(0, 1);
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
  const schema::WorkGrant grant = ask(0, 1);
  ASSERT_EQ(grant.leases_size(), 1);
  ASSERT_TRUE(hand_in(made(grant.leases(0), WorkerId{1}), WorkerId{1}).accepted());
  ASSERT_TRUE(desk_->discard_groups_of(WorkerId{2}));
  EXPECT_EQ(desk_->counts()->buffer.admissible_groups, 1u);
  ASSERT_TRUE(desk_->discard_groups_of(WorkerId{1}));
  const auto counts = desk_->counts();
  EXPECT_EQ(counts->buffer.admissible_groups, 0u);
  EXPECT_EQ(counts->buffer.rejected.at("not of the policy"), grant.leases(0).rollouts());
  EXPECT_EQ(counts->leases.pooled, 1u);
}

// ---- answers of another policy ----

// One step's evidence about one worker: the number of responses, and their difference in nats per token.
std::pair<WorkerId, Scrutiny> off(std::uint64_t worker, double surprise, double dispute, std::uint64_t responses = 8) {
  const auto n = static_cast<double>(responses);
  return {WorkerId{worker}, {responses, surprise * n, dispute * n}};
}

TEST(Credibility, AWorkerWithForeignAnswersIsExpelled) {
  for (const bool surprising : {true, false}) {
    Credibility c;
    const auto liar = off(9, surprising ? 8 : 0, surprising ? 0 : 2);
    for (std::uint64_t step = 1; step < Credibility::kInARow; ++step)
      EXPECT_TRUE(c.judge({off(1, 0.1, 0.2), off(2, -0.2, 0.1), liar}, step).empty());
    const auto verdicts = c.judge({off(1, 0.1, 0.2), off(2, -0.2, 0.1), liar}, Credibility::kInARow);
    ASSERT_EQ(verdicts.size(), 1u);
    EXPECT_EQ(verdicts[0].worker, WorkerId{9});
    EXPECT_NE(verdicts[0].what.find(surprising ? "8.0 nats less likely" : "off by 2.0"), std::string::npos)
        << verdicts[0].what;
  }
}

TEST(Credibility, FewResponsesOrNoOtherWorkersConvictNoWorker) {
  Credibility few, alone, once;
  for (std::uint64_t step = 1; step < 8 * Credibility::kInARow; ++step)
    EXPECT_TRUE(few.judge({off(1, 0, 0), off(2, 0, 0), off(9, 9, 9, 1)}, step).empty()) << step;
  EXPECT_FALSE(few.judge({off(9, 9, 9, 1)}, 24).empty()) << "three times eight";
  for (std::uint64_t step = 1; step < 50; ++step) EXPECT_TRUE(alone.judge({off(1, 0, 0), off(9, 9, 9)}, step).empty());
  for (std::uint64_t step = 1; step < 50; ++step)  // now and then is chance
    EXPECT_TRUE(once.judge({off(1, 0, 0), off(2, 0, 0), off(9, step % 3 ? 9 : 0, 0)}, step).empty());
}

// A policy that changes fast differs from the policy that every worker generated with.
TEST(Credibility, OthersAreTheMeasure) {
  Credibility c;
  for (std::uint64_t step = 1; step < 50; ++step)
    EXPECT_TRUE(c.judge({off(1, 4, 2), off(2, 5, 3), off(3, 3, 2), off(4, 12, 9)}, step).empty());
}

// Submissions for leases of other workers, or of none: the desk tolerates a few, because a worker may mix them up.
TEST_F(DeskTest, LeasesThatItDoesNotHoldAreHeldAgainstAWorker) {
  open(0);
  const schema::WorkGrant grant = ask(0, 1);
  schema::Submission stolen = made(grant.leases(0), WorkerId{2});
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(misbehaved(), "");
    stolen.set_lease(i % 2 ? grant.leases(0).id() : 99);
    EXPECT_FALSE(hand_in(stolen, WorkerId{2}).accepted());
  }
  EXPECT_NE(misbehaved(), "");
  EXPECT_TRUE(hand_in(grant.leases(0)).accepted());
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
  const auto taken = [&](const std::string& text, bool finished) {
    schema::Lease lease;
    lease.set_id(1);
    lease.set_group(1);
    lease.set_rollouts(1);
    lease.set_version(1);
    lease.set_policy_digest(digest_bytes());
    *lease.mutable_problem() = *adapter_->problem(1);
    schema::Submission submission = made(lease);
    schema::Trajectory& t = *submission.mutable_trajectories(0);
    const auto tokens = *tokenizer_.encode(text);
    t.clear_response_tokens();
    t.clear_logprobs();
    for (const model::Token token : tokens)
      t.add_response_tokens(static_cast<std::uint32_t>(token)), t.add_logprobs(-0.5f);
    t.mutable_spans(0)->set_end(static_cast<std::uint32_t>(tokens.size()));
    t.set_finished(finished);
    t.set_text(stopping.answer(tokens));
    const data_plane::Score score = *adapter_->score(lease.problem(), t.text());
    t.set_reward(score.reward);
    t.set_correct(score.correct);
    t.clear_components();
    for (const auto& [name, value] : score.components) (*t.mutable_components())[name] = value;
    const auto refused = checker.refusal(submission);
    return refused ? refused->detail : std::string("taken");
  };
  EXPECT_EQ(taken("12!?", true), "taken");
  EXPECT_EQ(taken("12345678", false), "taken") << "cut at the limit";
  EXPECT_NE(taken("12!?", false), "taken");
  EXPECT_NE(taken("12!?3", true), "taken") << "it goes on";
  EXPECT_NE(taken("12!", true), "taken");
}

// The fifth malformed message expels, as for other forms. None of it is stored.
TEST_F(DeskTest, MetadataBeyondTheRunsLimitIsRefusedWithTheReason) {
  options_.pacing.staleness.lookahead = 2;
  checker_options_.metadata_max = Bytes{1000};
  open(1);
  const auto with = [&](std::size_t bytes) {
    schema::Submission submission = made(ask(1, 1).leases(0));
    submission.mutable_trajectories(0)->set_metadata_json('"' + std::string(bytes - 2, 'x') + '"');
    return hand_in(submission);
  };
  EXPECT_TRUE(with(1000).accepted());
  for (int i = 1; i <= 5; ++i) {
    EXPECT_TRUE(misbehaved().empty()) << i;
    const schema::SubmissionAck ack = with(1001);
    EXPECT_FALSE(ack.accepted());
    EXPECT_EQ(ack.reason(), "malformed");
  }
  EXPECT_THAT(misbehaved(),
              ::testing::HasSubstr("metadata_json has 1001 bytes, at most 1000 are allowed (rollout.metadata_max)"));
  EXPECT_EQ(desk_->counts()->buffer.stored, 2u);
}

TEST_F(DeskTest, TheDoorRefusesUntrainableSubmissions) {
  options_.pacing.staleness.lookahead = 2;
  struct Case {
    std::string reason;
    bool expelled;
    std::function<void(schema::Trajectory&)> spoil;
  };
  const std::vector<Case> cases = {
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
  std::uint64_t id = 1;
  for (const Case& c : cases) {
    const WorkerId worker{id++};
    const schema::WorkGrant grant = ask(1, 1, worker);
    ASSERT_EQ(grant.leases_size(), 1);
    EXPECT_EQ(grant.leases(0).group(), 0u);  // the group comes back every time
    schema::Submission submission = made(grant.leases(0), worker);
    c.spoil(*submission.mutable_trajectories(1));
    const schema::SubmissionAck ack = hand_in(submission, worker);
    EXPECT_FALSE(ack.accepted());
    EXPECT_EQ(ack.reason(), c.reason) << "case " << id - 2;
    EXPECT_EQ(!misbehaved().empty(), c.expelled) << "case " << id - 2;
  }
  EXPECT_EQ(desk_->counts()->buffer.stored, 0u);
  const schema::WorkGrant honest = ask(1, 1);
  EXPECT_TRUE(hand_in(honest.leases(0)).accepted());
}

// A resumed run has groups that an older version accepted.
TEST_F(DeskTest, StoredUntrainableGroupsAreDroppedOneByOne) {
  const auto sound = checker_options_.vocab_size;
  checker_options_.trainable = {};
  checker_options_.vocab_size = 1'000'000;
  open(0);
  const schema::WorkGrant grant = ask(0, 2);
  ASSERT_EQ(grant.leases_size(), 2);
  schema::Submission bad = made(grant.leases(0));
  bad.mutable_trajectories(1)->set_response_tokens(0, 999'999);
  bad.mutable_trajectories(1)->set_text("");
  EXPECT_TRUE(hand_in(bad).accepted());
  EXPECT_TRUE(hand_in(grant.leases(1)).accepted());
  checker_options_.vocab_size = sound;
  checker_options_.trainable = [this](const schema::Trajectory& t) { return check_trainable(t, shape_); };
  open(0);
  EXPECT_FALSE((*desk_->wait_batch(0, std::chrono::milliseconds(100))).has_value());
  EXPECT_EQ(desk_->counts()->buffer.rejected.at("not trainable"), 2u);
  const schema::WorkGrant again = ask(0, 1);
  EXPECT_EQ(again.leases(0).group(), grant.leases(0).group());
  EXPECT_TRUE(hand_in(again.leases(0)).accepted());
  const auto batch = desk_->wait_batch(0, kWait);
  ASSERT_TRUE(batch && batch->has_value());
  for (const auto& group : (*batch)->groups)
    for (const schema::Trajectory& t : group.trajectories) EXPECT_TRUE(check_trainable(t, shape_));
}

TEST_F(DeskTest, AGroupThatFailsTwiceIsSetAsideForGood) {
  open(0);
  const WorkerId ada{1}, bob{2};
  const schema::WorkGrant first = ask(0, 2, ada);
  ASSERT_EQ(first.leases_size(), 2);
  EXPECT_GT(first.progress_every_ms(), 0u);
  give_back(first.leases(0), ada, schema::WORK_FAILURE_MEMORY);
  EXPECT_TRUE(hand_in(first.leases(1)).accepted());
  const schema::WorkGrant second = ask(0, 1, bob);
  EXPECT_EQ(second.leases(0).group(), first.leases(0).group());
  give_back(second.leases(0), bob, schema::WORK_FAILURE_MEMORY);
  EXPECT_EQ(misbehaved(), "");
  ASSERT_EQ(set_aside_.size(), 1u);
  EXPECT_EQ(set_aside_[0].problem, first.leases(0).problem().id());
  EXPECT_EQ(set_aside_[0].reason, "out of memory");
  EXPECT_EQ(set_aside_[0].detail, "because\\nof this");
  open(0);
  EXPECT_NE(ask(0, 1, ada).leases(0).group(), first.leases(0).group());
  EXPECT_EQ(desk_->counts()->leases.set_aside.at("out of memory"), 1u);
}

// Non-finite log-probabilities are the policy's fault. The desk keeps the problems, and stops leases for the policy
// after reports of two workers.
TEST_F(DeskTest, NoProblemIsSetAsideBecauseOfAPolicy) {
  open(0);
  const WorkerId ada{1}, bob{2}, carol{3};
  const schema::WorkGrant of_ada = ask(0, 2, ada), of_bob = ask(0, 1, bob);
  ASSERT_EQ(of_ada.leases_size(), 2);
  ASSERT_EQ(of_bob.leases_size(), 1);
  for (const schema::Lease& lease : of_ada.leases()) give_back(lease, ada, schema::WORK_FAILURE_GENERATION);
  EXPECT_EQ(ask(0, 2, ada).leases_size(), 0) << "it would fail again";
  EXPECT_TRUE(unusable_.empty()) << "one worker's word";
  const schema::WorkGrant again = ask(0, 1, bob);
  ASSERT_EQ(again.leases_size(), 1) << "others go on";
  EXPECT_EQ(again.leases(0).group(), of_ada.leases(0).group());
  give_back(again.leases(0), bob, schema::WORK_FAILURE_GENERATION);
  EXPECT_EQ(ask(0, 2, carol).leases_size(), 0);
  EXPECT_EQ(misbehaved(), "");
  ASSERT_EQ(unusable_.size(), 1u);
  EXPECT_EQ(unusable_[0].version, Version{0});
  EXPECT_EQ(unusable_[0].workers, (std::vector{ada, bob}));
  EXPECT_TRUE(set_aside_.empty());
  // The next version gets the same problems.
  desk_->finish_publishing(Version{1}, digest_);
  const schema::WorkGrant later = ask(1, 2, ada);
  ASSERT_EQ(later.leases_size(), 2);
  EXPECT_EQ(later.leases(0).group(), of_ada.leases(0).group());
  EXPECT_TRUE(hand_in(made(later.leases(0), ada), ada).accepted());
}

TEST_F(DeskTest, ARunThatNoWorkerCanGenerateForEndsWithTheReason) {
  options_.stuck_max = {};
  open(0);
  const schema::WorkGrant grant = ask(0, 1);
  give_back(grant.leases(0), WorkerId{1}, schema::WORK_FAILURE_GENERATION);
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
  const schema::WorkGrant grant = ask(0, 4);
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
  for (int i = 0; i < 100; ++i) EXPECT_EQ(ask(0, 4).leases_size(), 0);
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
  const auto heard = [&](WorkerMeter& meter, double busy_s, std::uint64_t rollouts = 0) {
    schema::Vitals vitals;
    vitals.set_busy_s(busy_s);
    vitals.set_rollouts(rollouts);
    return meter.take_heartbeat(vitals, clock.now());
  };
  WorkerMeter honest, liar, mute, slow;
  for (WorkerMeter* meter : {&honest, &liar, &mute, &slow}) EXPECT_EQ(heard(*meter, 0).rollouts, 0);
  clock.advance(seconds(20));
  honest.record_accepted(100, 12);
  EXPECT_EQ(heard(honest, 0).rollouts, 0) << "the next heartbeat reports its time";
  const auto one = heard(honest, 10);
  EXPECT_EQ(one.rollouts, 100);
  EXPECT_EQ(one.busy_s, 10);
  EXPECT_EQ(heard(honest, 10).rollouts, 0);
  liar.record_accepted(100, 12);
  EXPECT_EQ(heard(liar, 1e-9, 1'000'000'000).busy_s, 6) << "half of its time with work";
  EXPECT_EQ(liar.total().rollouts, 100);
  slow.record_accepted(100, 12);
  EXPECT_EQ(heard(slow, 1e9).busy_s, 20) << "no more than the elapsed time";
  mute.record_accepted(100, 12);
  EXPECT_EQ(heard(mute, 0).rollouts, 0);
  clock.advance(seconds(10));
  EXPECT_EQ(heard(mute, 0).busy_s, 12);
  honest.record_accepted(10, 3);
  EXPECT_EQ(heard(honest, 2).busy_s, 2) << "a new process counts from zero";
  honest.record_turned_away();
  EXPECT_TRUE(heard(honest, 2).turned_away);
  EXPECT_FALSE(heard(honest, 2).turned_away) << "told once";
}

// The batch at which the worker stopped took all that time, and its results are stale.
TEST(WorkerMeterTest, TimeAwayDoesNotCountForAWorkersSpeed) {
  using std::chrono::seconds;
  ManualClock clock;
  WorkerMeter meter;
  const auto heard = [&](double busy_s) {
    schema::Vitals vitals;
    vitals.set_busy_s(busy_s);
    return meter.take_heartbeat(vitals, clock.now());
  };
  heard(0);
  clock.advance(seconds(2));
  meter.record_accepted(10, 1);
  EXPECT_EQ(heard(1).busy_s, 1);
  meter.record_accepted(10, 1);  // the heartbeat that would tell of it never came
  clock.advance(seconds(60));
  meter.record_return(clock.now());
  EXPECT_EQ(heard(1).rollouts, 0);
  clock.advance(seconds(30));
  EXPECT_EQ(heard(92).rollouts, 0) << "30 s more for a stale batch";
  clock.advance(seconds(1));
  meter.record_accepted(10, 1.0);
  const auto back = heard(93);
  EXPECT_EQ(back.rollouts, 10);
  EXPECT_EQ(back.busy_s, 1) << "while it had leases";
  clock.advance(seconds(3));
  meter.record_accepted(10, 1);
  EXPECT_EQ(heard(95).busy_s, 2) << "its own time, as before";
}

TEST_F(DeskTest, ALostWorkersGroupsAreLeasedAgain) {
  open(0);
  const schema::WorkGrant first = ask(0, 4);
  ASSERT_EQ(first.leases_size(), 4);
  desk_->on_presence_change({PresenceChange::Kind::kLost, WorkerId{1}});
  const schema::WorkGrant second = ask(0, 4);
  ASSERT_EQ(second.leases_size(), 4);
  EXPECT_EQ(second.leases(0).group(), first.leases(0).group());
  EXPECT_NE(second.leases(0).id(), first.leases(0).id());
  EXPECT_FALSE(hand_in(first.leases(0)).accepted());
}

TEST_F(DeskTest, AcknowledgedWorkSurvivesAReopenAndARewind) {
  open(0);
  const schema::WorkGrant grant = ask(0, 3);
  ASSERT_EQ(grant.leases_size(), 3);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(hand_in(grant.leases(i)).accepted());
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
