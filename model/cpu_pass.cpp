// Computes a pass without gradients on a CPU. Transformer calls it.
#include "model/cpu_pass.hpp"

#include <algorithm>

#include "model/kernels.hpp"
#include "model/parallel.hpp"
#include "model/training_ops.hpp"

namespace echoline::model {

using torch::Tensor;

namespace {

constexpr std::int64_t kFewRows = 32;       // with more rows and fp32 weights, the BLAS is faster
constexpr std::int64_t kWorkMin = 1 << 17;  // multiplications that justify another thread
constexpr std::int64_t kColumns = 16;       // columns of a product that one thread computes together
constexpr std::int64_t kPackedRows = 16;    // rows of activations that are packed together

std::int64_t grain_of(std::int64_t work_min, std::int64_t work) {
  return std::max<std::int64_t>(1, work_min / std::max<std::int64_t>(1, work));
}

bool is_bf16(const Tensor& weight) { return weight.scalar_type() == torch::kBFloat16; }

// x in the order in which the kernels' product with `weight` reads it; `kept` holds it if that is a copy.
const float* packed(const Tensor& x, const Tensor& weight, Tensor& kept) {
  if (!is_bf16(weight)) return x.data_ptr<float>();
  const std::int64_t rows = x.size(0), in = x.size(1), floats = kernels().packed_floats(rows, in);
  if (!kept.defined() || kept.numel() < floats) kept = torch::empty({floats}, x.options());  // aligned to 64 bytes
  parallel_for((rows + kPackedRows - 1) / kPackedRows, grain_of(kWorkMin, kPackedRows * in),
               [&](std::int64_t first, std::int64_t last) {
                 kernels().pack(x.data_ptr<float>(), rows, in, first * kPackedRows, std::min(rows, last * kPackedRows),
                                kept.data_ptr<float>());
               });
  return kept.data_ptr<float>();
}

// y (+)= x weight^T by the kernels, for x [rows, in] from packed().
void multiply(const float* x, std::int64_t rows, const Tensor& weight, float* y, bool add) {
  const std::int64_t out = weight.size(0), in = weight.size(1);
  const Kernels& k = kernels();
  const void* const w = weight.data_ptr();
  parallel_for((out + kColumns - 1) / kColumns, grain_of(kWorkMin, rows * in * kColumns),
               [&](std::int64_t first, std::int64_t last) {
                 const std::int64_t begin = first * kColumns, end = std::min(out, last * kColumns);
                 if (is_bf16(weight)) {
                   k.product_bf16(x, rows, in, static_cast<const Bf16*>(w), begin, end, y, out, add);
                 } else {
                   k.product_fp32(x, rows, in, static_cast<const float*>(w), begin, end, y, out, add);
                 }
               });
}

// y[i] (+)= x weights[i]^T, all contiguous and, except for the weights, fp32.
void multiply(const Tensor& x, std::initializer_list<std::pair<const Tensor*, const Tensor*>> products, bool add,
              Tensor& kept) {
  const float* prepared = nullptr;
  for (const auto& [weight, y] : products) {
    if (kernel_product_is_fastest(x, *weight)) {
      if (prepared == nullptr) prepared = packed(x, *weight, kept);
      multiply(prepared, x.size(0), *weight, y->data_ptr<float>(), add);
    } else {
      const Tensor wide = weight->to(torch::kFloat).t();
      add ? at::addmm_out(const_cast<Tensor&>(*y), *y, x, wide) : at::mm_out(const_cast<Tensor&>(*y), x, wide);
    }
  }
}

// A vector of weights as fp32, null if undefined; `kept` holds a converted copy.
const float* as_fp32(const Tensor& weight, Tensor& kept) {
  if (!weight.defined()) return nullptr;
  kept = weight.to(torch::kFloat);
  return kept.data_ptr<float>();
}

template <class Work>
void parallel_for_each_row(std::int64_t rows, std::int64_t work, const Work& one) {
  parallel_for(rows, grain_of(kWorkMin / 16, work), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) one(row);
  });
}

}  // namespace

