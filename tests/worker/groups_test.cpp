// A worker's groups without a network or an engine: a failure concerns its own group, and a whole group is scored.
#include "worker/groups.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

#include "data_plane/trajectory.hpp"

namespace echoline::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr std::uint32_t kGroup = 4;
const TimePoint kNow = TimePoint(std::chrono::seconds(100));

class FaultyAdapter final : public data_plane::Adapter {
 public:
  explicit FaultyAdapter(std::unique_ptr<data_plane::Adapter> base) : base_(std::move(base)) {}
  std::string_view name() const override { return "broken"; }
  Result<schema::Problem> problem(std::uint64_t index) const override { return base_->problem(index); }
  std::vector<schema::Problem> evaluation() const override { return {}; }
  Result<data_plane::Score> score(const schema::Problem& problem, std::string_view response) const override {
    if (problem.id() == "unscorable") throw std::runtime_error("no verdict");
    if (problem.id() == "ungradable") return fail(Code::kUnavailable, "grade", "why not");
    return base_->score(problem, response);
  }
  std::optional<std::string> demonstration(const schema::Problem&) const override { return std::nullopt; }

 private:
  std::unique_ptr<data_plane::Adapter> base_;
};

// Asks for two numbers, one after the other. Answers only when the test calls for it.
class TwoQuestions final : public data_plane::Adapter {
 public:
  struct Thought {
    data_plane::Episode::StepHandler done;
    data_plane::Step step;
  };
  class Conversation final : public data_plane::Episode {
   public:
    Conversation(std::vector<Thought>& thoughts, std::uint64_t seed) : thoughts_(thoughts), seed_(seed) {}
    void step(std::string response, StepHandler done) override {
      data_plane::Step step;
      step.done = ++turns_ == 2;
      step.score = {response == "7" ? 1.0 : 0.0, {{"right", 1.0}}, response == "7"};
      if (!step.done) step.observation = std::to_string(seed_ % 10);
      thoughts_.push_back({std::move(done), std::move(step)});
    }
    data_plane::Score cut() override { return {-2, {}, false}; }

   private:
    std::vector<Thought>& thoughts_;
    std::uint64_t seed_;
    int turns_ = 0;
  };

  explicit TwoQuestions(std::vector<Thought>& thoughts) : thoughts_(thoughts) {}
  std::string_view name() const override { return "two"; }
  Result<schema::Problem> problem(std::uint64_t) const override { return schema::Problem(); }
  std::vector<schema::Problem> evaluation() const override { return {}; }
  Result<std::unique_ptr<data_plane::Episode>> begin(const schema::Problem&, std::uint64_t seed) const override {
    return std::unique_ptr<data_plane::Episode>(std::make_unique<Conversation>(thoughts_, seed));
  }
  std::optional<std::string> demonstration(const schema::Problem&) const override { return std::nullopt; }

 private:
  std::vector<Thought>& thoughts_;
};

class GroupsTest : public ::testing::Test {
 protected:
  GroupsTest() {
    schema::RunSpec spec;
    spec.set_seed(5);
    spec.set_model_config_json(model::preset("tiny-64")->to_json());
    spec.set_tokenizer_json(model::Tokenizer::characters(model::kCharacterAlphabet)->to_json());
    spec.add_eos(static_cast<std::uint32_t>(*model::Tokenizer::characters(model::kCharacterAlphabet)->end_of_text()));
    spec.set_prompt_json(R"({"text": "{prompt}"})");
    spec.set_adapter_name("arithmetic");
    spec.set_response_tokens_max(3);
    task_ = *make_task(std::move(spec));
    task_.adapter = std::make_unique<FaultyAdapter>(std::move(task_.adapter));
    groups_.emplace(task_, WorkerId{9});
  }

