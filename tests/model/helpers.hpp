// Small random models for the tests.
#pragma once
#include <gtest/gtest.h>

#include <memory>

#include "model/transformer.hpp"
#include "model/weights.hpp"
#include "reference.hpp"

namespace echoline::model {

// Grouped heads (2 queries to a key), head_dim unlike hidden / heads, odd sizes.
inline ModelConfig small_config(bool tied) {
  ModelConfig c;
  c.vocab_size = 19;
  c.hidden_size = 20;
  c.intermediate_size = 27;
  c.layers = 2;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 6;
  c.positions_max = 64;
  c.rope_theta = 100;
  c.initializer_range = 0.3;  // large, so that attention and logits are far from uniform
  c.tie_embeddings = tied;
  return c;
}

// The same for another family. Gemma's windows are shorter than the tests' texts; its second layer has none. Llama's
// rotations keep one frequency, slow one down, and interpolate one. The mixture of experts has a layer with an MLP and
// two with experts.
inline ModelConfig small_config(Family family, bool tied) {
  ModelConfig c = small_config(tied);
  c.family = family;
  if (family == Family::kLlama) c.rope_scaling = RopeScaling{4, 1, 4, 40};
  if (family == Family::kGemma3) {
    c.layers = 3;
    c.sliding_window = SlidingWindow{.tokens = 5, .full_layers = {1}};
    c.rope_scaling = RopeScaling{.factor = 3, .is_linear = true};
    c.local_rope_theta = 30;
    c.query_scalar = 9;
  }
  if (family == Family::kQwen3Moe) {
    c.layers = 3;
    c.experts = ExpertsConfig{.count = 5,
                              .per_token = 2,
                              .intermediate_size = 11,
                              .weights_sum_to_1 = tied,
                              .layer_step = 1,
                              .dense_layers = {1}};
  }
  return c;
}

// init() plus random norms, so that a wrong or forgotten norm weight shows.
inline std::shared_ptr<Transformer> random_model(const ModelConfig& config, std::uint64_t seed) {
  auto model = init(config, seed).value();
  torch::NoGradGuard no_grad;
  torch::manual_seed(seed);
  for (auto& item : model->named_parameters()) {
    const double lowest = config.norms_add_one() ? -0.5 : 0.5;
    if (item.value().dim() == 1) item.value().copy_((torch::rand_like(item.value()) + lowest).to(torch::kBFloat16));
  }
  return model;
}

inline reference::Weights reference_weights(const Transformer& model) {
  reference::Weights out;
  for (const auto& item : model.named_parameters()) {
    const torch::Tensor fp64 = item.value().detach().to(torch::kDouble).contiguous();
    out[item.key()].assign(fp64.data_ptr<double>(), fp64.data_ptr<double>() + fp64.numel());
  }
  return out;
}

inline torch::Tensor ids_of(const std::vector<std::vector<Token>>& rows) {
  torch::Tensor ids = torch::zeros({std::ssize(rows), std::ssize(rows.front())}, torch::kLong);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t t = 0; t < rows[r].size(); ++t) ids[std::int64_t(r)][std::int64_t(t)] = rows[r][t];
  }
  return ids;
}

inline double distance(const torch::Tensor& a, const torch::Tensor& b) { return (a - b).abs().max().item<double>(); }

}  // namespace echoline::model
