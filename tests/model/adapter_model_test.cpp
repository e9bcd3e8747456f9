// Models with an adapter: what they compute, their gradients, and their policies.
#include <unistd.h>

#include <filesystem>

#include "delta/safetensors.hpp"
#include "helpers.hpp"
#include "model/generate.hpp"
#include "model/weights.hpp"

namespace echoline::model {
namespace {

using torch::Tensor;

class AdaptedModels : public testing::TestWithParam<std::tuple<Family, bool>> {
 protected:
  static ModelConfig config() {
    ModelConfig config = small_config(std::get<0>(GetParam()), std::get<1>(GetParam()));
    config.adapter = AdapterConfig{.rank = 3, .alpha = 4.5, .base_model = {}};
    return config;
  }
};
INSTANTIATE_TEST_SUITE_P(
    Embeddings, AdaptedModels,
    testing::Combine(testing::Values(Family::kQwen3, Family::kQwen2, Family::kLlama, Family::kGemma3), testing::Bool()),
    [](const auto& p) {
      return fmt::format("{}_{}", family_name(std::get<0>(p.param)), std::get<1>(p.param) ? "tied" : "untied");
    });

// A model whose adapter matters: B is not zero.
std::shared_ptr<Transformer> adapted_model(const ModelConfig& config, torch::ScalarType type = torch::kFloat) {
  const auto fresh = random_model(config, 5);
  torch::NoGradGuard no_grad;
  for (auto& item : fresh->named_parameters())
    if (item.key().ends_with("lora_B.weight"))
      item.value().copy_((torch::rand_like(item.value()) - 0.5).to(torch::kBFloat16));
  const auto model = std::make_shared<Transformer>(config, torch::kCPU, type);
  EXPECT_TRUE(load_policy(*model, export_policy(*fresh)->view()));
  return model;
}

// The same model without an adapter: the adapter is added to the weights, in fp32.
std::shared_ptr<Transformer> merged_model(const Transformer& model) {
  ModelConfig config = model.config();
  const AdapterConfig adapter = *config.adapter;
  config.adapter.reset();
  const auto merged = std::make_shared<Transformer>(config, torch::kCPU, torch::kFloat);
  torch::NoGradGuard no_grad;
  const auto weights = model.named_parameters();
  for (auto& item : merged->named_parameters()) {
    Tensor value = weights[item.key()].to(torch::kFloat);
    const std::string layer = item.key().substr(0, item.key().size() - std::string(".weight").size());
    if (const Tensor* a = weights.find(fmt::format("{}{}.lora_A.weight", kAdapterPrefix, layer)))
      value = value + adapter.scale() * weights[fmt::format("{}{}.lora_B.weight", kAdapterPrefix, layer)]
                                            .to(torch::kFloat)
                                            .mm(a->to(torch::kFloat));
    item.value().copy_(value);
  }
  return merged;
}

const std::vector<std::vector<Token>> kRows = {{3, 1, 4, 1, 5, 9, 2, 6}, {18, 0, 0, 7, 7, 7, 2, 11}};

TEST_P(AdaptedModels, ComputeWhatTheMergedWeightsDo) {
  const auto model = adapted_model(config());
  const auto merged = merged_model(*model);
  ModelConfig base_config = config();
  base_config.adapter.reset();
  const Tensor want = merged->forward(ids_of(kRows)).detach();
  for (const bool gradients : {false, true}) {  // the two ways to form products
    torch::AutoGradMode mode(gradients);
    EXPECT_LT(distance(model->forward(ids_of(kRows)).detach(), want), 2e-5);
  }
  torch::NoGradGuard no_grad;
  const auto in_bf16 = adapted_model(config(), torch::kBFloat16);  // as a worker holds it
  EXPECT_LT(distance(in_bf16->forward(ids_of(kRows)), want), 2e-5);
  for (auto& item : model->named_parameters())
    if (item.key().ends_with("lora_B.weight")) item.value().zero_();
  EXPECT_GT(distance(model->forward(ids_of(kRows)), want), 0.1);  // the comparison means something
}

TEST_P(AdaptedModels, GenerateWithTheProbabilitiesOfAForwardPass) {
  const auto model = adapted_model(config()), worker = adapted_model(config(), torch::kBFloat16);
  const std::vector<std::vector<Token>> prompts{{1, 2, 3}, {4}};
  const auto drawn = generate(*worker, prompts, {.tokens_max = 24, .seed = 5});
  ASSERT_TRUE(drawn) << drawn.error().message();
  for (std::size_t row = 0; row < 2; ++row) {
    std::vector<Token> text = prompts[row];
    text.insert(text.end(), (*drawn)[row].tokens.begin(), (*drawn)[row].tokens.end());
    const Tensor scores = model->token_logprobs(ids_of({text})).logprobs[0];  // the learner's, with gradients
    const auto skip = std::int64_t(prompts[row].size()) - 1;
    for (std::size_t t = 0; t < (*drawn)[row].logprobs.size(); ++t)
      EXPECT_NEAR((*drawn)[row].logprobs[t], scores[skip + std::int64_t(t)].item<double>(), 2e-5);
  }
}

// The chain rule from the gradient G of a merged weight W + s B A: s B^T G for A, s G A^T for B.
TEST_P(AdaptedModels, HaveTheGradientsOfTheMergedWeights) {
  const auto model = adapted_model(config());
  model->freeze_base();
  const auto merged = merged_model(*model);
  merged->token_logprobs(ids_of(kRows), 0.8).logprobs.sum().backward();
  const auto full = merged->named_parameters();
  for (const bool recompute : {false, true}) {
    model->recompute_layers(recompute);
    model->zero_grad();
    model->token_logprobs(ids_of(kRows), 0.8).logprobs.sum().backward();
    std::size_t adapted = 0;
    const auto weights = model->named_parameters();
    for (const auto& item : weights) {
      if (!is_adapter_tensor(item.key())) {
        EXPECT_FALSE(item.value().grad().defined()) << item.key();
        continue;
      }
      const bool is_a = item.key().ends_with("lora_A.weight");
      const std::string prefix = item.key().substr(0, item.key().size() - std::string("A.weight").size());
      const std::string layer =
          prefix.substr(kAdapterPrefix.size(), prefix.size() - kAdapterPrefix.size() - std::string(".lora_").size());
      const Tensor g = full[layer + ".weight"].grad() * config().adapter->scale();
      const Tensor want = is_a ? weights[prefix + "B.weight"].t().mm(g) : g.mm(weights[prefix + "A.weight"].t());
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_GT(want.abs().max().item<double>(), 1e-3) << item.key();
      EXPECT_LT(distance(item.value().grad(), want.detach()), 1e-4 * want.abs().max().item<double>()) << item.key();
      ++adapted;
    }
    EXPECT_EQ(std::int64_t(adapted), 2 * 7 * config().layers);
  }
}

TEST(AdaptedModel, AnAdapterThatIsAddedChangesNothingYet) {
  const auto model = random_model(small_config(true), 5);
  torch::NoGradGuard no_grad;
  const Tensor before = model->forward(ids_of(kRows));
  ASSERT_TRUE(model->add_adapter({.rank = 2, .alpha = 2, .targets = {"q_proj", "down_proj"}, .base_model = {}}));
  ASSERT_TRUE(init_adapter(*model, 1));
  EXPECT_TRUE(torch::equal(model->forward(ids_of(kRows)), before));
  EXPECT_EQ(model->named_parameters().size(), 2u + 2 * 11 + 2 * 2 * 2);

  const auto other = random_model(small_config(false), 5);
  const Status refused = other->add_adapter({.rank = 2, .alpha = 2, .targets = {"lm_head"}, .base_model = {}});
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().detail.find("lm_head"), std::string::npos);
}

TEST(AdaptedModel, PoliciesShareTheMemoryOfTheBase) {
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    ModelConfig config = small_config(false);
    config.adapter = AdapterConfig{.rank = 3, .alpha = 3, .base_model = {}};
    const auto model = adapted_model(config, type);
    model->freeze_base();
    const auto base = export_base(model);
    ASSERT_TRUE(base) << base.error().message();
    auto first = export_policy(*model, *base), whole = export_policy(*model);
    ASSERT_TRUE(first && whole);
    EXPECT_EQ(first->digest(), whole->digest());
    {
      torch::NoGradGuard no_grad;
      for (auto& item : model->named_parameters())
        if (is_adapter_tensor(item.key())) item.value().add_(1);
    }
    auto second = export_policy(*model, *base);
    ASSERT_TRUE(second);
    const delta::StateView before = first->view(), after = second->view();
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_EQ(before[i].bytes.data() == after[i].bytes.data(), !is_adapter_tensor(before[i].name)) << before[i].name;
      EXPECT_EQ(std::ranges::equal(before[i].bytes, after[i].bytes), !is_adapter_tensor(before[i].name));
    }
  }
}