  static schema::Lease lease(std::uint64_t id, const std::string& prompt, const std::string& problem = "p") {
    schema::Lease lease;
    lease.set_id(id);
    lease.set_group(id);
    lease.set_version(3);
    lease.set_rollouts(kGroup);
    lease.set_policy_digest("d");
    lease.mutable_problem()->set_id(problem);
    lease.mutable_problem()->set_prompt(prompt);
    lease.mutable_problem()->set_reference("7");
    return lease;
  }
  std::vector<Sequence> begin(const schema::Lease& lease) {
    auto begun = groups_->begin(lease, kNow);
    return std::get<std::vector<Sequence>>(std::move(begun));
  }
  std::optional<Groups::Ended> take(Outcome outcome) {
    groups_->on_outcome(std::move(outcome));
    Groups::Advance advance = groups_->advance();
    EXPECT_THAT(advance.next, IsEmpty());
    EXPECT_LE(advance.ended.size(), 1u);
    if (advance.ended.empty()) return std::nullopt;
    return std::move(advance.ended.front());
  }
  Outcome answered(std::uint64_t id, const std::string& text = "7") const {
    Response r{*task_.phrasing->tokenizer().encode(text), {}, {}, true};
    r.tokens.push_back(task_.phrasing->eos().front());
    r.logprobs.assign(r.tokens.size(), -0.5f);
    r.spans = {{Version{3}, 1}, {Version{5}, r.tokens.size()}};
    return {id, std::move(r)};
  }

  Task task_;
  std::optional<Groups> groups_;
};

TEST_F(GroupsTest, AGroupIsHandedInWhenItsLastResponseIsThere) {
  const auto sequences = begin(lease(1, "3+4="));
  ASSERT_EQ(sequences.size(), kGroup);
  std::set<std::uint64_t> seeds;
  for (const Sequence& s : sequences) {
    EXPECT_EQ(s.prompt, *task_.phrasing->prompt("3+4="));
    EXPECT_EQ(s.tokens_max, 3);
    seeds.insert(s.seed);
  }
  EXPECT_EQ(seeds.size(), kGroup);
  const auto others = begin(lease(2, "1+1="));
  EXPECT_THAT(groups_->lease_ids(), ElementsAre(1u, 2u));
  EXPECT_EQ(groups_->rollouts(), 2u * kGroup);
  for (const std::size_t member : {2u, 0u, 3u}) EXPECT_FALSE(take(answered(sequences[member].id)));
  auto ended = take(answered(sequences[1].id, "8"));
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->begun, kNow);
  EXPECT_THAT(ended->abandoned, IsEmpty());
  const auto& submission = std::get<schema::Submission>(ended->result);
  ASSERT_EQ(submission.trajectories_size(), static_cast<int>(kGroup));
  for (std::uint32_t member = 0; member < kGroup; ++member) {
    const schema::Trajectory& t = submission.trajectories(static_cast<int>(member));
    EXPECT_TRUE(data_plane::check(t)) << data_plane::check(t).error().message();
    EXPECT_EQ(t.member(), member);
    EXPECT_EQ(t.id(), fmt::format("1/{}", member));
    EXPECT_EQ(t.worker(), 9u);
    EXPECT_EQ(t.correct(), member != 1);
    EXPECT_EQ(data_plane::oldest_version(t), Version{3});
    ASSERT_EQ(t.spans_size(), 2);
    EXPECT_EQ(t.spans(1).begin(), 1u);
    EXPECT_EQ(t.spans(1).version(), 5u);
  }
  EXPECT_THAT(groups_->lease_ids(), ElementsAre(2u));
}

