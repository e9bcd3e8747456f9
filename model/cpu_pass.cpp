// Computes a pass without gradients on a CPU. Transformer calls it.
#include "model/cpu_pass.hpp"

#include <algorithm>
#include <cmath>
#include <span>

#include "model/kernels.hpp"
#include "model/mixture.hpp"
#include "model/parallel.hpp"
#include "model/training_ops.hpp"

namespace echoline::model {

using torch::Tensor;

namespace {

constexpr std::int64_t kFewRows = 32;       // with more rows and fp32 weights, libtorch's BLAS is faster
constexpr std::int64_t kWorkMin = 1 << 17;  // multiplications that justify another thread
constexpr std::int64_t kColumns = 16;       // columns of a product that one thread computes together
constexpr std::int64_t kPackedRows = 16;    // rows of activations that are packed together

// The least number of items, of `item_work` multiplications each, that together take `work_min` multiplications.
std::int64_t items_per_thread_min(std::int64_t work_min, std::int64_t item_work) {
  return std::max<std::int64_t>(1, work_min / std::max<std::int64_t>(1, item_work));
}

bool is_bf16(const Tensor& weight) { return weight.scalar_type() == torch::kBFloat16; }

// x in the order in which the kernels' product with `weight` reads it: x itself for an fp32 weight, a packed copy in
// `buffer` for a bf16 weight.
const float* in_kernel_order(const Tensor& x, const Tensor& weight, Tensor& buffer) {
  if (!is_bf16(weight)) return x.data_ptr<float>();
  const std::int64_t rows = x.size(0), in = x.size(1), floats = kernels().packed_floats(rows, in);
  if (!buffer.defined() || buffer.numel() < floats)
    buffer = torch::empty({floats}, x.options());  // aligned to 64 bytes
  parallel_for((rows + kPackedRows - 1) / kPackedRows, items_per_thread_min(kWorkMin, kPackedRows * in),
               [&](std::int64_t first, std::int64_t last) {
                 kernels().pack(x.data_ptr<float>(), rows, in, first * kPackedRows, std::min(rows, last * kPackedRows),
                                buffer.data_ptr<float>());
               });
  return buffer.data_ptr<float>();
}

// Computes y = x weight^T or, with `add`, y += x weight^T by the kernels. x [rows, in] is from in_kernel_order(). Rows
// of y are `stride` floats apart.
void multiply(const float* x, std::int64_t rows, const Tensor& weight, float* y, std::int64_t stride, bool add) {
  const std::int64_t out = weight.size(0), in = weight.size(1);
  const Kernels& kernel_set = kernels();
  const void* const w = weight.data_ptr();
  parallel_for((out + kColumns - 1) / kColumns, items_per_thread_min(kWorkMin, rows * in * kColumns),
               [&](std::int64_t first, std::int64_t last) {
                 const std::int64_t begin = first * kColumns, end = std::min(out, last * kColumns);
                 if (is_bf16(weight)) {
                   kernel_set.product_bf16(x, rows, in, static_cast<const Bf16*>(w), begin, end, y, stride, add);
                 } else {
                   kernel_set.product_fp32(x, rows, in, static_cast<const float*>(w), begin, end, y, stride, add);
                 }
               });
}

// Computes y = x weight^T or, with `add`, y += x weight^T, for each pair of a weight and y, by the kernels or by
// libtorch. x and y are fp32. All are contiguous, except that rows of y may have a gap between them. The weights have
// one type.
void multiply(const Tensor& x, std::initializer_list<std::pair<const Tensor*, const Tensor*>> products, bool add,
              Tensor& buffer) {
  const float* packed_x = nullptr;
  for (const auto& [weight, y] : products) {
    if (kernel_product_is_fastest(x, *weight)) {
      if (packed_x == nullptr) packed_x = in_kernel_order(x, *weight, buffer);
      multiply(packed_x, x.size(0), *weight, y->data_ptr<float>(), y->stride(0), add);
    } else {
      const Tensor weight_fp32 = weight->to(torch::kFloat).t();
      // libtorch takes `out` as a Tensor&, although only its values change.
      add ? at::addmm_out(const_cast<Tensor&>(*y), *y, x, weight_fp32)
          : at::mm_out(const_cast<Tensor&>(*y), x, weight_fp32);
    }
  }
}

// Adds the product of an adapter, scale * B (A x), to y. Does nothing if `low` is undefined.
void add_low_rank(const Tensor& x, const Transformer::Layer::LowRank& low, const Tensor& y, Tensor& buffer) {
  if (!low) return;
  const Tensor inner = torch::empty({x.size(0), low.a.size(0)}, x.options());
  multiply(x, {{&low.a, &inner}}, /*add=*/false, buffer);
  inner.mul_(low.scale);
  multiply(inner, {{&low.b, &y}}, /*add=*/true, buffer);
}

// The values of a vector as fp32, in memory that `buffer` keeps; null if `weight` is undefined.
const float* as_fp32(const Tensor& weight, Tensor& buffer) {
  if (!weight.defined()) return nullptr;
  buffer = weight.to(torch::kFloat);
  return buffer.data_ptr<float>();
}

// Calls run_row(row) for each row, which takes `row_work` multiplications. Memory limits the speed of this work, so a
// sixteenth of the usual multiplications justifies another thread.
template <class Work>
void parallel_for_each_row(std::int64_t rows, std::int64_t row_work, const Work& run_row) {
  parallel_for(rows, items_per_thread_min(kWorkMin / 16, row_work), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) run_row(row);
  });
}

