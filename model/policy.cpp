// Implements the layout, initial values, checks and files of policies.
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

// The tensors of a policy. init_policy() draws their values in this order, which must therefore never change.
Result<delta::StateView> tensors_of(const ModelConfig& c) {
  ECHO_TRY(c.validate());
  delta::StateView state;
  const auto add = [&](std::string name, std::vector<std::int64_t> shape) {
    state.push_back({.name = std::move(name), .dtype = delta::DType::kBF16, .shape = std::move(shape), .bytes = {}});
  };
  add("model.embed_tokens.weight", {c.vocab_size, c.hidden_size});
  for (std::int64_t i = 0; i < c.layers; ++i) {
    const std::string prefix = fmt::format("model.layers.{}.", i);
    add(prefix + "self_attn.q_proj.weight", {c.heads * c.head_dim, c.hidden_size});
    add(prefix + "self_attn.k_proj.weight", {c.kv_heads * c.head_dim, c.hidden_size});
    add(prefix + "self_attn.v_proj.weight", {c.kv_heads * c.head_dim, c.hidden_size});
    add(prefix + "self_attn.o_proj.weight", {c.hidden_size, c.heads * c.head_dim});
    if (c.qkv_bias()) {
      add(prefix + "self_attn.q_proj.bias", {c.heads * c.head_dim});
      add(prefix + "self_attn.k_proj.bias", {c.kv_heads * c.head_dim});
      add(prefix + "self_attn.v_proj.bias", {c.kv_heads * c.head_dim});
    }
    if (c.qk_norm()) {
      add(prefix + "self_attn.q_norm.weight", {c.head_dim});
      add(prefix + "self_attn.k_norm.weight", {c.head_dim});
    }
    add(prefix + "mlp.gate_proj.weight", {c.intermediate_size, c.hidden_size});
    add(prefix + "mlp.up_proj.weight", {c.intermediate_size, c.hidden_size});
    add(prefix + "mlp.down_proj.weight", {c.hidden_size, c.intermediate_size});
    add(prefix + "input_layernorm.weight", {c.hidden_size});
    add(prefix + "post_attention_layernorm.weight", {c.hidden_size});
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
  ECHO_ASSIGN(const delta::StateView drawing_order, tensors_of(config));
  ECHO_ASSIGN(const delta::StateView layout, policy_layout(config));
  ECHO_ASSIGN(delta::OwnedState state, delta::OwnedState::empty_like(layout));
  // The sum of 4 x 16 uniform bits, centred and scaled to the standard deviation: normal enough for weights, and in
  // integer arithmetic that does not depend on a mathematics library.
  const double unit = config.initializer_range / std::sqrt(4.0 * (65536.0 * 65536.0 - 1) / 12.0);
  std::uint64_t stream = 0;
  for (const delta::TensorView& tensor : drawing_order) {
    Random random(seed, stream++);
    const auto position = std::lower_bound(layout.begin(), layout.end(), tensor.name,
                                           [](const auto& t, const std::string& name) { return t.name < name; });
    const std::span<std::byte> bytes = state.mutable_bytes(static_cast<std::size_t>(position - layout.begin()));
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

// If the state has the tensor under a longer name: what to do.
std::string rename_hint(const delta::StateView& stored, const std::string& wanted) {
  for (const delta::TensorView& tensor : stored)
    if (tensor.name.ends_with("." + wanted)) {
      const std::string prefix = tensor.name.substr(0, tensor.name.size() - wanted.size());
      return fmt::format(", but there is '{}': if all names begin so, publish with --strip-prefix {}", tensor.name,
                         prefix);
    }
  return "";
}

Status check_state(const delta::StateView& stored, const delta::StateView& layout, const ModelConfig& config,
                   const std::string& where) {
  for (const delta::TensorView& expected : layout) {
    const delta::TensorView* tensor = find_tensor(stored, expected.name);
    if (!tensor)
      return fail(Code::kInvalid, where, "tensor '{}' is missing{}", expected.name, rename_hint(stored, expected.name));
    if (tensor->shape != expected.shape)
      return fail(Code::kInvalid, where, "tensor '{}' has shape [{}], expected [{}]", expected.name,
                  fmt::join(tensor->shape, ", "), fmt::join(expected.shape, ", "));
    if (tensor->dtype != delta::DType::kBF16 && tensor->dtype != delta::DType::kF32)
      return fail(Code::kInvalid, where, "tensor '{}' has type {}, expected BF16 or F32", expected.name,
                  delta::dtype_name(tensor->dtype));
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
    const delta::TensorView& source = *find_tensor(state, layout[i].name);
    const std::span<std::byte> target = policy.mutable_bytes(i);
    if (source.dtype == delta::DType::kBF16) {
      std::memcpy(target.data(), source.bytes.data(), target.size());
      continue;
    }
    for (std::size_t byte = 0; byte < target.size(); byte += 2) {
      float value = 0;
      std::memcpy(&value, source.bytes.data() + 2 * byte, sizeof value);
      const std::uint16_t rounded = to_bf16(value);
      std::memcpy(target.data() + byte, &rounded, sizeof rounded);
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