// A lease of a Tinker client has its own prompt and settings.
TEST_F(GroupsTest, AClientsLeaseHasItsOwnPromptAndSettings) {
  schema::Lease sample = lease(1, "ignored");
  sample.set_unscored(true);
  sample.set_rollouts(2);
  schema::Sampling& sampling = *sample.mutable_sampling();
  for (const std::uint32_t token : {4, 5, 6}) sampling.add_prompt_tokens(token);
  sampling.set_tokens_max(2);
  sampling.set_temperature(0.5);
  sampling.set_top_p(0.9);
  sampling.set_top_k(7);
  sampling.add_end_tokens(8);
  sampling.add_stop("12");
  sampling.set_seed(40);
  const auto sequences = begin(sample);
  ASSERT_EQ(sequences.size(), 2u);
  EXPECT_THAT(sequences[0].prompt, ElementsAre(4, 5, 6));
  EXPECT_EQ(sequences[0].tokens_max, 2);
  ASSERT_TRUE(sequences[0].sampling);
  EXPECT_EQ(sequences[0].sampling->temperature, 0.5);
  EXPECT_EQ(sequences[0].sampling->top_p, 0.9);
  EXPECT_EQ(sequences[0].sampling->top_k, 7);
  EXPECT_THAT(sequences[0].sampling->end_tokens, ElementsAre(8));
  const auto tokens = *task_.phrasing->tokenizer().encode("312");
  EXPECT_FALSE(sequences[0].sampling->ends(std::span(tokens).first(2)));
  EXPECT_TRUE(sequences[0].sampling->ends(tokens));
  EXPECT_NE(sequences[0].seed, sequences[1].seed);
  // The second sample draws what the first one of a lease with the next seed does.
  schema::Lease next = sample;
  next.set_id(2);
  next.mutable_sampling()->set_seed(41);
  EXPECT_EQ(begin(next)[0].seed, sequences[1].seed);
}

TEST_F(GroupsTest, OneBadGroupDoesNotTakeTheOthersWithIt) {
  const auto bad = groups_->begin(lease(1, "\xc3\xa9"), kNow);
  EXPECT_EQ(std::get<schema::WorkFailed>(bad).failure(), schema::WORK_FAILURE_PROMPT);
  EXPECT_TRUE(groups_->empty());
  const auto good = begin(lease(2, "1")), memory = begin(lease(3, "2")), broken = begin(lease(4, "3")),
             unscorable = begin(lease(5, "4", "unscorable")), too_long = begin(lease(6, "5"));
  EXPECT_FALSE(take(answered(memory[1].id)));
  const auto failure = [&](std::uint64_t id, Code code) {
    auto ended = take({id, fail(code, "generate", "why")});
    EXPECT_THAT(ended->abandoned.size(), kGroup - (id == memory[0].id ? 2 : 1));
    EXPECT_THAT(std::get<schema::WorkFailed>(ended->result).detail(), HasSubstr("why"));
    return std::get<schema::WorkFailed>(ended->result).failure();
  };
  EXPECT_EQ(failure(memory[0].id, Code::kExhausted), schema::WORK_FAILURE_MEMORY);
  EXPECT_EQ(failure(broken[3].id, Code::kCorrupt), schema::WORK_FAILURE_UNKNOWN);
  EXPECT_EQ(failure(too_long[0].id, Code::kInvalid), schema::WORK_FAILURE_PROMPT);
  const auto diverged = begin(lease(8, "6"));
  EXPECT_EQ(std::get<schema::WorkFailed>(take({diverged[0].id, fail(Code::kCorrupt, "generate", "why"), true})->result)
                .failure(),
            schema::WORK_FAILURE_GENERATION);
  EXPECT_FALSE(take(answered(memory[2].id))) << "an abandoned sequence may still end";
  std::optional<Groups::Ended> ended;
  for (const auto& sequences : {unscorable, begin(lease(7, "4", "ungradable"))}) {
    ended = take(answered(sequences[0].id));
    ASSERT_TRUE(ended);
    EXPECT_EQ(std::get<schema::WorkFailed>(ended->result).failure(), schema::WORK_FAILURE_SCORING);
    EXPECT_EQ(ended->abandoned.size(), kGroup - 1);
  }
  for (const Sequence& s : good) ended = take(answered(s.id));
  EXPECT_EQ(std::get<schema::Submission>(ended->result).lease(), 2u);
  EXPECT_TRUE(groups_->empty());
}