bool kernel_product_is_fastest(const Tensor& x, const Tensor& weight) {
  return !torch::GradMode::is_enabled() && x.is_cpu() && x.scalar_type() == torch::kFloat && weight.is_contiguous() &&
         (is_bf16(weight) || x.size(0) <= kFewRows);
}

Tensor cpu_product(const Tensor& x, const Tensor& weight) {
  const Tensor from = x.contiguous(), out = torch::empty({x.size(0), weight.size(0)}, x.options());
  Tensor kept;
  multiply(packed(from, weight, kept), x.size(0), weight, out.data_ptr<float>(), false);
  return out;
}

void cpu_pass(const ModelConfig& config, const std::vector<Transformer::Layer>& layers, const Tensor& x,
              std::int64_t tokens, const Tensor& cos, const Tensor& sin, Attention* attention, const Tensor& segments) {
  const std::int64_t rows = x.size(0), hidden = config.hidden_size, inner = config.intermediate_size;
  const std::int64_t heads = config.heads, kv = config.kv_heads, dim = config.head_dim, width = (heads + 2 * kv) * dim;
  const std::int64_t positions = cos.numel() / dim;
  const Kernels& kernel = kernels();
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const Tensor normed = torch::empty({rows, hidden}, x.options()), qkv = torch::empty({rows, width}, x.options());
  const Tensor by_head = qkv.view({rows / tokens, tokens, heads + 2 * kv, dim});
  const Tensor q = by_head.narrow(2, 0, heads), k = by_head.narrow(2, heads, kv), v = by_head.narrow(2, heads + kv, kv);
  const Tensor gates = torch::empty({rows, inner}, x.options()), ups = torch::empty({rows, inner}, x.options());
  float* const at = x.data_ptr<float>();
  float* const norm_at = normed.data_ptr<float>();
  float* const head_at = qkv.data_ptr<float>();
  float* const gate_at = gates.data_ptr<float>();
  Tensor packed, kept, kept_too, kept_bias;
  const auto norm = [&](const Tensor& weight) {
    const float* const w = as_fp32(weight, kept);
    parallel_for_each_row(
        rows, hidden, [&](std::int64_t r) { kernel.rms_norm(at + r * hidden, w, hidden, eps, norm_at + r * hidden); });
  };
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Transformer::Layer& layer = layers[i];
    norm(layer.input_norm);
    multiply(normed, {{&layer.qkv, &qkv}}, false, packed);
    const float* const q_norm = as_fp32(layer.q_norm, kept);
    const float* const k_norm = as_fp32(layer.k_norm, kept_too);
    const float* const bias = as_fp32(layer.qkv_bias, kept_bias);
    parallel_for_each_row(rows, (heads + kv) * dim, [&](std::int64_t r) {
      for (std::int64_t c = 0; bias != nullptr && c < width; ++c) head_at[r * width + c] += bias[c];
      for (std::int64_t h = 0; h < heads + kv; ++h)
        kernel.rotate(head_at + r * width + h * dim, h < heads ? q_norm : k_norm, dim, eps,
                      cos.data_ptr<float>() + r % positions * dim, sin.data_ptr<float>() + r % positions * dim);
    });
    const Tensor mixed = attention ? attention->attend(i, q, k, v)
                                   : attend_packed(qkv.view({rows, heads + 2 * kv, dim}), heads, kv, segments,
                                                   AttentionMethod::kKernels);
    multiply(mixed, {{&layer.o, &x}}, true, packed);
    norm(layer.post_norm);
    multiply(normed, {{&layer.gate, &gates}, {&layer.up, &ups}}, false, packed);
    parallel_for_each_row(rows, inner, [&](std::int64_t r) {
      kernel.gate(gate_at + r * inner, ups.data_ptr<float>() + r * inner, inner);
    });
    multiply(gates, {{&layer.down, &x}}, true, packed);
  }
}

}  // namespace echoline::model