TEST(AdaptedModel, AFolderHasTheAdapterInPeftsFiles) {
  const std::filesystem::path folder = testing::TempDir() + fmt::format("echoline-adapted-{}", ::getpid());
  std::filesystem::remove_all(folder);
  ModelFiles files = *ModelFiles::of_preset("tiny-64");
  files.config.adapter = AdapterConfig{.rank = 2, .alpha = 8, .base_model = folder.string()};
  const auto policy = init_policy(files.config, 3);
  ASSERT_TRUE(policy) << policy.error().message();
  ASSERT_TRUE(save_model(folder, files, policy->view()));
  const auto adapter = delta::SafetensorsFile::open(folder / "adapter_model.safetensors");
  ASSERT_TRUE(adapter) << adapter.error().message();
  for (const delta::TensorView& tensor : adapter->view()) EXPECT_TRUE(is_adapter_tensor(tensor.name)) << tensor.name;
  EXPECT_EQ(std::ssize(adapter->view()), 2 * 7 * files.config.layers);
  const auto base = delta::SafetensorsFile::open(folder / "model.safetensors");
  EXPECT_EQ(base->view().size() + adapter->view().size(), policy->size());

  const auto loaded = load_model(folder);
  ASSERT_TRUE(loaded) << loaded.error().message();
  EXPECT_EQ(*loaded->files.config.adapter, *files.config.adapter);
  EXPECT_EQ(export_policy(*loaded->transformer)->digest(), delta::copy_of(policy->view())->digest());
  EXPECT_TRUE(check_weights(folder, loaded->files.config));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace echoline::model
