#include "model/policy.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/files.hpp"
#include "base/random.hpp"
#include "delta/checkpoint.hpp"
#include "model/finite.hpp"

namespace echoline::model {
namespace {

// In the order in which initial values are drawn.
Result<delta::StateView> tensors_of(const ModelConfig& c) {
  ECHO_TRY(c.validate());
  delta::StateView state;
  const auto add = [&](std::string name, std::vector<std::int64_t> shape) {
    state.push_back({std::move(name), delta::DType::kBF16, std::move(shape), {}});
  };
  add("model.embed_tokens.weight", {c.vocab_size, c.hidden_size});
  for (std::int64_t i = 0; i < c.layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    add(layer + "self_attn.q_proj.weight", {c.heads * c.head_dim, c.hidden_size});
    add(layer + "self_attn.k_proj.weight", {c.kv_heads * c.head_dim, c.hidden_size});
    add(layer + "self_attn.v_proj.weight", {c.kv_heads * c.head_dim, c.hidden_size});
    add(layer + "self_attn.o_proj.weight", {c.hidden_size, c.heads * c.head_dim});
    if (c.qkv_bias()) {
      add(layer + "self_attn.q_proj.bias", {c.heads * c.head_dim});
      add(layer + "self_attn.k_proj.bias", {c.kv_heads * c.head_dim});
      add(layer + "self_attn.v_proj.bias", {c.kv_heads * c.head_dim});
    }
    if (c.qk_norm()) {
      add(layer + "self_attn.q_norm.weight", {c.head_dim});
      add(layer + "self_attn.k_norm.weight", {c.head_dim});
    }
    add(layer + "mlp.gate_proj.weight", {c.intermediate_size, c.hidden_size});
    add(layer + "mlp.up_proj.weight", {c.intermediate_size, c.hidden_size});
    add(layer + "mlp.down_proj.weight", {c.hidden_size, c.intermediate_size});
    add(layer + "input_layernorm.weight", {c.hidden_size});
    add(layer + "post_attention_layernorm.weight", {c.hidden_size});
  }
  add("model.norm.weight", {c.hidden_size});
  if (!c.tie_embeddings) add("lm_head.weight", {c.vocab_size, c.hidden_size});
  return state;
}

// Rounds a finite number to nearest, ties to even.
std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

Result<delta::StateView> policy_layout(const ModelConfig& config) {
  ECHO_TRY(config.check_computable());
  ECHO_ASSIGN(delta::StateView state, tensors_of(config));
  std::sort(state.begin(), state.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return state;
}

Result<delta::OwnedState> init_policy(const ModelConfig& config, std::uint64_t seed) try {
  ECHO_ASSIGN(const delta::StateView drawn, tensors_of(config));
  ECHO_ASSIGN(const delta::StateView layout, policy_layout(config));
  ECHO_ASSIGN(delta::OwnedState state, delta::OwnedState::empty_like(layout));
  // The sum of 4 x 16 uniform bits, centred and scaled to the standard deviation: normal enough for weights, and in
  // integer arithmetic that does not depend on a mathematics library.
  const double unit = config.initializer_range / std::sqrt(4.0 * (65536.0 * 65536.0 - 1) / 12.0);
  std::uint64_t stream = 0;
  for (const delta::TensorView& tensor : drawn) {
    Random random(seed, stream++);
    const auto at = std::lower_bound(layout.begin(), layout.end(), tensor.name,
                                     [](const auto& t, const std::string& name) { return t.name < name; });
    const std::span<std::byte> bytes = state.mutable_bytes(static_cast<std::size_t>(at - layout.begin()));
    for (std::size_t i = 0; i < bytes.size(); i += 2) {
      std::uint16_t value = to_bf16(tensor.name.ends_with(".bias") ? 0.0f : 1.0f);
      if (tensor.shape.size() > 1) {
        const std::uint64_t bits = random.next();
        const std::int64_t sum = std::int64_t(bits & 0xffff) + std::int64_t(bits >> 16 & 0xffff) +
                                 std::int64_t(bits >> 32 & 0xffff) + std::int64_t(bits >> 48);
        value = to_bf16(static_cast<float>((static_cast<double>(sum) - 2.0 * 65535.0) * unit));
      }
      std::memcpy(bytes.data() + i, &value, 2);
    }
  }
  state.seal();
  return state;
} catch (const std::bad_alloc&) {
  return fail(Code::kExhausted, "initialise model", "{} do not fit into memory",
              to_text(memory_estimate(config).policy_bf16));
}

namespace {

const delta::TensorView* find_tensor(const delta::StateView& state, std::string_view name) {
  const auto it = std::find_if(state.begin(), state.end(), [&](const auto& tensor) { return tensor.name == name; });
  return it == state.end() ? nullptr : &*it;
}

Status check_state(const delta::StateView& stored, const delta::StateView& layout, const ModelConfig& config,
                   const std::string& where) {
  for (const delta::TensorView& wanted : layout) {
    const delta::TensorView* it = find_tensor(stored, wanted.name);
    if (!it) return fail(Code::kInvalid, where, "tensor '{}' is missing", wanted.name);
    if (it->shape != wanted.shape)
      return fail(Code::kInvalid, where, "tensor '{}' has shape [{}], expected [{}]", wanted.name,
                  fmt::join(it->shape, ", "), fmt::join(wanted.shape, ", "));
    if (it->dtype != delta::DType::kBF16 && it->dtype != delta::DType::kF32)
      return fail(Code::kInvalid, where, "tensor '{}' has type {}, expected BF16 or F32", wanted.name,
                  delta::dtype_name(it->dtype));
  }
  for (const delta::TensorView& tensor : stored) {
    if (!find_tensor(layout, tensor.name) && !(config.tie_embeddings && tensor.name == "lm_head.weight"))
      return fail(Code::kInvalid, where, "tensor '{}' is unknown to a {} model of {} layers", tensor.name,
                  family_name(config.family), config.layers);
  }
  return ok();
}

}  // namespace

Status check_weights(const std::filesystem::path& folder, const ModelConfig& config) {
  ECHO_ASSIGN(const delta::Checkpoint checkpoint, delta::Checkpoint::open(folder));
  if (config.family == Family::kCarried) return ok();
  ECHO_ASSIGN(const delta::StateView layout, policy_layout(config));
  return check_state(checkpoint.view(), layout, config, folder.string());
}

Result<delta::OwnedState> policy_of(const delta::StateView& state, const ModelConfig& config) {
  if (config.family == Family::kCarried) {
    if (state.empty()) return fail(Code::kInvalid, "read policy", "expected tensors, found none");
    ECHO_TRY(check_finite(state));
    return delta::copy_of(state);
  }
  ECHO_ASSIGN(const delta::StateView layout, policy_layout(config));
  ECHO_TRY(check_state(state, layout, config, "read policy"));
  ECHO_TRY(check_finite(state));
  ECHO_ASSIGN(delta::OwnedState policy, delta::OwnedState::empty_like(layout));
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const delta::TensorView& from = *find_tensor(state, layout[i].name);
    const std::span<std::byte> to = policy.mutable_bytes(i);
    if (from.dtype == delta::DType::kBF16) {
      std::memcpy(to.data(), from.bytes.data(), to.size());
      continue;
    }
    for (std::size_t at = 0; at < to.size(); at += 2) {
      float value = 0;
      std::memcpy(&value, from.bytes.data() + 2 * at, sizeof value);
      const std::uint16_t rounded = to_bf16(value);
      std::memcpy(to.data() + at, &rounded, sizeof rounded);
    }
  }
  policy.seal();
  return policy;
}

Status save_model(const std::filesystem::path& folder, const ModelFiles& files, const delta::StateView& policy,
                  Bytes shard_bytes_max) {
  ECHO_TRY(make_folders(folder));
  ECHO_TRY(delta::write_checkpoint(folder, policy, shard_bytes_max));
  return files.write(folder);
}

}  // namespace echoline::model
