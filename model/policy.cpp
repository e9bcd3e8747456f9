// Implements the layout, initial values, checks and files of policies.
#include "model/policy.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "base/files.hpp"
#include "base/random.hpp"
#include "delta/checkpoint.hpp"
#include "model/bf16.hpp"
#include "model/finite.hpp"

namespace echoline::model {
namespace {

// The tensors of a policy without its adapter. init_policy() draws their values in this order, so it must never change.
Result<delta::StateView> tensors_of(const ModelConfig& config) {
  ECHO_TRY(config.validate());
  delta::StateView state;
  const auto add = [&](std::string name, std::vector<std::int64_t> shape) {
    state.push_back({.name = std::move(name), .dtype = delta::DType::kBF16, .shape = std::move(shape), .bytes = {}});
  };
  add("model.embed_tokens.weight", {config.vocab_size, config.hidden_size});
  for (std::int64_t i = 0; i < config.layers; ++i) {
    const std::string prefix = fmt::format("model.layers.{}.", i);
    add(prefix + "self_attn.q_proj.weight", {config.heads * config.head_dim, config.hidden_size});
    add(prefix + "self_attn.k_proj.weight", {config.kv_heads * config.head_dim, config.hidden_size});
    add(prefix + "self_attn.v_proj.weight", {config.kv_heads * config.head_dim, config.hidden_size});
    add(prefix + "self_attn.o_proj.weight", {config.hidden_size, config.heads * config.head_dim});
    if (config.qkv_bias()) {
      add(prefix + "self_attn.q_proj.bias", {config.heads * config.head_dim});
      add(prefix + "self_attn.k_proj.bias", {config.kv_heads * config.head_dim});
      add(prefix + "self_attn.v_proj.bias", {config.kv_heads * config.head_dim});
    }
    if (config.qk_norm()) {
      add(prefix + "self_attn.q_norm.weight", {config.head_dim});
      add(prefix + "self_attn.k_norm.weight", {config.head_dim});
    }
    const auto add_mlp = [&](const std::string& mlp_prefix, std::int64_t inner) {
      add(mlp_prefix + "gate_proj.weight", {inner, config.hidden_size});
      add(mlp_prefix + "up_proj.weight", {inner, config.hidden_size});
      add(mlp_prefix + "down_proj.weight", {config.hidden_size, inner});
    };
    if (config.is_mixture(i)) {
      add(prefix + "mlp.gate.weight", {config.experts->count, config.hidden_size});  // the router
      for (std::int64_t expert = 0; expert < config.experts->count; ++expert)
        add_mlp(fmt::format("{}mlp.experts.{}.", prefix, expert), config.experts->intermediate_size);
    } else {
      add_mlp(prefix + "mlp.", config.intermediate_size);
    }
    add(prefix + "input_layernorm.weight", {config.hidden_size});
    add(prefix + "post_attention_layernorm.weight", {config.hidden_size});
    if (config.has_output_norms()) {
      add(prefix + "pre_feedforward_layernorm.weight", {config.hidden_size});
      add(prefix + "post_feedforward_layernorm.weight", {config.hidden_size});
    }
  }
  add("model.norm.weight", {config.hidden_size});
  if (!config.tie_embeddings) add("lm_head.weight", {config.vocab_size, config.hidden_size});
  return state;
}

}  // namespace

Result<delta::StateView> policy_layout(const ModelConfig& config) {
  ECHO_TRY(config.check_computable());
  ECHO_ASSIGN(delta::StateView state, tensors_of(config));
  if (config.adapter) {
    ECHO_ASSIGN(const delta::StateView adapter, adapter_layout(state, *config.adapter));
    for (const delta::TensorView& tensor : adapter)
      if (tensor.name.find(".layers.") == std::string::npos)
        return fail(Code::kInvalid, "adapter",
                    "'{}' is outside of the decoder's layers, where adapters are not computed", tensor.name);
    state.insert(state.end(), adapter.begin(), adapter.end());
  }
  std::sort(state.begin(), state.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return state;
}

Status check_adapter_computable(const ModelConfig& config) {
  if (!config.adapter || !config.experts) return ok();
  ModelConfig base = config;
  base.adapter.reset();
  ECHO_ASSIGN(const delta::StateView tensors, tensors_of(base));
  ECHO_ASSIGN(const delta::StateView adapter, adapter_layout(tensors, *config.adapter));
  for (const delta::TensorView& tensor : adapter)
    for (const std::string_view part : {".mlp.experts.", ".mlp.gate."})
      if (tensor.name.find(part) != std::string::npos)
        return fail(Code::kInvalid, "adapter",
                    "'{}' is an adapter of {}, which is not implemented: set learner.adapter.targets to matrices of "
                    "attention, such as [q_proj, k_proj, v_proj, o_proj]",
                    tensor.name, part == ".mlp.gate." ? "a router" : "an expert");
  return ok();
}

Result<delta::OwnedState> init_policy(const ModelConfig& config, std::uint64_t seed) try {
  ECHO_ASSIGN(const delta::StateView drawing_order, tensors_of(config));
  ECHO_ASSIGN(const delta::StateView layout, policy_layout(config));
  ECHO_ASSIGN(delta::OwnedState state, delta::OwnedState::empty_like(layout));
  // A value is the sum of four uniform numbers of 16 bits, centred and scaled to the standard deviation. It is nearly
  // normal and, unlike a normal distribution by a mathematics library, has the same bits on every machine.
  // The root below is the standard deviation of that sum: a uniform number of n values has the variance (n² - 1) / 12.
  // 2 * 65535 below is the mean of the sum.
  const double scale = config.initializer_range / std::sqrt(4.0 * (65536.0 * 65536.0 - 1) / 12.0);
  std::uint64_t stream = 0;
  for (const delta::TensorView& tensor : drawing_order) {
    Random random(seed, stream++);
    const auto position =
        std::lower_bound(layout.begin(), layout.end(), tensor.name,
                         [](const auto& entry, const std::string& name) { return entry.name < name; });
    const std::span<std::byte> bytes = state.mutable_bytes(static_cast<std::size_t>(position - layout.begin()));
    for (std::size_t i = 0; i < bytes.size(); i += 2) {
      // For a vector: a bias or a norm.
      std::uint16_t value = to_bf16(tensor.name.ends_with(".bias") || config.norms_add_one() ? 0.0f : 1.0f);
      if (tensor.shape.size() > 1) {
        const std::uint64_t bits = random.next();
        const std::int64_t sum = std::int64_t(bits & 0xffff) + std::int64_t(bits >> 16 & 0xffff) +
                                 std::int64_t(bits >> 32 & 0xffff) + std::int64_t(bits >> 48);
        value = to_bf16(static_cast<float>((static_cast<double>(sum) - 2.0 * 65535.0) * scale));
      }
      std::memcpy(bytes.data() + i, &value, 2);
    }
  }
  if (config.adapter) {
    ECHO_ASSIGN(const delta::OwnedState adapter, init_adapter(drawing_order, *config.adapter, seed));
    for (const delta::TensorView& tensor : adapter.view())
      std::ranges::copy(tensor.bytes, state.mutable_bytes(*state.find(tensor.name)).begin());
  }
  state.seal();
  return state;
} catch (const std::bad_alloc&) {
  return fail(Code::kExhausted, "initialise model", "{} do not fit into memory",
              to_text(memory_estimate(config).policy_bf16));
}

namespace {

// The tensors of a state by name. A mixture of experts has tens of thousands.
using TensorsByName = std::map<std::string_view, const delta::TensorView*>;

TensorsByName by_name(const delta::StateView& state) {
  TensorsByName tensors;
  for (const delta::TensorView& tensor : state) tensors.emplace(tensor.name, &tensor);
  return tensors;
}

const delta::TensorView* find_tensor(const TensorsByName& tensors, std::string_view name) {
  const auto it = tensors.find(name);
  return it == tensors.end() ? nullptr : it->second;
}

// Advice for a message if the state has the missing tensor under a longer name; otherwise empty.
std::string rename_hint(const delta::StateView& stored, const std::string& wanted) {
  for (const delta::TensorView& tensor : stored)
    if (tensor.name.ends_with("." + wanted)) {
      const std::string prefix = tensor.name.substr(0, tensor.name.size() - wanted.size());
      return fmt::format(", but there is '{}': if all names begin so, publish with --strip-prefix {}", tensor.name,
                         prefix);
    }
  return "";
}

// Checks that `stored` has the tensors of `layout` and no others. `where` names the state in messages.
Status check_state(const delta::StateView& stored, const delta::StateView& layout, const ModelConfig& config,
                   const std::string& where) {
  const TensorsByName stored_by_name = by_name(stored), layout_by_name = by_name(layout);
  for (const delta::TensorView& expected : layout) {
    const delta::TensorView* tensor = find_tensor(stored_by_name, expected.name);
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
    const bool repeats_embedding = config.tie_embeddings && tensor.name == "lm_head.weight";
    if (!find_tensor(layout_by_name, tensor.name) && !repeats_embedding)
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

Result<delta::OwnedState> policy_of(const delta::StateView& state, const ModelConfig& config,
                                    const delta::OwnedState::Allocate& allocate, std::shared_ptr<const void> owner) {
  if (config.family == Family::kCarried) {
    if (state.empty()) return fail(Code::kInvalid, "read policy", "expected tensors, found none");
    ECHO_TRY(check_finite(state));
    return owner ? delta::OwnedState::sharing(state, std::move(owner)) : delta::copy_of(state, allocate);
  }
  ECHO_ASSIGN(const delta::StateView layout, policy_layout(config));
  ECHO_TRY(check_state(state, layout, config, "read policy"));
  ECHO_TRY(check_finite(state));
  ECHO_ASSIGN(delta::OwnedState policy, delta::OwnedState::empty_like(layout, allocate));
  const TensorsByName tensors = by_name(state);
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const delta::TensorView& source = *find_tensor(tensors, layout[i].name);
    copy_as_bf16(source, policy.mutable_bytes(i));
  }
  policy.seal();
  return policy;
}

namespace {

// Links the weights in `from`, without an adapter's. Returns whether all are linked; if not, `to` has none of them.
bool link_base(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::vector<std::filesystem::path> linked;
  std::error_code ec;
  for (std::filesystem::directory_iterator it(from, ec), end; !ec && it != end; it.increment(ec)) {
    const std::string name = it->path().filename().string();
    if (name == delta::kAdapterFileName || name.find(".safetensors") == std::string::npos) continue;
    std::filesystem::create_hard_link(it->path(), to / name, ec);
    if (!ec) linked.push_back(to / name);
  }
  if (!ec && !linked.empty()) return true;
  for (const std::filesystem::path& file : linked) std::filesystem::remove(file, ec);
  return false;
}

}  // namespace

Status save_model(const std::filesystem::path& folder, const ModelFiles& files, const delta::StateView& policy,
                  Bytes shard_bytes_max, const std::optional<std::filesystem::path>& same_base) {
  ECHO_TRY(make_folders(folder));
  const SplitPolicy parts = split_adapter(policy);
  if (!same_base || !link_base(*same_base, folder))
    ECHO_TRY(delta::write_checkpoint(folder, parts.base, shard_bytes_max));
  if (files.config.adapter) {
    ECHO_TRY(delta::write_safetensors(folder / delta::kAdapterFileName, parts.adapter, {{"format", "pt"}}));
    ECHO_TRY(write_file_atomic(folder / kAdapterConfigFile, files.config.adapter->to_json()));
  }
  return files.write(folder);
}

}  // namespace echoline::model