// The experts of the tokens of a mixture layer, ordered by expert.
struct ExpertRows {
  std::vector<std::int64_t> first;  // [experts + 1]: index in `rows` of each expert's first row
  std::vector<std::int64_t> rows;   // of x
  std::vector<float> weights;       // of each entry of `rows`
};

// Computes the router's scores of each row, and the experts and weights that follow from them. `given` and `used` are
// those of mix_experts().
ExpertRows route(const ExpertsConfig& config, const Tensor& logits, const Tensor& given, Tensor& used) {
  const std::int64_t rows = logits.size(0), count = config.count, per_token = config.per_token;
  used = torch::empty({rows, per_token}, torch::kLong);
  const Tensor given_on_cpu = given.defined() ? given.to(torch::kCPU).contiguous() : Tensor();
  auto* const used_data = used.data_ptr<std::int64_t>();
  std::vector<float> weights(static_cast<std::size_t>(rows * per_token));
  ExpertRows by_expert;
  by_expert.first.assign(static_cast<std::size_t>(count) + 1, 0);
  for (std::int64_t row = 0; row < rows; ++row) {
    auto* const scores = logits.data_ptr<float>() + row * count;
    const float highest = *std::max_element(scores, scores + count);
    float sum = 0;
    for (std::int64_t e = 0; e < count; ++e) sum += scores[e] = std::exp(scores[e] - highest);
    const std::span chosen(used_data + row * per_token, static_cast<std::size_t>(per_token));
    const auto* const given_row =
        given_on_cpu.defined() ? given_on_cpu.data_ptr<std::int64_t>() + row * per_token : nullptr;
    if (given_row != nullptr && given_row[0] >= 0)
      std::copy(given_row, given_row + per_token, chosen.begin());
    else
      choose_experts({scores, static_cast<std::size_t>(count)}, chosen);
    if (config.weights_sum_to_1) {
      sum = 0;
      for (const std::int64_t e : chosen) sum += scores[e];
    }
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      weights[static_cast<std::size_t>(row * per_token) + i] = scores[chosen[i]] / sum;
      ++by_expert.first[static_cast<std::size_t>(chosen[i]) + 1];
    }
  }
  for (std::size_t e = 0; e < static_cast<std::size_t>(count); ++e) by_expert.first[e + 1] += by_expert.first[e];
  by_expert.rows.resize(weights.size());
  by_expert.weights.resize(weights.size());
  std::vector<std::int64_t> next = by_expert.first;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto place = static_cast<std::size_t>(next[static_cast<std::size_t>(used_data[i])]++);
    by_expert.rows[place] = static_cast<std::int64_t>(i) / per_token;
    by_expert.weights[place] = weights[i];
  }
  return by_expert;
}