TEST_F(GroupsTest, TurnsFollowEachOtherAndWhatThePolicyIsToldIsNotItsOwn) {
  std::vector<TwoQuestions::Thought> thoughts;
  task_.adapter = std::make_unique<TwoQuestions>(thoughts);
  task_.spec.set_response_tokens_max(10);
  task_.spec.set_turn_tokens_max(4);
  const auto sequences = begin(lease(1, "3+4="));
  EXPECT_EQ(sequences[0].tokens_max, 4);
  for (const Sequence& s : sequences) groups_->on_outcome(answered(s.id));
  EXPECT_EQ(groups_->rollouts_in_environment(), kGroup);
  EXPECT_THAT(groups_->advance().next, IsEmpty()) << "the tasks have not answered yet";
  ASSERT_EQ(thoughts.size(), kGroup);
  for (auto& thought : std::exchange(thoughts, {})) thought.done(std::move(thought.step));
  Groups::Advance second = groups_->advance();
  ASSERT_EQ(second.next.size(), kGroup);
  EXPECT_EQ(groups_->rollouts_in_environment(), 0u);
  for (std::uint32_t member = 0; member < kGroup; ++member) {
    const Sequence& s = second.next[member];
    const std::string observation = std::to_string(data_plane::episode_seed(5, 1, member) % 10);
    EXPECT_EQ(task_.phrasing->tokenizer().decode(s.prompt), "3+4=7<|endoftext|>\n" + observation + "\n");
    EXPECT_EQ(s.tokens_max, 4) << "5 of 10 tokens are left";
    EXPECT_NE(s.seed, sequences[member].seed);
    Outcome outcome = answered(s.id, member == 0 ? "8" : "7");
    outcome.response->spans = {{Version{5}, 2}};
    groups_->on_outcome(std::move(outcome));
  }
  for (auto& thought : std::exchange(thoughts, {})) thought.done(std::move(thought.step));
  Groups::Advance last = groups_->advance();
  ASSERT_EQ(last.ended.size(), 1u);
  const auto& submission = std::get<schema::Submission>(last.ended[0].result);
  for (const schema::Trajectory& t : submission.trajectories()) {
    EXPECT_TRUE(data_plane::check(t)) << data_plane::check(t).error().message();
    EXPECT_THAT(t.loss_mask(), ElementsAre(1, 1, 0, 0, 0, 1, 1));
    EXPECT_EQ(t.logprobs(2), 0.0f);
    EXPECT_EQ(t.reward(), t.member() == 0 ? 1.0 : 2.0);
    EXPECT_EQ(t.correct(), t.member() != 0);
    EXPECT_EQ(t.components().at("right"), 2.0);
    EXPECT_TRUE(t.finished());
    ASSERT_EQ(t.spans_size(), 2);
    EXPECT_EQ(t.spans(0).end(), 1u);
    EXPECT_EQ(t.spans(1).end(), 7u);
  }
}

// The engine tells experts of the whole text at every turn. Those of a token's first turn are kept; the last token, and
// a member whose engine tells none, have none.
TEST_F(GroupsTest, ExpertsTravelWithTheTrajectory) {
  std::vector<TwoQuestions::Thought> thoughts;
  task_.adapter = std::make_unique<TwoQuestions>(thoughts);
  task_.spec.set_response_tokens_max(10);
  task_.spec.set_turn_tokens_max(4);
  const auto answer = [&](const Sequence& s, std::int16_t first) {
    Outcome outcome = answered(s.id);
    outcome.response->spans = {{Version{5}, 2}};
    data_plane::RoutedExperts& experts = outcome.response->experts;
    experts = {1, 2, {}};
    for (std::size_t token = 0; token < s.prompt.size() + 1; ++token)  // all but the last
      experts.values.insert(experts.values.end(), {static_cast<std::int16_t>(first + 1), first});
    return outcome;
  };
  const auto sequences = begin(lease(1, "3+4="));
  groups_->on_outcome(answer(sequences[0], 0));
  for (std::size_t member = 1; member < kGroup; ++member) groups_->on_outcome(answered(sequences[member].id));
  for (auto& thought : std::exchange(thoughts, {})) thought.done(std::move(thought.step));
  for (const Sequence& s : groups_->advance().next) {
    Outcome outcome = s.prompt.size() > 0 && s.id == sequences.back().id + 1 ? answer(s, 4) : answered(s.id);
    outcome.response->spans = {{Version{5}, 2}};
    groups_->on_outcome(std::move(outcome));
  }
  for (auto& thought : std::exchange(thoughts, {})) thought.done(std::move(thought.step));
  const auto last = groups_->advance();
  ASSERT_EQ(last.ended.size(), 1u);
  const auto& submission = std::get<schema::Submission>(last.ended[0].result);
  for (const schema::Trajectory& t : submission.trajectories()) {
    EXPECT_TRUE(data_plane::check(t)) << data_plane::check(t).error().message();
    if (t.member() != 0) {
      EXPECT_TRUE(t.routed_experts().empty());
      continue;
    }
    // The prompt of 4, a turn of 2, an observation of 3, and a turn of 2.
    const auto experts = data_plane::unpack_experts(t.routed_experts(), 11);
    ASSERT_TRUE(experts) << experts.error().message();
    EXPECT_THAT(experts->values, ElementsAre(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 4, 5, 4, 5, 4, 5, 4, 5, 4, 5, -1, -1));
  }
}

