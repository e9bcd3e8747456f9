// Facts about a batch without a tensor: its figures, and trajectories that no step could train on.
#include "learner/batch.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "data_plane/routed_experts.hpp"
#include "learner/policy_source.hpp"

namespace echoline::learner {
namespace {

schema::Trajectory trajectory(std::uint64_t group, double reward, std::uint32_t tokens) {
  schema::Trajectory result;
  result.set_group(group);
  result.set_reward(reward);
  result.set_correct(reward > 0);
  result.set_finished(true);
  result.add_prompt_tokens(3);
  result.add_spans();
  for (std::uint32_t i = 0; i < tokens; ++i) result.add_response_tokens(i), result.add_logprobs(-1);
  return result;
}

TEST(BatchTest, FiguresNeedNoTrainer) {
  std::vector<schema::Trajectory> batch{trajectory(1, 1, 2), trajectory(2, 0, 3), trajectory(1, 0.5, 4),
                                        trajectory(2, 0, 5)};
  batch[1].set_finished(false);
  batch[1].add_spans();
  for (const float counts : {1.0f, 0.0f, 0.0f, 1.0f}) batch[2].add_loss_mask(counts);
  EXPECT_EQ(batch_figures(batch),
            nlohmann::json::parse(R"({"reward_mean": 0.375, "accuracy": 0.5, "truncated_fraction": 0.25,
      "mixed_fraction": 0.25, "response_tokens_mean": 3.5, "response_tokens_max": 5.0, "informative_groups": 1,
      "zero_advantage_fraction": 0.5, "response_tokens": 12})"));
}

TEST(BatchTest, UntrainableTrajectoriesAreNamed) {
  model::ModelConfig shape;
  shape.vocab_size = 10;
  shape.positions_max = 5;
  const auto refusal_of = [&](schema::Trajectory changed) {
    const Status status = check_trainable(changed, shape);
    return status ? std::string() : status.error().detail;
  };
  EXPECT_EQ(refusal_of(trajectory(1, 1, 4)), "");
  EXPECT_NE(refusal_of(trajectory(1, 1, 5)).find("has 6 tokens, the model has positions for 5"), std::string::npos);
  EXPECT_NE(refusal_of(trajectory(1, 1, 0)).find("1 prompt and 0 response tokens"), std::string::npos);
  schema::Trajectory changed = trajectory(1, 1, 2);
  changed.add_logprobs(-1);
  EXPECT_NE(refusal_of(changed).find("3 log-probabilities for 2"), std::string::npos);
  changed = trajectory(1, 1, 2);
  changed.add_loss_mask(1);
  EXPECT_NE(refusal_of(changed).find("loss mask of 1 entries for 2"), std::string::npos);
  for (auto* tokens : {changed.mutable_prompt_tokens(), changed.mutable_response_tokens()}) {
    changed.clear_loss_mask();
    const std::uint32_t before = tokens->Get(0);
    tokens->Set(0, 10);
    EXPECT_NE(refusal_of(changed).find("token 10, the vocabulary ends at 9"), std::string::npos);
    tokens->Set(0, before);
  }
}

TEST(BatchTest, ExpertsMustBeThoseOfTheModel) {
  model::ModelConfig shape = *model::preset("tiny-moe");  // 3 layers, 2 of 8 experts
  const auto refusal_of = [&](std::uint32_t layers, std::uint32_t per_token, std::int16_t expert) {
    schema::Trajectory changed = trajectory(1, 1, 2);
    data_plane::RoutedExperts experts{layers, per_token, {}};
    for (std::size_t i = 0; i < 3 * layers; ++i)
      for (std::uint32_t k = 0; k < per_token; ++k)
        experts.values.push_back(k + 1 == per_token ? expert : static_cast<std::int16_t>(k));
    changed.set_routed_experts(data_plane::pack_experts(experts));
    const Status status = check_trainable(changed, shape);
    return status ? std::string() : status.error().detail;
  };
  EXPECT_EQ(refusal_of(3, 2, 7), "");
  EXPECT_NE(refusal_of(3, 2, 8).find("has expert 8, the model has 8"), std::string::npos);
  EXPECT_NE(refusal_of(2, 2, 7).find("the model has 3 layers with 2 per token"), std::string::npos);
  EXPECT_NE(refusal_of(3, 1, 7), "");
  shape = *model::preset("tiny-64");
  EXPECT_NE(refusal_of(3, 2, 7), "") << "no mixture of experts";
  shape.family = model::Family::kCarried;
  EXPECT_EQ(refusal_of(3, 2, 7), "") << "the learner does not know its shape";
}

TEST(SourceMakerTest, ARunWithoutTheBuiltInTrainerNamesTheBuildOption) {
  const auto none = source_maker({}, {});
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Code::kInvalid);
  EXPECT_NE(none.error().detail.find("ECHOLINE_TORCH=ON"), std::string::npos);
  EXPECT_TRUE(source_maker(
      {}, {.load = [](const SourceHost&,
                      bool) { return Result<std::unique_ptr<PolicySource>>(std::unique_ptr<PolicySource>()); },
           .can_compute_on = {},
           .settings_digest = {}}));
}

}  // namespace
}  // namespace echoline::learner
