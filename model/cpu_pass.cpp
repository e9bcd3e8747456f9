#include "model/cpu_pass.hpp"

#include <algorithm>

#include "model/kernels.hpp"

namespace echoline::model {

using torch::Tensor;

namespace {

constexpr std::int64_t kFewRows = 32;       // fp32: beyond, the BLAS is faster
constexpr std::int64_t kFewRowsBf16 = 256;  // bf16: beyond, it is cheaper to convert the weights once
constexpr std::int64_t kWorkMin = 1 << 17;  // multiplications that are worth another thread
constexpr std::int64_t kColumns = 16;       // of a product go to one thread together

// y (+)= x weight^T for x fp32 [rows, in] without gaps.
void multiply(const float* x, std::int64_t rows, const Tensor& weight, float* y, bool add,
              std::vector<float>& scratch) {
  const std::int64_t out = weight.size(0), in = weight.size(1);
  const Kernels& k = kernels();
  const bool bf16 = weight.scalar_type() == torch::kBFloat16;
  if (bf16) {
    scratch.resize(static_cast<std::size_t>(rows * in));
    k.interleave(x, rows, in, scratch.data());
    x = scratch.data();
  }
  const void* const w = weight.data_ptr();
  const std::int64_t grain = std::max<std::int64_t>(1, kWorkMin / (rows * in * kColumns));
  at::parallel_for(0, (out + kColumns - 1) / kColumns, grain, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t begin = first * kColumns, end = std::min(out, last * kColumns);
    if (bf16) {
      k.product_bf16(x, rows, in, static_cast<const Bf16*>(w), begin, end, y, out, add);
    } else {
      k.product_fp32(x, rows, in, static_cast<const float*>(w), begin, end, y, out, add);
    }
  });
}

// A vector of weights as fp32, null where there is none; `kept` holds it where it had to be converted.
const float* widened(const Tensor& weight, Tensor& kept) {
  if (!weight.defined()) return nullptr;
  kept = weight.to(torch::kFloat);
  return kept.data_ptr<float>();
}

template <class Work>
void each_row(std::int64_t rows, std::int64_t work, const Work& one) {
  at::parallel_for(0, rows, std::max<std::int64_t>(1, kWorkMin / 16 / std::max<std::int64_t>(1, work)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t row = begin; row < end; ++row) one(row);
                   });
}

}  // namespace

bool few_rows(const Tensor& x, const Tensor& weight) {
  return !torch::GradMode::is_enabled() && x.is_cpu() && x.scalar_type() == torch::kFloat &&
         x.size(0) <= (weight.scalar_type() == torch::kBFloat16 ? kFewRowsBf16 : kFewRows) && weight.is_contiguous();
}

Tensor cpu_product(const Tensor& x, const Tensor& weight) {
  const Tensor from = x.contiguous(), out = torch::empty({x.size(0), weight.size(0)}, x.options());
  std::vector<float> scratch;
  multiply(from.data_ptr<float>(), x.size(0), weight, out.data_ptr<float>(), false, scratch);
  return out;
}

void cpu_pass(const ModelConfig& config, const std::vector<Transformer::Layer>& layers, const Tensor& x,
              const Tensor& cos, const Tensor& sin, Attention& attention) {
  const std::int64_t rows = x.size(0), hidden = config.hidden_size, inner = config.intermediate_size;
  const std::int64_t heads = config.heads, kv = config.kv_heads, dim = config.head_dim;
  const Kernels& kernel = kernels();
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const Tensor normed = torch::empty({rows, hidden}, x.options());
  const Tensor qkv = torch::empty({rows, 1, heads + 2 * kv, dim}, x.options());
  const Tensor q = qkv.narrow(2, 0, heads), k = qkv.narrow(2, heads, kv), v = qkv.narrow(2, heads + kv, kv);
  const Tensor gates = torch::empty({rows, inner}, x.options()), ups = torch::empty({rows, inner}, x.options());
  float* const at = x.data_ptr<float>();
  float* const norm_at = normed.data_ptr<float>();
  float* const head_at = qkv.data_ptr<float>();
  float* const gate_at = gates.data_ptr<float>();
  std::vector<float> scratch;
  Tensor kept, kept_too, kept_bias;
  const auto norm = [&](const Tensor& weight) {
    const float* const w = widened(weight, kept);
    each_row(rows, hidden,
             [&](std::int64_t r) { kernel.rms_norm(at + r * hidden, w, hidden, eps, norm_at + r * hidden); });
  };
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Transformer::Layer& layer = layers[i];
    norm(layer.input_norm);
    multiply(norm_at, rows, layer.qkv, head_at, false, scratch);
    const float* const q_norm = widened(layer.q_norm, kept);
    const float* const k_norm = widened(layer.k_norm, kept_too);
    const float* const bias = widened(layer.qkv_bias, kept_bias);
    each_row(rows, (heads + kv) * dim, [&](std::int64_t r) {
      const std::int64_t width = (heads + 2 * kv) * dim;
      for (std::int64_t c = 0; bias != nullptr && c < width; ++c) head_at[r * width + c] += bias[c];
      for (std::int64_t h = 0; h < heads + kv; ++h)
        kernel.rotate(head_at + (r * (heads + 2 * kv) + h) * dim, h < heads ? q_norm : k_norm, dim, eps,
                      cos.data_ptr<float>() + r * dim, sin.data_ptr<float>() + r * dim);
    });
    const Tensor mixed = attention.attend(i, q, k, v);
    multiply(mixed.data_ptr<float>(), rows, layer.o, at, true, scratch);
    norm(layer.post_norm);
    multiply(norm_at, rows, layer.gate, gate_at, false, scratch);
    multiply(norm_at, rows, layer.up, ups.data_ptr<float>(), false, scratch);
    each_row(rows, inner,
             [&](std::int64_t r) { kernel.gate(gate_at + r * inner, ups.data_ptr<float>() + r * inner, inner); });
    multiply(gate_at, rows, layer.down, at, true, scratch);
  }
}

}  // namespace echoline::model
