// Builds the decoder's weights, and runs its layers on a CPU or GPU, with or without gradients.
#include "model/transformer.hpp"

#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "delta/raw_memory.hpp"
#include "model/cpu_pass.hpp"
#include "model/device_ops.hpp"
#include "model/layer.hpp"
#include "model/mixture.hpp"
#include "model/policy.hpp"
#include "model/training_ops.hpp"

namespace echoline::model {

using torch::Tensor;

namespace {

constexpr std::int64_t kQueriesMax = 256;  // queries whose scores are in memory at a time, without gradients

// Registers a parameter under a dotted name. libtorch forbids dots in names, so each part before the last becomes a
// nested module.
void register_path(torch::nn::Module& root, const std::string& path, const Tensor& tensor) {
  torch::nn::Module* module = &root;
  std::size_t begin = 0;
  for (std::size_t dot = path.find('.'); dot != std::string::npos; begin = dot + 1, dot = path.find('.', begin)) {
    const std::string part = path.substr(begin, dot - begin);
    auto children = module->named_children();
    auto* child = children.find(part);
    module = child ? child->get() : module->register_module(part, std::make_shared<torch::nn::Module>(part)).get();
  }
  module->register_parameter(path.substr(begin), tensor);
}

// Uninitialised memory for weights. On a CPU it uses huge pages if the system has them, because a step reads all
// weights and the processor's prefetcher stops at the end of a page.
Tensor weight_memory(const std::vector<std::int64_t>& shape, const torch::TensorOptions& options) {
  std::size_t bytes = torch::elementSize(torch::typeMetaToScalarType(options.dtype()));
  for (const std::int64_t size : shape) bytes *= static_cast<std::size_t>(size);
  constexpr std::size_t kHugePageBytes = 2u << 20;
  if (!options.device().is_cpu() || bytes < kHugePageBytes) return torch::empty(shape, options);
  const auto memory = std::make_shared<delta::RawVector<std::byte>>(bytes);
  // Makes libtorch's profiler count this memory like its own.
  c10::profiledCPUMemoryReporter().New(memory->data(), bytes);
  return torch::from_blob(
      memory->data(), shape, [memory](void* address) { c10::profiledCPUMemoryReporter().Delete(address); }, options);
}

// The inputs that all layers of a pass share.
struct Pass {
  std::int64_t batch, tokens;  // rows, and tokens per row
  Ropes ropes;

  Attention* attention;  // null: the tokens attend by the next two members
  Tensor segments;       // as made by pack() or uniform_segments() (model/packed)
  AttentionPlan plan;    // for the segments; only on a GPU