// Adds the output of a mixture layer for `normed` [rows, hidden] to x. As mix_experts(), without gradients.
void add_mixture(const ExpertsConfig& config, const Transformer::Layer& layer, const Tensor& normed, const Tensor& x,
                 const Tensor& given, Tensor& used, Tensor& buffer) {
  const std::int64_t hidden = x.size(1), inner = config.intermediate_size;
  const Tensor logits = torch::empty({x.size(0), config.count}, x.options());
  multiply(normed, {{&layer.router, &logits}}, /*add=*/false, buffer);
  const ExpertRows routed = route(config, logits, given, used);
  float* const x_data = x.data_ptr<float>();
  const float* const normed_data = normed.data_ptr<float>();
  for (std::size_t e = 0; e < layer.experts.size(); ++e) {
    const auto first = static_cast<std::size_t>(routed.first[e]);
    const std::int64_t count = routed.first[e + 1] - routed.first[e];
    if (count == 0) continue;
    const Tensor input = torch::empty({count, hidden}, x.options()), output = torch::empty_like(input);
    const Tensor gates = torch::empty({count, inner}, x.options()), ups = torch::empty_like(gates);
    for (std::int64_t i = 0; i < count; ++i)
      std::copy_n(normed_data + routed.rows[first + static_cast<std::size_t>(i)] * hidden, hidden,
                  input.data_ptr<float>() + i * hidden);
    const Transformer::Layer::Expert& expert = layer.experts[e];
    multiply(input, {{&expert.gate, &gates}, {&expert.up, &ups}}, /*add=*/false, buffer);
    parallel_for_each_row(count, inner, [&](std::int64_t row) {
      kernels().gate(gates.data_ptr<float>() + row * inner, ups.data_ptr<float>() + row * inner, inner);
    });
    multiply(gates, {{&expert.down, &output}}, /*add=*/false, buffer);
    // An expert has each row once, so that threads write to different rows of x.
    parallel_for_each_row(count, hidden, [&](std::int64_t i) {
      const auto place = first + static_cast<std::size_t>(i);
      float* const sum = x_data + routed.rows[place] * hidden;
      const float* const addend = output.data_ptr<float>() + i * hidden;
      for (std::int64_t column = 0; column < hidden; ++column) sum[column] += routed.weights[place] * addend[column];
    });
  }
}

}  // namespace

Tensor linear_product(const Tensor& x, const Tensor& weight) {
  if (kernel_product_is_fastest(x, weight)) return cpu_product(x, weight);
  return torch::linear(x, weight.to(x.scalar_type()));
}

bool kernel_product_is_fastest(const Tensor& x, const Tensor& weight) {
  return !torch::GradMode::is_enabled() && x.is_cpu() && x.scalar_type() == torch::kFloat && weight.is_contiguous() &&
         (is_bf16(weight) || x.size(0) <= kFewRows);
}

Tensor cpu_product(const Tensor& x, const Tensor& weight) {
  const Tensor contiguous_x = x.contiguous(), out = torch::empty({x.size(0), weight.size(0)}, x.options());
  Tensor buffer;
  multiply(in_kernel_order(contiguous_x, weight, buffer), x.size(0), weight, out.data_ptr<float>(), out.size(1),
           /*add=*/false);
  return out;
}

