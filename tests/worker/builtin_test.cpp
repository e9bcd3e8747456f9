// The built-in engine: sequences in and out of a running batch, and a policy that changes in between.
#include "worker/engines/builtin.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>

#include "delta/patch.hpp"
#include "model/weights.hpp"
#include "overlay/sizes.hpp"
#include "tests/delta/in_memory.hpp"

namespace echoline::worker {
namespace {

constexpr Duration kSlice = std::chrono::milliseconds(1);

class BuiltinTest : public ::testing::Test {
 protected:
  BuiltinTest() : config_(*model::preset("tiny-64")) {
    BuiltinOptions options;
    options.model = config_;
    options.rows_max = 4;
    engine_ = *make_builtin_engine(options);
    install(3, 1);
  }
  void install(std::uint64_t version, std::uint64_t seed) {
    delta::OwnedState policy = *model::export_policy(**model::init(config_, seed));
    overlay::Publication p;
    p.version = Version{version};
    p.policy_digest = policy.digest().bytes;
    p.payload = overlay::Payload({overlay::Slice(*delta::encode_snapshot(policy.view()))});
    ASSERT_TRUE(engine_->install(p));
    EXPECT_EQ(engine_->version(), Version{version});
  }
  std::map<std::uint64_t, Result<Response>> finish() {
    std::map<std::uint64_t, Result<Response>> responses;
    while (engine_->sequences_in_progress() > 0)
      for (Outcome& outcome : engine_->poll(kSlice)) responses.emplace(outcome.id, std::move(outcome.response));
    return responses;
  }

