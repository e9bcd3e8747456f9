// Arithmetic of the transformer against the reference; cache, padding and gradients against its own full pass.
#include "gradients.hpp"
#include "helpers.hpp"
#include "model/generate.hpp"
#include "model/weights.hpp"

namespace echoline::model {
namespace {

using torch::Tensor;

class Shapes : public testing::TestWithParam<std::tuple<Family, bool>> {
 protected:
  static ModelConfig config() { return small_config(std::get<0>(GetParam()), std::get<1>(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Embeddings, Shapes,
                         testing::Combine(testing::Values(Family::kQwen3, Family::kQwen3Moe, Family::kQwen2,
                                                          Family::kLlama, Family::kMistral, Family::kGemma3),
                                          testing::Bool()),
                         [](const auto& p) {
                           return fmt::format("{}_{}", family_name(std::get<0>(p.param)),
                                              std::get<1>(p.param) ? "tied" : "untied");
                         });

TEST_P(Shapes, LogitsMatchThePlainReference) {
  const ModelConfig config = this->config();
  const auto model = random_model(config, 5);
  const std::vector<std::vector<Token>> rows = {{3, 1, 4, 1, 5, 9, 2, 6}, {18, 0, 0, 7, 7, 7, 2, 11}};
  const auto weights = reference_weights(*model);
  for (const bool gradients : {false, true}) {  // the two ways to form the query, key and value product
    torch::AutoGradMode mode(gradients);
    const Tensor got = model->forward(ids_of(rows)).detach();
    ASSERT_EQ(got.scalar_type(), torch::kFloat);
    double worst = 0, largest = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto want = reference::logits(config, weights, rows[r]);
      for (std::size_t t = 0; t < want.size(); ++t) {
        for (std::size_t v = 0; v < want[t].size(); ++v) {
          worst = std::max(
              worst, std::abs(want[t][v] - got[std::int64_t(r)][std::int64_t(t)][std::int64_t(v)].item<double>()));
          largest = std::max(largest, std::abs(want[t][v]));
        }
      }
    }
    EXPECT_GT(largest, 1.0);  // the comparison means something
    EXPECT_LT(worst, 2e-5);
  }
}

TEST(Transformer, ParameterNamesAreThoseOfHuggingFace) {
  const auto names = init(small_config(true), 1).value()->named_parameters().keys();
  EXPECT_EQ(names.size(), 2u + 2 * 11);
  for (const char* name : {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.q_proj.weight",
                           "model.layers.0.self_attn.q_norm.weight", "model.layers.1.mlp.gate_proj.weight",
                           "model.layers.0.post_attention_layernorm.weight"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
  }
  const auto untied = init(small_config(false), 1).value()->named_parameters();
  EXPECT_TRUE(untied.contains("lm_head.weight"));
  EXPECT_EQ(untied.size(), 3u + 2 * 11);
}

TEST_P(Shapes, ParameterCountMatchesTheConfiguration) {
  const ModelConfig config = this->config();
  std::uint64_t count = 0;
  for (const Tensor& p : init(config, 1).value()->parameters()) count += static_cast<std::uint64_t>(p.numel());
  EXPECT_EQ(count, config.parameters());
}

// With only the layers' inputs stored, the gradients are the same.
TEST_P(Shapes, RecomputedLayersHaveTheSameGradients) {
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    Transformer model(config(), torch::kCPU, type);
    ASSERT_TRUE(load_policy(model, export_policy(*random_model(config(), 11))->view()));
    const Tensor ids = ids_of({{2, 7, 1, 8, 2}, {8, 1, 8, 2, 8}});
    const auto gradients = [&](bool recompute) {
      model.recompute_layers(recompute);
      model.zero_grad();
      for (int twice = 0; twice < 2; ++twice) model.token_logprobs(ids, 0.8).logprobs.sum().backward();
      std::map<std::string, Tensor> out;
      for (const auto& item : model.named_parameters()) out[item.key()] = gradient_of(item.value());
      return out;
    };
    const auto stored = gradients(false), recomputed = gradients(true);
    for (const auto& [name, want] : stored) {
      if (!may_be_unused(name)) {
        EXPECT_GT(want.abs().max().item<double>(), 1e-3) << name;
      }
      EXPECT_LE(distance(recomputed.at(name), want), 2e-5 * want.abs().max().item<double>()) << name;
    }
  }
}

// The generating pass, with its pages, products of few rows and rotations, handles every family as well.
TEST_P(Shapes, GeneratesWithTheProbabilitiesOfAForwardPass) {
  const auto model = random_model(config(), 7);
  const auto drawn = generate(*model, {{1, 2, 3}, {4}}, {.tokens_max = 24, .seed = 5});
  ASSERT_TRUE(drawn) << drawn.error().message();
  const std::vector<std::vector<Token>> prompts{{1, 2, 3}, {4}};
  for (std::size_t row = 0; row < 2; ++row) {
    std::vector<Token> text = prompts[row];
    text.insert(text.end(), (*drawn)[row].tokens.begin(), (*drawn)[row].tokens.end());
    const Tensor scores = model->token_logprobs(ids_of({text})).logprobs[0];
    const auto skip = std::int64_t(prompts[row].size()) - 1;
    for (std::size_t t = 0; t < (*drawn)[row].logprobs.size(); ++t)
      EXPECT_NEAR((*drawn)[row].logprobs[t], scores[skip + std::int64_t(t)].item<double>(), 2e-5);
  }
}

TEST(Transformer, RightPaddingDoesNotChangeALogit) {
  torch::NoGradGuard no_grad;
  const auto model = random_model(small_config(true), 9);
  const Tensor alone = model->forward(ids_of({{4, 5, 6}}));
  const Tensor padded = model->forward(ids_of({{4, 5, 6, 0, 0}, {1, 2, 3, 4, 5}}));
  EXPECT_LT(distance(padded[0].narrow(0, 0, 3), alone[0]), 1e-5);
}

TEST(Transformer, TokenLogprobsMatchTheReference) {
  const ModelConfig config = small_config(true);
  const auto model = random_model(config, 10);
  const std::vector<Token> row = {2, 7, 1, 8, 2, 8};
  const auto logits = reference::logits(config, reference_weights(*model), row);
  const Tensor mask = torch::tensor({false, true, true, false, true}).unsqueeze(0);
  for (const double temperature : {1.0, 0.7}) {
    const TokenScores all = model->token_logprobs(ids_of({row}), temperature);
    const TokenScores some = model->token_logprobs(ids_of({row}), temperature, mask);
    for (std::int64_t t = 0; t < 5; ++t) {
      const auto log_p = reference::log_softmax(logits[std::size_t(t)], temperature);
      double entropy = 0;
      for (const double l : log_p) entropy -= std::exp(l) * l;
      const double want = log_p[std::size_t(row[std::size_t(t) + 1])];
      EXPECT_NEAR(all.logprobs[0][t].item<double>(), want, 2e-5);
      EXPECT_NEAR(all.entropy[0][t].item<double>(), entropy, 2e-5);
      const bool is_scored = mask[0][t].item<bool>();
      EXPECT_NEAR(some.logprobs[0][t].item<double>(), is_scored ? want : 0, 2e-5);
      EXPECT_NEAR(some.entropy[0][t].item<double>(), is_scored ? entropy : 0, 2e-5);
    }
  }
  EXPECT_THROW(model->token_logprobs(ids_of({row}), 0.0), c10::Error);
  EXPECT_THROW(model->token_logprobs(ids_of({{1}})), c10::Error);
}

// Gradients of a weighted sum of log-probabilities: the hand-written backward pass against autograd through
// forward(), and autograd against finite differences of the plain reference.
TEST_P(Shapes, GradientsOfTokenLogprobs) {
  const ModelConfig config = this->config();
  const auto model = random_model(config, 11);
  const std::vector<std::vector<Token>> rows = {{2, 7, 1, 8, 2}, {8, 1, 8, 2, 8}};
  const Tensor ids = ids_of(rows);
  const Tensor weight = torch::tensor({{0.5, -1.0, 2.0, 0.25}, {1.5, 0.75, -0.5, 1.0}}, torch::kFloat);
  const double temperature = 0.8;
  const auto gradients = [&](const Tensor& logprobs) {
    model->zero_grad();
    (logprobs * weight).sum().backward();
    std::map<std::string, Tensor> out;
    for (const auto& item : model->named_parameters()) out[item.key()] = gradient_of(item.value());
    return out;
  };
  const auto got = gradients(model->token_logprobs(ids, temperature).logprobs);
  const auto masked = gradients(model->token_logprobs(ids, temperature, torch::ones({2, 4}, torch::kBool)).logprobs);
  const auto direct = gradients((model->forward(ids.narrow(1, 0, 4)) / temperature)
                                    .log_softmax(-1)
                                    .gather(2, ids.narrow(1, 1, 4).unsqueeze(2))
                                    .squeeze(2));
  for (const auto& [name, want] : direct) {
    const double tolerance = 1e-4 * std::max(1.0, want.abs().max().item<double>());
    if (!may_be_unused(name)) {
      EXPECT_GT(want.abs().max().item<double>(), 1e-3) << name;
    }
    EXPECT_LT(distance(got.at(name), want), tolerance) << name;
    EXPECT_LT(distance(masked.at(name), want), tolerance) << name;
  }

  auto weights = reference_weights(*model);
  const auto objective = [&] {
    double sum = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto logits = reference::logits(config, weights, rows[r]);
      for (std::size_t t = 0; t < 4; ++t) {
        sum += reference::log_softmax(logits[t], temperature)[std::size_t(rows[r][t + 1])] *
               weight[std::int64_t(r)][std::int64_t(t)].item<double>();
      }
    }
    return sum;
  };
  for (const auto& [name, gradient] : got) {
    const std::int64_t index = gradient.abs().argmax().item<std::int64_t>();
    double& value = weights.at(name)[std::size_t(index)];
    const double original = value, h = 1e-5;
    value = original + h;
    const double above = objective();
    value = original - h;
    const double below = objective();
    value = original;
    const double slope = gradient.flatten()[index].item<double>();
    EXPECT_NEAR((above - below) / (2 * h), slope, 1e-3 * std::max(1.0, std::abs(slope))) << name;
  }
}

// More logits than one part holds: the parts together equal separate calls.
TEST(Transformer, TokenLogprobsOfManyLogitsWorkInParts) {
  ModelConfig config = small_config(true);
  config.vocab_size = 1 << 21;  // 32 rows of logits at a time
  config.hidden_size = 4;
  config.layers = 1;
  const auto model = init(config, 13).value();
  const Tensor ids = torch::randint(0, config.vocab_size, {1, 41}, torch::kLong);
  const Tensor first = (torch::arange(40) < 20).unsqueeze(0);
  const auto scores = [&](const Tensor& mask) {
    model->zero_grad();
    const TokenScores s = model->token_logprobs(ids, 1.0, mask);
    s.logprobs.sum().backward();
    return std::pair{s, model->parameters()[0].grad().clone()};
  };
  const auto [together, gradient] = scores({});
  const auto [left, left_gradient] = scores(first);
  const auto [right, right_gradient] = scores(first.logical_not());
  EXPECT_LT(distance(together.logprobs, left.logprobs + right.logprobs), 1e-4);
  EXPECT_LT(distance(together.entropy, left.entropy + right.entropy), 1e-4);
  EXPECT_GT(gradient.abs().max().item<double>(), 0.1);
  EXPECT_LT(distance(gradient, left_gradient + right_gradient), 1e-4);
}

// CUDA's compute type, on the CPU: the same model within 8 bits of mantissa.
TEST(Transformer, ComputesInBfloat16Too) {
  const ModelConfig config = small_config(false);
  const auto exact = random_model(config, 14);
  Transformer half(config, torch::kCPU, torch::kBFloat16);
  ASSERT_TRUE(load_policy(half, export_policy(*exact)->view()));
  const Tensor ids = torch::randint(0, config.vocab_size, {4, 9}, torch::kLong);
  const TokenScores want = exact->token_logprobs(ids), got = half.token_logprobs(ids);
  EXPECT_EQ(got.logprobs.scalar_type(), torch::kFloat);
  EXPECT_GT(distance(got.logprobs, want.logprobs), 0);
  EXPECT_LT(distance(got.logprobs, want.logprobs), 0.3);
  want.logprobs.sum().backward();
  got.logprobs.sum().backward();
  for (const auto& item : half.named_parameters()) {
    const Tensor a = item.value().grad().to(torch::kFloat).flatten(),
                 b = exact->named_parameters()[item.key()].grad().flatten();
    EXPECT_GT(torch::cosine_similarity(a, b, 0).item<double>(), 0.98) << item.key();
  }
  EXPECT_EQ(export_policy(half)->digest(), export_policy(*exact)->digest());
  EXPECT_EQ(generate(half, {{1}, {2, 3}}, {.tokens_max = 5}).value()[1].tokens.size(), 5u);
}

TEST(Transformer, ChangedWeightsAreSeenWithAndWithoutGradients) {
  const auto model = random_model(small_config(true), 12);
  const Tensor ids = ids_of({{1, 2, 3}});
  Tensor before;
  {
    torch::NoGradGuard no_grad;
    before = model->forward(ids);
    auto parameters = model->named_parameters();
    parameters["model.layers.0.self_attn.v_proj.weight"].mul_(2.0);
  }
  const Tensor trained = model->forward(ids).detach();
  torch::NoGradGuard no_grad;
  EXPECT_LT(distance(model->forward(ids), trained), 1e-5);
  EXPECT_GT(distance(before, trained), 1e-2);
}

TEST(Init, IsDeterministicAndDistributedAsAsked) {
  const ModelConfig config = preset("tiny-64").value();
  const auto a = init(config, 3).value(), b = init(config, 3).value(), c = init(config, 4).value();
  bool differs = false;
  for (const auto& item : a->named_parameters()) {
    const Tensor other = b->named_parameters()[item.key()];
    EXPECT_TRUE(torch::equal(item.value(), other)) << item.key();
    EXPECT_TRUE(torch::equal(item.value(), item.value().to(torch::kBFloat16).to(torch::kFloat))) << item.key();
    if (item.value().dim() == 1) {
      EXPECT_TRUE((item.value() == 1).all().item<bool>());
    } else {
      differs |= !torch::equal(item.value(), c->named_parameters()[item.key()]);
      const double n = double(item.value().numel()), sigma = config.initializer_range;
      EXPECT_NEAR(item.value().mean().item<double>(), 0, 5 * sigma / std::sqrt(n)) << item.key();
      EXPECT_NEAR(item.value().std().item<double>(), sigma, 5 * sigma / std::sqrt(2 * n)) << item.key();
      EXPECT_GT(item.value().abs().max().item<double>(), 2.5 * sigma);
    }
  }
  EXPECT_TRUE(differs);
  // The same on every machine: this digest was recorded once.
  EXPECT_EQ(export_policy(*a)->digest().hex(), "74b20db17be35d99a89589c8aa630dd2");
  ModelConfig impossible = config;
  impossible.kv_heads = 3;
  const auto failed = init(impossible, 1);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Code::kInvalid);
}

}  // namespace
}  // namespace echoline::model
