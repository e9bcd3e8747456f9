// The weights of one decoder layer. Private to model/.
#pragma once
#include "model/transformer.hpp"

namespace echoline::model {

// The weights of queries, keys and values share one block of memory, so that a pass without gradients needs one
// product.
struct Transformer::Layer {
  // The two matrices of one weight's adapter (model/adapter.hpp); undefined without an adapter.
  struct LowRank {
    torch::Tensor a, b;  // [rank, in], [out, rank]
    double scale = 0;    // alpha / rank
    explicit operator bool() const { return a.defined(); }
  };

  torch::Tensor qkv;         // [(heads + 2 kv_heads) * head_dim, hidden]; q, k and v are views of it
  torch::Tensor q, k, v, o;  // projections of queries, keys, values and output
  torch::Tensor qkv_bias;    // [(heads + 2 kv_heads) * head_dim], the next three are views of it; or undefined
  torch::Tensor q_bias, k_bias, v_bias;
  torch::Tensor q_norm, k_norm;               // [head_dim], or undefined
  torch::Tensor input_norm, post_norm;        // [hidden]; of the inputs of attention and of the MLP
  torch::Tensor attended_norm, mlp_out_norm;  // [hidden]; of the outputs of these two; or undefined
  std::int64_t window = 0;                    // ModelConfig::window_of()
  torch::Tensor gate_up;  // [2 intermediate, hidden], gate and up are views of it; undefined on a CPU
  // [intermediate, hidden] twice, [hidden, intermediate]; undefined in a mixture layer
  torch::Tensor gate, up, down;
  // Only in a mixture layer:
  struct Expert {
    torch::Tensor gate, up, down;  // as above, with the intermediate size of an expert
  };
  torch::Tensor router;  // [experts, hidden]
  std::vector<Expert> experts;
  LowRank q_low, k_low, v_low, o_low, gate_low, up_low, down_low;  // adapters of the weights of these names
};

// The rotations of a pass: `windowed` for layers with a window if these have their own, otherwise `full`.
struct Ropes {
  struct Rope {
    torch::Tensor cos, sin;  // as in Rotation (model/training_ops), for all tokens or for the tokens of one row
  };
  Rope full, windowed;
  const Rope& of(const Transformer::Layer& layer) const {
    return layer.window > 0 && windowed.cos.defined() ? windowed : full;
  }
};

// The factor of a norm whose parameter is `weight`: the weight, or 1 + weight in fp32. Undefined if the weight is.
inline torch::Tensor norm_factor(const ModelConfig& config, const torch::Tensor& weight) {
  return weight.defined() && config.norms_add_one() ? weight.to(torch::kFloat) + 1 : weight;
}

}  // namespace echoline::model
