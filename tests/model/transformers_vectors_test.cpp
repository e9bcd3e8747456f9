// Models of every family against figures of Hugging Face's transformers in families/vectors.json, which
// families/make.py makes.
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "gradients.hpp"
#include "helpers.hpp"
#include "model/weights.hpp"
#include "tests/model/families/recipe.hpp"

namespace echoline::model {
namespace {

using torch::Tensor;

const nlohmann::json& vectors() {
  static const nlohmann::json parsed = [] {
    const char* const path = "tests/model/families/vectors.json";
    return nlohmann::json::parse(read_file(path, 1 << 20).value());
  }();
  return parsed;
}

std::shared_ptr<Transformer> model_of(const ModelConfig& config, torch::ScalarType type) {
  auto model = std::make_shared<Transformer>(config, torch::kCPU, type);
  EXPECT_TRUE(load_policy(*model, recipe_policy(config).view()));
  return model;
}

class Vectors : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Families, Vectors,
                         testing::Values("qwen3", "qwen2", "qwen2, windows", "llama", "smollm2", "mistral",
                                         "mistral, windows", "gemma3", "qwen3_moe"),
                         [](const auto& p) {
                           std::string name = p.param;
                           std::erase_if(name, [](char c) { return c == ',' || c == ' '; });
                           return name;
                         });

TEST_P(Vectors, LogitsAndGradientsAreThoseOfTransformers) {
  const nlohmann::json& vector = vectors()["models"].at(GetParam());
  const auto config = ModelConfig::from_json(vector["config"].dump());
  ASSERT_TRUE(config) << config.error().message();
  const auto tokens = vectors()["tokens"].get<std::vector<Token>>();
  const auto want = vector["logits"].get<std::vector<std::vector<float>>>();
  ASSERT_EQ(want.size(), tokens.size());
  // The trainer's pass, the same without gradients, and the engine's with weights in bf16.
  for (const auto& [type, gradients] :
       {std::pair(torch::kFloat, true), std::pair(torch::kFloat, false), std::pair(torch::kBFloat16, false)}) {
    torch::AutoGradMode mode(gradients);
    const auto model = model_of(*config, type);
    const Tensor got = model->forward(ids_of({tokens})).detach()[0];
    double worst = 0, largest = 0;
    for (std::size_t t = 0; t < want.size(); ++t)
      for (std::size_t v = 0; v < want[t].size(); ++v) {
        const float logit = got[std::int64_t(t)][std::int64_t(v)].item<float>();
        worst = std::max(worst, double(std::abs(want[t][v] - logit)));
        largest = std::max(largest, double(std::abs(logit)));
      }
    EXPECT_LT(worst, 3e-5 * std::max(1.0, largest));
    EXPECT_GT(largest, 1);
    if (!gradients) continue;
    model->token_logprobs(ids_of({tokens})).logprobs.sum().backward();
    std::size_t compared = 0;
    for (const auto& item : model->named_parameters()) {
      const auto norm = vector["gradient_norms"].find(item.key());
      if (norm == vector["gradient_norms"].end()) continue;  // transformers holds a layer's experts in one tensor
      const double own = gradient_of(item.value()).norm().item<double>();
      EXPECT_NEAR(own, norm->get<double>(), 1e-4 * std::max(1.0, own)) << item.key();
      ++compared;
    }
    EXPECT_GE(compared, 20u);
  }
}

TEST(Vectors, EveryStoredModelIsCompared) { EXPECT_EQ(vectors()["models"].size(), 9u); }

}  // namespace
}  // namespace echoline::model