TEST_F(GroupsTest, AnEpisodeWithoutRoomIsCut) {
  std::vector<TwoQuestions::Thought> thoughts;
  task_.adapter = std::make_unique<TwoQuestions>(thoughts);
  task_.spec.set_response_tokens_max(5);
  for (const Sequence& s : begin(lease(1, "3+4="))) groups_->on_outcome(answered(s.id));
  for (auto& thought : std::exchange(thoughts, {})) thought.done(std::move(thought.step));
  Groups::Advance advance = groups_->advance();
  EXPECT_THAT(advance.next, IsEmpty());
  ASSERT_EQ(advance.ended.size(), 1u);
  const schema::Trajectory& t = std::get<schema::Submission>(advance.ended[0].result).trajectories(0);
  EXPECT_EQ(t.reward(), -1.0);
  EXPECT_EQ(t.response_tokens_size(), 2);
  EXPECT_EQ(t.loss_mask_size(), 0);
  EXPECT_FALSE(t.finished());
}

// A game of two: the policy also plays the opponent, and its tokens as the opponent are not trained on.
class OpponentAdapter final : public data_plane::Adapter {
 public:
  class Game final : public data_plane::QuickEpisode {
   public:
    Result<data_plane::Step> step_now(std::string_view response) override {
      said_.emplace_back(response);
      if (said_.size() == 1) return data_plane::Step{{}, false, {}, PolicyInput("9?")};
      if (said_.size() == 2) return data_plane::Step{{0.5, {}, false}, false, said_[1], {}};
      return data_plane::Step{{said_[2] == "6" ? 1.0 : 0.0, {}, true}, true, {}, {}};
    }

   private:
    std::vector<std::string> said_;
  };
  std::string_view name() const override { return "opposite"; }
  Result<schema::Problem> problem(std::uint64_t) const override { return schema::Problem(); }
  std::vector<schema::Problem> evaluation() const override { return {}; }
  Result<std::unique_ptr<data_plane::Episode>> begin(const schema::Problem&, std::uint64_t) const override {
    return std::unique_ptr<data_plane::Episode>(std::make_unique<Game>());
  }
  std::optional<std::string> demonstration(const schema::Problem&) const override { return std::nullopt; }
};

