// Passes without gradients on a CPU, in fp32 with bf16 or fp32 weights, by the kernels of model/kernels. For few rows,
// libtorch's operations cost more than their arithmetic; for many, libtorch would first convert bf16 weights, on one
// thread. Private to model/.
#pragma once
#include "model/layer.hpp"

namespace echoline::model {

// Whether cpu_product() is faster than libtorch's product.
bool kernel_product_is_fastest(const torch::Tensor& x, const torch::Tensor& weight);

// x fp32 [rows, in], weight fp32 or bf16 [out, in] -> fp32 [rows, out].
torch::Tensor cpu_product(const torch::Tensor& x, const torch::Tensor& weight);

// Runs all layers on x, in place: fp32 [rows, hidden], contiguous, in sequences of `tokens` rows. cos and sin: fp32,
// [head_dim] for each row, or for each token of a sequence. `attention` computes the attention; if it is null,
// attend_packed() does, by `segments`.
void cpu_pass(const ModelConfig& config, const std::vector<Transformer::Layer>& layers, const torch::Tensor& x,
              std::int64_t tokens, const torch::Tensor& cos, const torch::Tensor& sin, Attention* attention,
              const torch::Tensor& segments);

}  // namespace echoline::model