void cpu_pass(const ModelConfig& config, const std::vector<Transformer::Layer>& layers, const Tensor& x,
              std::int64_t tokens, const Ropes& ropes, Attention* attention, const Tensor& segments,
              const Tensor& given_experts, std::vector<Tensor>& used_experts) {
  const std::int64_t rows = x.size(0), hidden = config.hidden_size, inner = config.intermediate_size;
  const std::int64_t heads = config.heads, kv = config.kv_heads, dim = config.head_dim, width = (heads + 2 * kv) * dim;
  // Rows of a table of rotations: `rows`, or `tokens` if all sequences share them.
  const std::int64_t positions = ropes.full.cos.numel() / dim;
  const Kernels& kernel = kernels();
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const Tensor normed = torch::empty({rows, hidden}, x.options()), qkv = torch::empty({rows, width}, x.options());
  const Tensor by_head = qkv.view({rows / tokens, tokens, heads + 2 * kv, dim});
  const Tensor q = by_head.narrow(2, 0, heads), k = by_head.narrow(2, heads, kv), v = by_head.narrow(2, heads + kv, kv);
  const Tensor gates = torch::empty({rows, inner}, x.options()), ups = torch::empty({rows, inner}, x.options());
  float* const x_data = x.data_ptr<float>();
  float* const normed_data = normed.data_ptr<float>();
  float* const qkv_data = qkv.data_ptr<float>();
  float* const gate_data = gates.data_ptr<float>();
  Tensor packed_buffer, norm_buffer, k_norm_buffer, bias_buffer;
  const auto norm = [&](const Tensor& weight) {
    const float* const norm_weight = as_fp32(norm_factor(config, weight), norm_buffer);
    parallel_for_each_row(rows, hidden, [&](std::int64_t row) {
      kernel.rms_norm(x_data + row * hidden, norm_weight, hidden, eps, normed_data + row * hidden);
    });
  };
  Tensor output;  // of attention or of the MLP, if it has a norm
  // Adds the product of `input` and `weight`, and of its adapter, to x, after the norm of outputs if there is one.
  const auto add_output = [&](const Tensor& input, const Tensor& weight, const Transformer::Layer::LowRank& low,
                              const Tensor& output_norm) {
    if (!output_norm.defined()) {
      multiply(input, {{&weight, &x}}, /*add=*/true, packed_buffer);
      add_low_rank(input, low, x, packed_buffer);
      return;
    }
    if (!output.defined()) output = torch::empty_like(x);
    multiply(input, {{&weight, &output}}, /*add=*/false, packed_buffer);
    add_low_rank(input, low, output, packed_buffer);
    float* const output_data = output.data_ptr<float>();
    const float* const norm_weight = as_fp32(norm_factor(config, output_norm), norm_buffer);
    parallel_for_each_row(rows, hidden, [&](std::int64_t row) {
      float* const output_row = output_data + row * hidden;
      kernel.rms_norm(output_row, norm_weight, hidden, eps, output_row);
      for (std::int64_t column = 0; column < hidden; ++column) x_data[row * hidden + column] += output_row[column];
    });
  };
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Transformer::Layer& layer = layers[i];
    const Tensor &cos = ropes.of(layer).cos, &sin = ropes.of(layer).sin;
    norm(layer.input_norm);
    multiply(normed, {{&layer.qkv, &qkv}}, /*add=*/false, packed_buffer);
    add_low_rank(normed, layer.q_low, qkv.narrow(1, 0, heads * dim), packed_buffer);
    add_low_rank(normed, layer.k_low, qkv.narrow(1, heads * dim, kv * dim), packed_buffer);
    add_low_rank(normed, layer.v_low, qkv.narrow(1, (heads + kv) * dim, kv * dim), packed_buffer);
    const float* const q_norm = as_fp32(norm_factor(config, layer.q_norm), norm_buffer);
    const float* const k_norm = as_fp32(norm_factor(config, layer.k_norm), k_norm_buffer);
    const float* const bias = as_fp32(layer.qkv_bias, bias_buffer);
    parallel_for_each_row(rows, (heads + kv) * dim, [&](std::int64_t row) {
      for (std::int64_t column = 0; bias != nullptr && column < width; ++column)
        qkv_data[row * width + column] += bias[column];
      for (std::int64_t head = 0; head < heads + kv; ++head)
        kernel.rotate(qkv_data + row * width + head * dim, head < heads ? q_norm : k_norm, dim, eps,
                      cos.data_ptr<float>() + row % positions * dim, sin.data_ptr<float>() + row % positions * dim);
    });
    const Tensor attended = attention ? attention->attend(i, q, k, v)
                                      : attend_packed(qkv.view({rows, heads + 2 * kv, dim}), heads, kv, segments,
                                                      AttentionMethod::kKernels, layer.window);
    add_output(attended, layer.o, layer.o_low, layer.attended_norm);
    norm(layer.post_norm);
    if (layer.router.defined()) {
      const Tensor given = given_experts.defined() ? given_experts.select(1, std::ssize(used_experts)) : Tensor();
      add_mixture(*config.experts, layer, normed, x, given, used_experts.emplace_back(), packed_buffer);
      continue;
    }
    multiply(normed, {{&layer.gate, &gates}, {&layer.up, &ups}}, /*add=*/false, packed_buffer);
    add_low_rank(normed, layer.gate_low, gates, packed_buffer);
    add_low_rank(normed, layer.up_low, ups, packed_buffer);
    // In place: afterwards, `gates` contains silu(gates) * ups, or gelu(gates) * ups.
    const auto gate = config.gates_by_gelu() ? kernel.gelu_gate : kernel.gate;
    parallel_for_each_row(rows, inner, [&](std::int64_t row) {
      gate(gate_data + row * inner, ups.data_ptr<float>() + row * inner, inner);
    });
    add_output(gates, layer.down, layer.down_low, layer.mlp_out_norm);
  }
}

}  // namespace echoline::model