  // The experts of the layer that runs, if it is a mixture: int64 [tokens, experts per token].
  Tensor given_experts;         // see mix_experts(); may be undefined
  mutable Tensor used_experts;  // set by run_layer()
};

// The adapter's addition to a product: scale * B (A x).
Tensor low_rank_product(const Tensor& x, const Transformer::Layer::LowRank& low) {
  return linear_product(linear_product(x, low.a), low.b) * low.scale;
}

// As linear_product(), plus the product of the weight's adapter, if it has one.
Tensor product(const Tensor& x, const Tensor& weight, const Transformer::Layer::LowRank& low) {
  const Tensor y = linear_product(x, weight);
  return low ? y + low_rank_product(x, low) : y;
}

// The adapters' additions to queries, keys and values, side by side; undefined if none of the three has an adapter.
Tensor low_rank_qkv(const Tensor& x, const Transformer::Layer& layer) {
  if (!layer.q_low && !layer.k_low && !layer.v_low) return {};
  const auto part = [&](const Transformer::Layer::LowRank& low, const Tensor& weight) {
    return low ? low_rank_product(x, low) : torch::zeros({x.size(0), weight.size(0)}, x.options().requires_grad(false));
  };
  return torch::cat({part(layer.q_low, layer.q), part(layer.k_low, layer.k), part(layer.v_low, layer.v)}, 1);
}

// Runs the decoder layer `index` on [batch * tokens, hidden].
Tensor run_layer(const ModelConfig& config, const Pass& pass, std::size_t index, const Transformer::Layer& layer,
                 const Tensor& input) {
  const std::int64_t heads = config.heads, kv_heads = config.kv_heads, dim = config.head_dim;
  const double eps = config.rms_norm_eps;
  const auto [normed_input, residual] = norm_and_sum(input, /*addend=*/{}, norm_factor(config, layer.input_norm), eps);
  // Queries, keys and values are computed as one product. With gradients, joint_product() passes them to the three
  // separate parameters.
  Tensor qkv = kernel_product_is_fastest(normed_input, layer.qkv) ? cpu_product(normed_input, layer.qkv)
               : layer.q.requires_grad()
                   ? joint_product(normed_input, layer.qkv.to(normed_input.scalar_type()), layer.q, layer.k, layer.v)
                   : torch::linear(normed_input, layer.qkv.to(normed_input.scalar_type()));
  if (const Tensor added = low_rank_qkv(normed_input, layer); added.defined()) qkv = qkv + added;
  if (layer.qkv_bias.defined()) {
    const Tensor bias =
        torch::GradMode::is_enabled() ? torch::cat({layer.q_bias, layer.k_bias, layer.v_bias}) : layer.qkv_bias;
    qkv = qkv + bias.to(qkv.scalar_type());
  }
  const Ropes::Rope& rope = pass.ropes.of(layer);
  const Rotation rotation{.cos = rope.cos,
                          .sin = rope.sin,
                          .q_norm = norm_factor(config, layer.q_norm),
                          .k_norm = norm_factor(config, layer.k_norm),
                          .heads = heads,
                          .kv_heads = kv_heads,
                          .eps = eps};
  Tensor attended;
  if (!pass.attention && layer.window == 0 && supports_attend_on_device(qkv, rotation)) {
    attended = attend_on_device(qkv, rotation, pass.plan);
  } else if (const Tensor rows = rotate(qkv, rotation); pass.attention) {
    const Tensor in_batch = rows.view({pass.batch, pass.tokens, heads + 2 * kv_heads, dim});
    attended = pass.attention->attend(index, in_batch.narrow(2, 0, heads), in_batch.narrow(2, heads, kv_heads),
                                      in_batch.narrow(2, heads + kv_heads, kv_heads));
  } else {
    attended = attend_packed(rows, heads, kv_heads, pass.segments,
                             fastest_attention(rows.device(), /*has_window=*/layer.window > 0), layer.window);
  }
  // Applies the norm of an output, if the family has one.
  const auto normed_output = [&](const Tensor& output, const Tensor& weight) {
    return weight.defined() ? rms_norm(output, norm_factor(config, weight), eps) : output;
  };
  const auto [normed_sum, sum] =
      norm_and_sum(residual, normed_output(product(attended, layer.o, layer.o_low), layer.attended_norm),
                   norm_factor(config, layer.post_norm), eps);
  if (layer.router.defined())
    return sum + mix_experts(*config.experts, layer, normed_sum, pass.given_experts, pass.used_experts);
  const bool is_joint = !config.gates_by_gelu() && !layer.gate_low && !layer.up_low && layer.gate.requires_grad() &&
                        supports_joint_gated(normed_sum, layer.gate_up);
  const auto gate_and_up = [&layer, &x = normed_sum](const auto& gate_function) {
    return gate_function(product(x, layer.gate, layer.gate_low), product(x, layer.up, layer.up_low));
  };
  const Tensor inner = is_joint                 ? joint_gated(normed_sum, layer.gate_up, layer.gate, layer.up)
                       : config.gates_by_gelu() ? gate_and_up(gelu_gated)
                                                : gate_and_up(gated);
  return sum + normed_output(product(inner, layer.down, layer.down_low), layer.mlp_out_norm);
}

// A layer of which only the input is kept. The backward pass runs the layer again and adds the weights' gradients.
// Config and layer are saved as addresses, because the model outlives the pass.
struct Recomputed : torch::autograd::Function<Recomputed> {
  // Indices of the tensors saved for the backward pass.
  enum Saved : std::size_t {
    kInput,
    kCos,
    kSin,
    kSegments,
    kQueriesFirst,
    kKeysFirst,
    kRows,
    kCopiesFirst,
    kCopies,
    kExperts
  };
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const ModelConfig* config,
                        const Transformer::Layer* layer, const Pass* pass) {
    const AttentionPlan& plan = pass->plan;
    // The index matters only to pass->attention, which is null here.
    const Tensor y = run_layer(*config, *pass, 0, *layer, x);
    // The backward pass uses the same experts, because a score that is rounded otherwise could choose another one.
    const Ropes::Rope& rope = pass->ropes.of(*layer);
    context->save_for_backward({x, rope.cos, rope.sin, pass->segments, plan.queries_first, plan.keys_first, plan.rows,
                                plan.copies_first, plan.copies, pass->used_experts});
    context->saved_data["queries_max"] = plan.queries_max;
    context->saved_data["keys_max"] = plan.keys_max;
    context->saved_data["config"] = reinterpret_cast<std::int64_t>(config);
    context->saved_data["layer"] = reinterpret_cast<std::int64_t>(layer);
    context->saved_data["batch"] = pass->batch;
    context->saved_data["tokens"] = pass->tokens;
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto integer = [&](const char* name) { return context->saved_data[name].toInt(); };
    const AttentionPlan plan{.queries_first = saved[kQueriesFirst],
                             .keys_first = saved[kKeysFirst],
                             .queries_max = integer("queries_max"),
                             .keys_max = integer("keys_max"),
                             .rows = saved[kRows],
                             .copies_first = saved[kCopiesFirst],
                             .copies = saved[kCopies]};
    const Pass pass{.batch = integer("batch"),
                    .tokens = integer("tokens"),
                    .ropes = {.full = {saved[kCos], saved[kSin]}, .windowed = {}},
                    .attention = nullptr,
                    .segments = saved[kSegments],
                    .plan = plan,
                    .given_experts = saved[kExperts],
                    .used_experts = {}};
    const Tensor x = saved[kInput].detach().requires_grad_(true);
    torch::AutoGradMode with_gradients(true);
    const Tensor y = run_layer(*reinterpret_cast<const ModelConfig*>(integer("config")), pass, /*index=*/0,
                               *reinterpret_cast<const Transformer::Layer*>(integer("layer")), x);
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

void use_threads(int threads) {
  torch::set_num_threads(threads);
  // OpenBLAS with a thread pool of its own ignores libtorch's setting. Other BLAS libraries lack the symbol.
  if (void* symbol = dlsym(RTLD_DEFAULT, "openblas_set_num_threads")) reinterpret_cast<void (*)(int)>(symbol)(threads);
}

torch::ScalarType default_weight_dtype(const torch::Device& device) {
  return device.is_cpu() ? torch::kFloat : torch::kBFloat16;
}

Tensor attend_causally(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t window) {
  const std::int64_t batch = q.size(0), tokens = q.size(1), heads = q.size(2), dim = q.size(3);
  const std::int64_t kv_heads = k.size(2), group = heads / kv_heads;
  if (q.is_cpu())
    return attend_packed(torch::cat({q, k, v}, 2).flatten(0, 1), heads, kv_heads, uniform_segments(batch, tokens),
                         AttentionMethod::kKernels, window);
  const Tensor keys = k.transpose(1, 2).flatten(0, 1), values = v.transpose(1, 2).flatten(0, 1);
  std::vector<Tensor> parts;
  for (std::int64_t begin = 0; begin < tokens; begin += kQueriesMax) {
    const std::int64_t count = std::min(kQueriesMax, tokens - begin), visible_count = begin + count;
    const Tensor grouped = q.narrow(1, begin, count)
                               .reshape({batch, count, kv_heads, group, dim})
                               .permute({0, 2, 3, 1, 4})
                               .reshape({batch * kv_heads, group * count, dim});
    const Tensor visible_keys = keys.narrow(1, 0, visible_count);
    Tensor scores;
    const bool has_window = window > 0 && window < visible_count;
    if (count == 1 && !has_window) {  // the last query sees all keys
      scores = torch::bmm(visible_keys, grouped.transpose(1, 2));
    } else {
      // [keys, queries]: minus infinity where the key is later than the query, or before its window.
      const Tensor minus_infinity = torch::full({visible_count, count}, -INFINITY, q.options().requires_grad(false));
      Tensor mask = minus_infinity.tril(-begin - 1);
      if (has_window) mask = mask + minus_infinity.triu(window - begin);
      scores = torch::baddbmm(mask.repeat({1, group}).unsqueeze(0), visible_keys, grouped.transpose(1, 2));
    }
    parts.push_back(torch::bmm(scores.softmax(1).transpose(1, 2), values.narrow(1, 0, visible_count))
                        .view({batch, kv_heads, group, count, dim})
                        .permute({0, 3, 1, 2, 4}));
  }
  return (parts.size() == 1 ? parts[0] : torch::cat(parts, 1)).reshape({batch * tokens, heads * dim});
}

Transformer::Transformer(const ModelConfig& config, torch::Device device, std::optional<torch::ScalarType> dtype)
    : config_(config) {
  if (const Status valid = config.validate(); !valid) TORCH_CHECK(false, valid.error().message());
  const auto options = torch::TensorOptions().device(device).dtype(dtype.value_or(default_weight_dtype(device)));
  const auto add = [&](const std::string& name, Tensor tensor) {
    tensor.requires_grad_(true);
    register_path(*this, name, tensor);
    return tensor;
  };
  const std::int64_t hidden = config.hidden_size, inner = config.intermediate_size, dim = config.head_dim;
  embedding_ = add("model.embed_tokens.weight", weight_memory({config.vocab_size, hidden}, options));
  for (std::int64_t i = 0; i < config.layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    const std::int64_t q_rows = config.heads * dim, kv_rows = config.kv_heads * dim;
    const Tensor qkv = weight_memory({q_rows + 2 * kv_rows, hidden}, options);
    Layer layer;
    layer.qkv = qkv;
    layer.q = add(prefix + "self_attn.q_proj.weight", qkv.narrow(0, 0, q_rows).detach());
    layer.k = add(prefix + "self_attn.k_proj.weight", qkv.narrow(0, q_rows, kv_rows).detach());
    layer.v = add(prefix + "self_attn.v_proj.weight", qkv.narrow(0, q_rows + kv_rows, kv_rows).detach());
    layer.o = add(prefix + "self_attn.o_proj.weight", weight_memory({hidden, q_rows}, options));
    if (config.qkv_bias()) {
      layer.qkv_bias = weight_memory({q_rows + 2 * kv_rows}, options);
      layer.q_bias = add(prefix + "self_attn.q_proj.bias", layer.qkv_bias.narrow(0, 0, q_rows).detach());
      layer.k_bias = add(prefix + "self_attn.k_proj.bias", layer.qkv_bias.narrow(0, q_rows, kv_rows).detach());
      layer.v_bias =
          add(prefix + "self_attn.v_proj.bias", layer.qkv_bias.narrow(0, q_rows + kv_rows, kv_rows).detach());
    }
    if (config.qk_norm()) {
      layer.q_norm = add(prefix + "self_attn.q_norm.weight", weight_memory({dim}, options));
      layer.k_norm = add(prefix + "self_attn.k_norm.weight", weight_memory({dim}, options));
    }
    // On a GPU, gate and up share memory, so that they can be one product. Each half must begin at a multiple of 256
    // bytes, which the GPU's code needs.
    constexpr std::int64_t kAlignedValues = 128;  // values of 2 bytes in 256 bytes
    const bool has_joint_gate_up = !device.is_cpu() && !config.is_mixture(i) && inner * hidden % kAlignedValues == 0;
    if (has_joint_gate_up) layer.gate_up = weight_memory({2 * inner, hidden}, options);
    const auto half = [&](std::int64_t begin) {
      return has_joint_gate_up ? layer.gate_up.narrow(0, begin, inner).detach()
                               : weight_memory({inner, hidden}, options);
    };
    if (config.is_mixture(i)) {
      const std::int64_t expert_inner = config.experts->intermediate_size;
      layer.router = add(prefix + "mlp.gate.weight", weight_memory({config.experts->count, hidden}, options));
      for (std::int64_t e = 0; e < config.experts->count; ++e) {
        const std::string expert_prefix = prefix + "mlp.experts." + std::to_string(e) + ".";
        layer.experts.push_back(
            {.gate = add(expert_prefix + "gate_proj.weight", weight_memory({expert_inner, hidden}, options)),
             .up = add(expert_prefix + "up_proj.weight", weight_memory({expert_inner, hidden}, options)),
             .down = add(expert_prefix + "down_proj.weight", weight_memory({hidden, expert_inner}, options))});
      }
    } else {
      layer.gate = add(prefix + "mlp.gate_proj.weight", half(0));
      layer.up = add(prefix + "mlp.up_proj.weight", half(inner));
      layer.down = add(prefix + "mlp.down_proj.weight", weight_memory({hidden, inner}, options));
    }
    layer.input_norm = add(prefix + "input_layernorm.weight", weight_memory({hidden}, options));
    if (config.has_output_norms()) {
      layer.attended_norm = add(prefix + "post_attention_layernorm.weight", weight_memory({hidden}, options));
      layer.post_norm = add(prefix + "pre_feedforward_layernorm.weight", weight_memory({hidden}, options));
      layer.mlp_out_norm = add(prefix + "post_feedforward_layernorm.weight", weight_memory({hidden}, options));
    } else {
      layer.post_norm = add(prefix + "post_attention_layernorm.weight", weight_memory({hidden}, options));
    }
    layer.window = config.window_of(i);
    layers_.push_back(std::move(layer));
  }
  norm_ = add("model.norm.weight", weight_memory({hidden}, options));
  lm_head_ =
      config.tie_embeddings ? embedding_ : add("lm_head.weight", weight_memory({config.vocab_size, hidden}, options));
  if (config.adapter) {
    config_.adapter.reset();
    if (const Status added = add_adapter(*config.adapter); !added) TORCH_CHECK(false, added.error().message());
  }
}

Status Transformer::add_adapter(const AdapterConfig& adapter) {
  ECHO_CHECK(!config_.adapter, "a model has one adapter at most");
  ModelConfig config = config_;
  config.adapter = adapter;
  ECHO_TRY(check_adapter_computable(config));
  ECHO_ASSIGN(const delta::StateView layout, policy_layout(config));
  const auto options = torch::TensorOptions().device(device()).dtype(dtype());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    const std::pair<const char*, Layer::LowRank*> places[] = {
        {"self_attn.q_proj", &layer.q_low}, {"self_attn.k_proj", &layer.k_low}, {"self_attn.v_proj", &layer.v_low},
        {"self_attn.o_proj", &layer.o_low}, {"mlp.gate_proj", &layer.gate_low}, {"mlp.up_proj", &layer.up_low},
        {"mlp.down_proj", &layer.down_low}};
    for (const auto& [name, low] : places) {
      const std::string prefix = fmt::format("{}model.layers.{}.{}.", kAdapterPrefix, i, name);
      low->scale = adapter.scale();
      for (auto& [part, tensor] : {std::pair{"lora_A.weight", &low->a}, std::pair{"lora_B.weight", &low->b}}) {
        const auto place = std::find_if(layout.begin(), layout.end(),
                                        [&, wanted = prefix + part](const auto& t) { return t.name == wanted; });
        if (place == layout.end()) continue;  // this weight is no target of the adapter
        *tensor = torch::empty(place->shape, options).requires_grad_(true);
        register_path(*this, place->name, *tensor);
      }
    }
  }
  config_ = config;
  return ok();
}

void Transformer::freeze_base() {
  torch::NoGradGuard no_gradient;
  for (auto& item : named_parameters()) {
    if (is_adapter_tensor(item.key())) continue;
    item.value().requires_grad_(false);
    item.value().copy_(item.value().to(torch::kBFloat16));  // policies contain the base in bf16
  }
}

Transformer::~Transformer() = default;

torch::Device Transformer::device() const { return embedding_.device(); }
torch::ScalarType Transformer::dtype() const { return embedding_.scalar_type(); }

// Makes the tables of cosines and sines, by which queries and keys are rotated, long enough for these positions.
void Transformer::ensure_rope_covers(std::int64_t positions) {
  if (rope_cos_.defined() && rope_cos_.size(0) >= positions) return;
  TORCH_CHECK(positions <= config_.positions_max, "position ", positions, " is beyond positions_max ",
              config_.positions_max);
  torch::NoGradGuard no_grad;
  constexpr std::int64_t kRowsMin = 256;
  // Twice as many as needed, so that a growing text does not need a new table for every token.
  const std::int64_t rows = std::min(config_.positions_max, std::max(kRowsMin, 2 * positions));
  // Angles are computed in double. cos and sin contain the root of the scores' scale. It applies to queries and to
  // keys, so their product contains the scale.
  const auto log_frequencies = [&](double theta) {
    const std::int64_t half = config_.head_dim / 2;
    return torch::arange(half, torch::kDouble) * (-2.0 * std::log(theta) / double(2 * half));
  };
  const auto set_tables = [&](const Tensor& radians_per_position, Tensor& cos_table, Tensor& sin_table) {
    const Tensor angles = torch::outer(torch::arange(rows, torch::kDouble), radians_per_position);
    const double scale = std::sqrt(config_.score_scale());
    const Tensor cos = angles.cos() * scale, sin = angles.sin() * scale;
    // Value i of a head is rotated together with value i + half of its values.
    cos_table = torch::cat({cos, cos}, 1).to(torch::kFloat).to(device());
    sin_table = torch::cat({-sin, sin}, 1).to(torch::kFloat).to(device());
  };
  Tensor radians_per_position = log_frequencies(config_.rope_theta).exp();
  if (config_.rope_scaling && config_.rope_scaling->is_linear) {
    radians_per_position = radians_per_position / config_.rope_scaling->factor;
  } else if (config_.rope_scaling) {
    const RopeScaling& scaling = *config_.rope_scaling;
    // Full turns of each rotation within the original positions.
    const double pi = std::acos(-1.0);
    const Tensor original_turns = radians_per_position * (double(scaling.original_positions) / (2 * pi));
    const Tensor unscaled_share =
        ((original_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1);
    radians_per_position = radians_per_position * (unscaled_share + (1 - unscaled_share) / scaling.factor);
  }
  if (config_.family == Family::kGemma3)
    set_tables(log_frequencies(config_.local_rope_theta).exp(), local_rope_cos_, local_rope_sin_);
  set_tables(radians_per_position, rope_cos_, rope_sin_);
}

Tensor Transformer::hidden_states(const Tensor& ids, const Tensor& positions, Attention* attention, Routing* routing) {
  return apply_last_norm(run_layers(ids, positions, attention, /*segments=*/{}, routing, /*compute_fp32=*/true))
      .view({ids.size(0), ids.size(1), config_.hidden_size});
}

Transformer::Parts Transformer::parts(std::int64_t positions) {
  ensure_rope_covers(positions);
  return {.embedding = embedding_,
          .norm = norm_,
          .lm_head = lm_head_,
          .layers = &layers_,
          .cos = rope_cos_,
          .sin = rope_sin_};
}

Tensor Transformer::apply_last_norm(const Tensor& x) const {
  return rms_norm(x, norm_factor(config_, norm_), config_.rms_norm_eps);
}

Tensor Transformer::run_layers(const Tensor& ids, const Tensor& positions, Attention* attention, const Tensor& segments,
                               Routing* routing, bool compute_fp32) {
  TORCH_CHECK(ids.dim() == 2 && ids.scalar_type() == torch::kLong, "ids is not int64 [batch, tokens]");
  Pass pass{.batch = ids.size(0),
            .tokens = ids.size(1),
            .ropes = {},
            .attention = attention,
            .segments = segments,
            .plan = {},
            .given_experts = {},
            .used_experts = {}};
  if (!attention && !segments.defined()) pass.segments = uniform_segments(pass.batch, pass.tokens);
  if (!attention && device().is_cuda())
    // If several query heads share a key head, the backward pass repeats the keys, which it can do only as it gathers
    // them.
    pass.plan = attention_plan(pass.segments, /*gathers=*/config_.heads > config_.kv_heads, device());
  Tensor flat_positions;
  if (positions.defined()) {
    TORCH_CHECK(positions.sizes() == ids.sizes(), "positions is not [batch, tokens]");
    ensure_rope_covers(positions.max().item<std::int64_t>() + 1);
    flat_positions = upload(positions.reshape({-1}), device());
  } else {
    ensure_rope_covers(pass.tokens);
  }
  const auto rows_of = [&](const Tensor& table) {
    return flat_positions.defined() ? table.index_select(0, flat_positions) : table.narrow(0, 0, pass.tokens);
  };
  pass.ropes.full = {.cos = rows_of(rope_cos_), .sin = rows_of(rope_sin_)};
  if (local_rope_cos_.defined())
    pass.ropes.windowed = {.cos = rows_of(local_rope_cos_), .sin = rows_of(local_rope_sin_)};
  Tensor x = torch::embedding(embedding_, ids).flatten(0, 1);
  if (routing && routing->given.defined())
    TORCH_CHECK(config_.experts && routing->given.sizes() == torch::IntArrayRef({x.size(0), config_.mixture_layers(),
                                                                                 config_.experts->per_token}),
                "the given experts are not [tokens, mixture layers, experts per token]");
  std::vector<Tensor> used_experts;  // by mixture layer
  const bool has_gradients = torch::GradMode::is_enabled(),
             uses_cpu_pass = compute_fp32 && x.is_cpu() && !has_gradients;
  if (uses_cpu_pass) x = x.to(torch::kFloat).contiguous();
  if (const double scale = config_.embedding_scale(); scale != 1) x = x * scale;
  if (uses_cpu_pass) {
    cpu_pass(config_, layers_, x, pass.tokens, pass.ropes, attention, pass.segments,
             routing ? routing->given : Tensor(), used_experts);
  } else {
    // If the embedding is frozen, x needs no gradient. libtorch would then skip Recomputed's backward pass, and with it
    // the gradients of the adapter.
    if (recompute_ && has_gradients && !attention && !x.requires_grad()) x = x.detach().requires_grad_(true);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const bool is_mixture = layers_[i].router.defined();
      pass.given_experts = is_mixture && routing && routing->given.defined()
                               ? routing->given.select(1, std::ssize(used_experts))
                               : Tensor();
      pass.used_experts = Tensor();
      x = recompute_ && has_gradients && !attention ? Recomputed::apply(x, &config_, &layers_[i], &pass)
                                                    : run_layer(config_, pass, i, layers_[i], x);
      if (is_mixture) used_experts.push_back(pass.used_experts);
    }
  }
  if (routing && routing->records && !used_experts.empty())
    routing->used = torch::stack(used_experts, 1).to(torch::kCPU, torch::kShort);
  return x;
}

Tensor Transformer::logits(const Tensor& hidden) const {
  return hidden.dim() == 2 ? linear_product(hidden, lm_head_).to(torch::kFloat)
                           : torch::linear(hidden, lm_head_.to(hidden.scalar_type())).to(torch::kFloat);
}

Tensor Transformer::forward(const Tensor& ids) { return logits(hidden_states(ids)); }

TokenScores Transformer::token_logprobs(const Tensor& ids, double temperature, const Tensor& mask, bool as_trained) {
  TORCH_CHECK(ids.dim() == 2 && ids.size(1) >= 2, "ids is not [batch, at least 2 tokens]");
  TORCH_CHECK(temperature > 0, "temperature ", temperature, " is not positive");
  const std::int64_t score_count = ids.size(1) - 1;  // per row: every token but the first is scored
  const std::vector<std::int64_t> shape{ids.size(0), score_count};
  const Tensor hidden = run_layers(ids.narrow(1, 0, score_count), /*positions=*/{}, /*attention=*/nullptr,
                                   /*segments=*/{}, /*routing=*/nullptr, /*compute_fp32=*/!as_trained);
  const Tensor targets = ids.narrow(1, 1, score_count).reshape({-1});
  if (!mask.defined()) {
    const LinearScores scores = linear_scores(apply_last_norm(hidden), lm_head_, targets, temperature);
    return {scores.logprobs.view(shape), scores.entropy.view(shape)};
  }
  TORCH_CHECK(mask.sizes() == torch::IntArrayRef(shape), "mask is not [batch, tokens - 1]");
  const Tensor masked_indices = mask.reshape({-1}).nonzero().squeeze(1);
  const LinearScores scores = linear_scores(apply_last_norm(hidden.index_select(0, masked_indices)), lm_head_,
                                            targets.index_select(0, masked_indices), temperature);
  const Tensor zeros = torch::zeros({shape[0] * score_count}, scores.logprobs.options().requires_grad(false));
  return {zeros.index_copy(0, masked_indices, scores.logprobs).view(shape),
          zeros.index_copy(0, masked_indices, scores.entropy).view(shape)};
}

TokenScores Transformer::packed_logprobs(const PackedTokens& packed, double temperature, bool as_trained) {
  TORCH_CHECK(temperature > 0, "temperature ", temperature, " is not positive");
  Routing routing;
  if (packed.experts.defined()) routing.given = packed.experts.view({packed.ids.size(0), config_.mixture_layers(), -1});
  const Tensor hidden = run_layers(packed.ids.unsqueeze(0), packed.positions.unsqueeze(0), /*attention=*/nullptr,
                                   packed.segments, &routing, /*compute_fp32=*/!as_trained);
  const LinearScores scores =
      linear_scores(apply_last_norm(select_rows(hidden, packed.scored)), lm_head_, packed.targets, temperature);
  return {scores.logprobs, scores.entropy};
}

Result<torch::Device> device_named(const std::string& name) {
  constexpr auto kOperation = "choose device";
  if (name == "cpu") return torch::Device(torch::kCPU);
  constexpr std::string_view kNumberedPrefix = "cuda:";
  const bool is_numbered = name.starts_with(kNumberedPrefix);
  const std::string digits = is_numbered ? name.substr(kNumberedPrefix.size()) : "";
  const bool has_number = !digits.empty() && digits.size() <= 2 &&
                          std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (name != "cuda" && !has_number)
    return fail(Code::kInvalid, kOperation, "expected cpu, cuda or cuda:N, found '{}'", name);
  const int index = has_number ? std::stoi(digits) : 0, devices = static_cast<int>(torch::cuda::device_count());
  if (index >= devices)
    return fail(Code::kUnavailable, kOperation, "{} does not exist: libtorch {} sees {} CUDA devices", name,
                TORCH_VERSION, devices);
  return torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(index));
}

Result<std::shared_ptr<Transformer>> create(const ModelConfig& config, torch::Device device,
                                            std::optional<torch::ScalarType> dtype) {
  ECHO_TRY(config.validate());
  try {
    return std::make_shared<Transformer>(config, device, dtype);
  } catch (const c10::Error& e) {
    return fail(Code::kExhausted, "create model", "{}", e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return fail(Code::kExhausted, "create model", "not enough memory for the weights");
  }
}

}  // namespace echoline::model
