// Passes without gradients on a CPU, in fp32 with bf16 or fp32 weights, by the kernels of model/kernels. They are
// faster than libtorch: for few rows, its operations cost more than their arithmetic; for many rows, it would first
// convert bf16 weights, on one thread. Private to model/.
#pragma once
#include "model/layer.hpp"

namespace echoline::model {

// Whether cpu_product() is faster than libtorch's product.
bool kernel_product_is_fastest(const torch::Tensor& x, const torch::Tensor& weight);

// Returns x weight^T, for x and weight on any one device, with or without gradients. Uses cpu_product() if that is
// faster; otherwise the weight is first converted to the type of x.
torch::Tensor linear_product(const torch::Tensor& x, const torch::Tensor& weight);

// Returns x weight^T, fp32 [rows, out], for x fp32 [rows, in] and weight fp32 or bf16 [out, in].
torch::Tensor cpu_product(const torch::Tensor& x, const torch::Tensor& weight);

// Runs all layers on x in place. x is fp32 [rows, hidden], contiguous, and consists of sequences of `tokens` rows. The
// tables of `ropes` are fp32 [rows, head_dim] or, if all sequences have the same positions, [tokens, head_dim].
// `attention` computes the attention; if it is null, attend_packed() does, by `segments`. In a mixture of experts,
// `given_experts` are Routing::given, and `used_experts` receives the experts of each mixture layer, int64 [rows,
// experts per token].
void cpu_pass(const ModelConfig& config, const std::vector<Transformer::Layer>& layers, const torch::Tensor& x,
              std::int64_t tokens, const Ropes& ropes, Attention* attention, const torch::Tensor& segments,
              const torch::Tensor& given_experts, std::vector<torch::Tensor>& used_experts);

}  // namespace echoline::model