TEST_F(GroupsTest, SidePromptsAreNotTrainedOn) {
  task_.adapter = std::make_unique<OpponentAdapter>();
  task_.spec.set_response_tokens_max(10);
  task_.spec.set_turn_tokens_max(4);
  const auto text = [&](const Sequence& s) { return task_.phrasing->tokenizer().decode(s.prompt); };
  std::set<std::uint64_t> seeds;
  for (const Sequence& s : begin(lease(1, "3+4="))) seeds.insert(s.seed), groups_->on_outcome(answered(s.id, "7"));
  const auto side_prompt = groups_->advance().next;
  ASSERT_EQ(side_prompt.size(), kGroup);
  for (const Sequence& s : side_prompt) {
    EXPECT_EQ(text(s), "9?") << "a prompt of its own";
    EXPECT_EQ(s.tokens_max, 4);
    seeds.insert(s.seed);
    groups_->on_outcome(answered(s.id, "5"));
  }
  const auto own = groups_->advance().next;
  ASSERT_EQ(own.size(), kGroup);
  for (const Sequence& s : own) {
    EXPECT_EQ(text(s), "3+4=7<|endoftext|>\n5\n");
    seeds.insert(s.seed);
    Outcome outcome = answered(s.id, "6");
    outcome.response->spans = {{Version{5}, 2}};
    groups_->on_outcome(std::move(outcome));
  }
  EXPECT_EQ(seeds.size(), 3 * kGroup) << "every turn and side prompt draws its own random numbers";
  const auto last = groups_->advance();
  ASSERT_EQ(last.ended.size(), 1u);
  for (const schema::Trajectory& t : std::get<schema::Submission>(last.ended[0].result).trajectories()) {
    EXPECT_TRUE(data_plane::check(t)) << data_plane::check(t).error().message();
    EXPECT_EQ(t.text(), "7<|endoftext|>\n5\n6<|endoftext|>");
    EXPECT_THAT(t.loss_mask(), ElementsAre(1, 1, 0, 0, 0, 1, 1));
    EXPECT_EQ(t.reward(), 1.5);
  }
}

TEST_F(GroupsTest, AnAnswerForAForgottenGroupDoesNoHarm) {
  std::vector<TwoQuestions::Thought> thoughts;
  task_.adapter = std::make_unique<TwoQuestions>(thoughts);
  const auto sequences = begin(lease(1, "3+4="));
  for (const Sequence& s : sequences) groups_->on_outcome(answered(s.id));
  EXPECT_THAT(groups_->drop_all(), IsEmpty()) << "none is inside the engine";
  groups_.emplace(task_, WorkerId{9});
  for (auto& thought : thoughts) thought.done(std::move(thought.step));
  EXPECT_THAT(groups_->advance().ended, IsEmpty());
}

TEST_F(GroupsTest, DroppedGroupsAreForgotten) {
  const auto first = begin(lease(1, "1")), second = begin(lease(2, "2"));
  EXPECT_FALSE(take(answered(first[0].id)));
  EXPECT_EQ(groups_->drop_all().size(), 2 * kGroup - 1);
  EXPECT_TRUE(groups_->empty());
  EXPECT_EQ(groups_->rollouts(), 0u);
  EXPECT_FALSE(take(answered(second[0].id)));
  EXPECT_NE(begin(lease(1, "1"))[0].id, first[0].id);
}

// The learner would refuse it, and count it as misconduct.
TEST(Submissions, WithMoreMetadataThanTheRunAllowsAreNotSent) {
  schema::Lease lease;
  lease.set_id(5);
  schema::Submission submission;
  submission.set_lease(5);
  submission.add_trajectories()->set_id("5/0");
  schema::Trajectory& t = *submission.add_trajectories();
  t.set_id("5/1");
  t.set_metadata_json('"' + std::string(98, 'x') + '"');
  EXPECT_TRUE(std::holds_alternative<schema::Submission>(submission_or_failure(lease, submission, Bytes{100})));
  t.set_metadata_json('"' + std::string(99, 'x') + '"');
  const LeaseResult settled = submission_or_failure(lease, submission, Bytes{100});
  const auto& failed = std::get<schema::WorkFailed>(settled);
  EXPECT_EQ(failed.lease(), 5u);
  EXPECT_EQ(failed.failure(), schema::WORK_FAILURE_SIZE);
  EXPECT_EQ(failed.detail(), data_plane::check_metadata_size(t, Bytes{100}).error().detail);
}

}  // namespace
}  // namespace echoline::worker
