// Training an adapter, against figures of PEFT and torch in tests/model/families/vectors.json.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "learner/training/optimizer.hpp"
#include "model/weights.hpp"
#include "tests/model/families/recipe.hpp"

namespace echoline::learner {
namespace {

using torch::Tensor;

// Four steps on one text: losses, and the adapter's weights afterwards, are those of PEFT. The tolerances are of fp32
// arithmetic whose updates pass through weights in bf16.
TEST(PeftVectors, TrainingAnAdapterGivesPeftsLossesAndWeights) {
  const auto text = read_file("tests/model/families/vectors.json", 1 << 20);
  ASSERT_TRUE(text) << text.error().message();
  const auto vectors = nlohmann::json::parse(*text);
  const auto& vector = vectors["adapter"];
  auto config = model::ModelConfig::from_json(vector["config"].dump());
  ASSERT_TRUE(config) << config.error().message();
  config->adapter = model::AdapterConfig{.rank = vector["rank"],
                                         .alpha = vector["alpha"],
                                         .targets = vector["targets"].get<std::vector<std::string>>(),
                                         .base_model = {}};
  model::Transformer model(*config, torch::kCPU, torch::kFloat);
  const delta::OwnedState start = model::recipe_policy(*config);
  ASSERT_TRUE(model::load_policy(model, start.view()));
  model.freeze_base();
  NamedParameters trained;
  for (const auto& item : model.named_parameters())
    if (item.value().requires_grad()) trained.emplace_back(item.key(), item.value());
  ASSERT_EQ(trained.size(), vector["tensors"].size());
  std::map<std::string, Tensor> starts;
  for (const auto& [name, value] : trained) starts[name] = value.detach().clone();
  OptimizerConfig settings;
  settings.learning_rate = vector["learning_rate"];
  settings.weight_decay = 0.1;
  AdamW optimizer(trained, settings);
  const Tensor ids = torch::tensor(vectors["tokens"].get<std::vector<std::int64_t>>(), torch::kLong).unsqueeze(0);
  for (const double want : vector["losses"]) {
    const Tensor loss = -model.token_logprobs(ids).logprobs.mean();
    EXPECT_NEAR(loss.item<double>(), want, 1e-3);
    loss.backward();
    optimizer.gather_gradients();
    EXPECT_TRUE(optimizer.step().applied);
  }
  for (const AdamW::Slot& slot : optimizer.slots()) {
    const auto& want = vector["tensors"].at(slot.name);
    const double change = (slot.master - starts.at(slot.name)).norm().item<double>();
    EXPECT_NEAR(change, want["change"].get<double>(), 0.01 * change) << slot.name;
    const auto first = want["first"].get<std::vector<float>>();
    for (std::size_t i = 0; i < first.size(); ++i)
      EXPECT_NEAR(slot.master.flatten()[std::int64_t(i)].item<float>(), first[i], 2e-3) << slot.name << " " << i;
  }
}

}  // namespace
}  // namespace echoline::learner