  model::ModelConfig config_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(BuiltinTest, MoreThanFitAtOnceAreAllAnswered) {
  for (std::uint64_t id = 0; id < 10; ++id) engine_->submit({id, {1, 2, 3}, 5 + static_cast<std::int64_t>(id), id});
  EXPECT_EQ(engine_->sequences_in_progress(), 10u);
  EXPECT_EQ(engine_->capacity(), 4u);
  const std::uint64_t before = engine_->progress();
  const auto responses = finish();
  ASSERT_EQ(responses.size(), 10u);
  EXPECT_GT(engine_->progress(), before);
  for (const auto& [id, response] : responses) {
    ASSERT_TRUE(response);
    EXPECT_EQ(response->tokens.size(), 5 + id);
    EXPECT_EQ(response->logprobs.size(), 5 + id);
    ASSERT_EQ(response->spans.size(), 1u);
    EXPECT_EQ(response->spans[0].version, Version{3});
    EXPECT_EQ(response->spans[0].end, 5 + id);
    EXPECT_FALSE(response->ended);
  }
}

TEST_F(BuiltinTest, TellsTheExpertsOfAMixtureIfAsked) {
  config_ = *model::preset("tiny-moe");
  for (const bool records : {true, false}) {
    BuiltinOptions options;
    options.model = config_;
    options.records_experts = records;
    engine_ = *make_builtin_engine(options);
    install(3, 1);
    engine_->submit({1, {1, 2, 3}, 5, 1});
    const auto responses = finish();
    const data_plane::RoutedExperts& experts = responses.at(1)->experts;
    EXPECT_EQ(experts.tokens(), records ? 8u : 0u);
    if (!records) continue;
    EXPECT_EQ(experts.layers, 3u);
    EXPECT_EQ(experts.per_token, 2u);
    EXPECT_GE(experts.values.front(), 0);
    EXPECT_EQ(experts.values.back(), -1) << "the last token is no input";
  }
}

TEST_F(BuiltinTest, SequencesUnderWayGoOnUnderTheNewPolicy) {
  engine_->submit({7, {1, 2, 3}, 40, 1});
  while (engine_->progress() < 5) engine_->poll(Duration{});
  install(4, 2);
  const auto responses = finish();
  const Response& response = *responses.at(7);
  ASSERT_EQ(response.spans.size(), 2u);
  EXPECT_EQ(response.spans[0].version, Version{3});
  EXPECT_EQ(response.spans[1].version, Version{4});
  EXPECT_GT(response.spans[0].end, 0u);
  EXPECT_LT(response.spans[0].end, 40u);
  EXPECT_EQ(response.spans[1].end, 40u);
}

TEST_F(BuiltinTest, AWaitingPolicyEndsAPollAfterTheCurrentToken) {
  std::atomic<bool> policy_waits = true;
  BuiltinOptions options;
  options.model = config_;
  options.policy_waits = &policy_waits;
  engine_ = *make_builtin_engine(options);
  install(1, 1);
  engine_->submit({1, {1, 2, 3}, 40, 1});
  const std::uint64_t before = engine_->progress();
  EXPECT_TRUE(engine_->poll(std::chrono::hours(1)).empty());
  EXPECT_EQ(engine_->progress(), before + 1);
  policy_waits = false;
  const auto outcomes = engine_->poll(std::chrono::hours(1));
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_EQ(outcomes[0].response->tokens.size(), 40u);
}

TEST_F(BuiltinTest, ADeviceThatIsNotThereIsAnError) {
  BuiltinOptions options;
  options.model = *model::preset("tiny-64");
  options.device = "gpu";
  EXPECT_EQ(make_builtin_engine(options).error().code, Code::kInvalid);
  options.device = "cuda:99";
  EXPECT_EQ(make_builtin_engine(options).error().code, Code::kUnavailable);
}

TEST_F(BuiltinTest, AStopStringEndsAResponse) {
  BuiltinOptions options;
  options.model = config_;
  options.ends = [](std::span<const model::Token> response) { return response.size() == 3; };
  engine_ = *make_builtin_engine(options);
  install(1, 1);
  engine_->submit({1, {1, 2, 3}, 10, 1});
  const auto responses = finish();
  EXPECT_EQ(responses.at(1)->tokens.size(), 3u);
  EXPECT_TRUE(responses.at(1)->ended);
}

TEST_F(BuiltinTest, ASequenceMayHaveSettingsOfItsOwn) {
  install(1, 1);
  Sequence greedy{.id = 1, .prompt = {1, 2, 3}, .tokens_max = 6, .seed = 1};
  greedy.sampling.emplace().temperature = 0;
  Sequence again = greedy;
  again.id = 2;
  again.seed = 2;
  engine_->submit(greedy);
  engine_->submit(again);
  engine_->submit({3, {1, 2, 3}, 6, 1});
  auto responses = finish();
  const std::vector<model::Token> tokens = responses.at(1)->tokens;
  ASSERT_EQ(tokens.size(), 6u);
  EXPECT_EQ(responses.at(2)->tokens, tokens);
  EXPECT_NE(responses.at(3)->tokens, tokens);  // the run's settings
  greedy.sampling->end_tokens = {tokens[1]};
  again.sampling->ends = [](std::span<const model::Token> response) { return response.size() == 4; };
  engine_->submit(greedy);
  engine_->submit(again);
  responses = finish();
  EXPECT_LE(responses.at(1)->tokens.size(), 2u);
  EXPECT_TRUE(responses.at(1)->ended);
  EXPECT_EQ(responses.at(2)->tokens.size(), 4u);
}

// Finite weights with non-finite log-probabilities: no sequence is to blame.
TEST_F(BuiltinTest, APolicyThatDivergedIsSaidToBeTheReason) {
  delta::OwnedState policy = *model::init_policy(config_, 1);
  for (std::size_t i = 0; i < policy.size(); ++i) {
    if (!policy.name(i).ends_with("up_proj.weight")) continue;
    const std::uint16_t huge = 0x7f00;
    for (std::span<std::byte> bytes = policy.mutable_bytes(i); !bytes.empty(); bytes = bytes.subspan(2))
      std::memcpy(bytes.data(), &huge, 2);
  }
  policy.seal();
  overlay::Publication p;
  p.version = Version{4};
  p.policy_digest = policy.digest().bytes;
  p.payload = overlay::Payload({overlay::Slice(*delta::encode_snapshot(policy.view()))});
  ASSERT_TRUE(engine_->install(p));
  engine_->submit({1, {1, 2, 3}, 5, 1});
  engine_->submit({2, {}, 5, 1});
  std::map<std::uint64_t, bool> caused_by_policy;
  while (engine_->sequences_in_progress() > 0)
    for (const Outcome& outcome : engine_->poll(kSlice)) {
      EXPECT_FALSE(outcome.response);
      caused_by_policy[outcome.id] = outcome.caused_by_policy;
    }
  EXPECT_EQ(caused_by_policy, (std::map<std::uint64_t, bool>{{1, true}, {2, false}}));
}

TEST_F(BuiltinTest, AnInvalidRequestSaysWhyAndHurtsNoOther) {
  engine_->submit({1, {}, 5, 1});
  engine_->submit({2, {1, 2}, 5, 1});
  engine_->submit({3, {static_cast<model::Token>(config_.vocab_size)}, 5, 1});
  engine_->submit({4, {1, 2}, 5, 1});
  engine_->abort(4);
  const auto responses = finish();
  ASSERT_EQ(responses.size(), 3u);
  EXPECT_EQ(responses.at(1).error().code, Code::kInvalid);
  EXPECT_EQ(responses.at(2)->tokens.size(), 5u);
  EXPECT_EQ(responses.at(3).error().code, Code::kInvalid);
}

}  // namespace
}  // namespace echoline::worker
