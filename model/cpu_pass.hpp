// Passes over few rows on a CPU, without gradients: there libtorch's operations cost more than their arithmetic, and
// its products read bf16 weights several times as slowly as memory gives them. Private to model/.
#pragma once
#include "model/layer.hpp"

namespace echoline::model {

// Whether cpu_product() is the fastest way.
bool few_rows(const torch::Tensor& x, const torch::Tensor& weight);

// x fp32 [rows, in], weight fp32 or bf16 [out, in] -> fp32 [rows, out].
torch::Tensor cpu_product(const torch::Tensor& x, const torch::Tensor& weight);

// All layers on one token per row: x fp32 [rows, hidden], overwritten; cos and sin fp32 [rows, head_dim].
void cpu_pass(const ModelConfig& config, const std::vector<Transformer::Layer>& layers, const torch::Tensor& x,
              const torch::Tensor& cos, const torch::Tensor& sin, Attention& attention);

}  // namespace echoline::model
