// Reads and writes adapter_config.json, and lays out, initialises, joins and merges adapters.
#include "model/adapter.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "base/random.hpp"
#include "model/bf16.hpp"

namespace echoline::model {
namespace {

using nlohmann::json;

// Fields of adapter_config.json that change neither tensors nor arithmetic.
constexpr const char* kHarmlessFields[] = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size",       "revision",       "runtime_config",    "task_type"};
// Fields that from_json() reads or checks.
constexpr const char* kReadFields[] = {"peft_type", "r", "lora_alpha", "target_modules", "bias"};
constexpr std::string_view kWeight = ".weight";
constexpr std::string_view kEmbedding = "embed_tokens";

template <class... Args>
Error adapter_error(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kInvalid, kAdapterConfigFile, format, std::forward<Args>(args)...);
}

// Whether a field with this value turns its feature off.
bool is_neutral(const json& value) {
  return value.is_null() || value == false || (value.is_structured() && value.empty()) || value == "" || value == 0;
}

template <std::size_t N>
bool contains(const char* const (&names)[N], const std::string& name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// X for a matrix that is called X.weight; empty for any other tensor.
std::string_view layer_name(const delta::TensorView& tensor) {
  const std::string_view name = tensor.name;
  if (tensor.shape.size() != 2 || !name.ends_with(kWeight)) return {};
  return name.substr(0, name.size() - kWeight.size());
}

std::string_view last_part(std::string_view layer) { return layer.substr(layer.rfind('.') + 1); }

// One value of a tensor of type BF16 or F32, as float.
float read_value(const delta::TensorView& tensor, std::size_t index) {
  if (tensor.dtype == delta::DType::kF32) {
    float value = 0;
    std::memcpy(&value, tensor.bytes.data() + 4 * index, sizeof value);
    return value;
  }
  std::uint16_t upper = 0;
  std::memcpy(&upper, tensor.bytes.data() + 2 * index, sizeof upper);
  return std::bit_cast<float>(std::uint32_t{upper} << 16);
}

void write_value(std::span<std::byte> bytes, delta::DType dtype, std::size_t index, float value) {
  if (dtype == delta::DType::kF32) {
    std::memcpy(bytes.data() + 4 * index, &value, sizeof value);
    return;
  }
  const std::uint16_t rounded = to_bf16(value);
  std::memcpy(bytes.data() + 2 * index, &rounded, sizeof rounded);
}

std::vector<float> values_of(const delta::TensorView& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.shape[0] * tensor.shape[1]));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = read_value(tensor, i);
  return values;
}

Status check_mergeable(const delta::TensorView& tensor) {
  if (tensor.dtype == delta::DType::kBF16 || tensor.dtype == delta::DType::kF32) return ok();
  return fail(Code::kInvalid, "merge adapter", "tensor '{}' has type {}, expected BF16 or F32", tensor.name,
              delta::dtype_name(tensor.dtype));
}

const delta::TensorView* find(const delta::StateView& state, std::string_view name) {
  const auto it = std::find_if(state.begin(), state.end(), [&](const auto& tensor) { return tensor.name == name; });
  return it == state.end() ? nullptr : &*it;
}

}  // namespace

Status AdapterConfig::validate() const {
  if (rank < 1 || rank > kAdapterRankMax)
    return adapter_error("'r' is {}, expected a rank from 1 to {}", rank, kAdapterRankMax);
  if (!std::isfinite(alpha) || alpha <= 0)
    return adapter_error("'lora_alpha' is {}, expected a positive number", alpha);
  if (targets.empty()) return adapter_error("'target_modules' is empty, expected names of layers, such as \"q_proj\"");
  for (const std::string& target : targets)
    if (target.empty() || target.size() > delta::kNameBytesMax || target == kEmbedding)
      return adapter_error(
          "'target_modules' has '{}', expected names of linear layers, such as \"q_proj\": adapters of embeddings are "
          "not implemented",
          target);
  return ok();
}

Result<AdapterConfig> AdapterConfig::from_json(std::string_view text) {
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object())
    return adapter_error("expected a JSON object, found {}", root.is_discarded() ? "malformed JSON" : root.type_name());
  const auto get = [&](const char* name) {
    const auto it = root.find(name);
    return it == root.end() ? json() : *it;
  };
  if (get("peft_type") != "LORA")
    return adapter_error("'peft_type' is {}, expected \"LORA\": other adapters are not implemented",
                         get("peft_type").dump());
  if (const json bias = get("bias"); !is_neutral(bias) && bias != "none")
    return adapter_error("'bias' is {}, expected \"none\": trained biases are not implemented", bias.dump());
  for (const auto& [name, value] : root.items())
    if (!contains(kHarmlessFields, name) && !contains(kReadFields, name) && !is_neutral(value))
      return adapter_error("'{}' is {}, expected none: it is not implemented", name, value.dump());
  AdapterConfig config;
  const json rank = get("r"), alpha = get("lora_alpha"), targets = get("target_modules"),
             base = get("base_model_name_or_path");
  if (!rank.is_number_integer() || rank < 1 || rank > kAdapterRankMax)
    return adapter_error("'r' is {}, expected a rank from 1 to {}", rank.dump(), kAdapterRankMax);
  config.rank = rank.get<std::int64_t>();
  if (!alpha.is_number()) return adapter_error("'lora_alpha' is {}, expected a positive number", alpha.dump());
  config.alpha = alpha.get<double>();
  if (!targets.is_array() || !std::all_of(targets.begin(), targets.end(), [](const json& t) { return t.is_string(); }))
    return adapter_error("'target_modules' is {}, expected a list of names of layers: patterns are not implemented",
                         targets.dump());
  const std::set<std::string> sorted_targets(targets.begin(), targets.end());
  config.targets.assign(sorted_targets.begin(), sorted_targets.end());
  if (base.is_string()) config.base_model = base.get<std::string>();
  ECHO_TRY(config.validate());
  return config;
}

std::string AdapterConfig::to_json() const {
  // PEFT declares lora_alpha as an integer.
  const auto whole_alpha = static_cast<std::int64_t>(alpha);
  const bool is_whole = static_cast<double>(whole_alpha) == alpha;
  const nlohmann::ordered_json root = {{"peft_type", "LORA"},
                                       {"task_type", "CAUSAL_LM"},
                                       {"base_model_name_or_path", base_model.empty() ? json() : json(base_model)},
                                       {"r", rank},
                                       {"lora_alpha", is_whole ? json(whole_alpha) : json(alpha)},
                                       {"target_modules", targets},
                                       {"lora_dropout", 0.0},
                                       {"bias", "none"},
                                       {"fan_in_fan_out", false},
                                       {"use_dora", false},
                                       {"use_rslora", false},
                                       {"modules_to_save", nullptr},
                                       {"inference_mode", true}};
  return root.dump(2) + "\n";
}

Result<delta::StateView> adapter_layout(const delta::StateView& base, const AdapterConfig& adapter) {
  ECHO_TRY(adapter.validate());
  delta::StateView layout;
  std::set<std::string, std::less<>> used_targets, possible_targets;
  for (const delta::TensorView& tensor : base) {
    const std::string_view layer = layer_name(tensor);
    if (layer.empty() || is_adapter_tensor(layer) || last_part(layer) == kEmbedding) continue;
    possible_targets.emplace(last_part(layer));
    // As in PEFT, a target may also be a longer end of the name, such as "self_attn.q_proj".
    const auto target = std::find_if(adapter.targets.begin(), adapter.targets.end(), [&](const std::string& t) {
      return layer == t || (layer.ends_with(t) && layer[layer.size() - t.size() - 1] == '.');
    });
    if (target == adapter.targets.end()) continue;
    used_targets.insert(*target);
    const auto add_matrix = [&](const char* part, std::vector<std::int64_t> shape) {
      layout.push_back({.name = fmt::format("{}{}.{}.weight", kAdapterPrefix, layer, part),
                        .dtype = delta::DType::kBF16,
                        .shape = std::move(shape),
                        .bytes = {}});
    };
    add_matrix("lora_A", {adapter.rank, tensor.shape[1]});
    add_matrix("lora_B", {tensor.shape[0], adapter.rank});
  }
  for (const std::string& target : adapter.targets)
    if (!used_targets.contains(target))
      return fail(Code::kInvalid, "adapter", "the target '{}' is no matrix of the model, which has {}", target,
                  possible_targets.empty() ? "none" : fmt::format("{}", fmt::join(possible_targets, ", ")));
  std::sort(layout.begin(), layout.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return layout;
}

Result<delta::OwnedState> init_adapter(const delta::StateView& base, const AdapterConfig& adapter, std::uint64_t seed) {
  ECHO_ASSIGN(const delta::StateView layout, adapter_layout(base, adapter));
  ECHO_ASSIGN(delta::OwnedState state, delta::OwnedState::empty_like(layout));
  // Mixed into the seed, so that the adapter's numbers differ from those of a base with the same seed.
  constexpr std::uint64_t kSeedMark = 0x61646170746572;  // "adapter" in ASCII
  for (std::size_t t = 0; t < layout.size(); ++t) {
    const std::span<std::byte> bytes = state.mutable_bytes(t);
    if (layout[t].name.ends_with(".lora_B.weight")) {
      std::fill(bytes.begin(), bytes.end(), std::byte{0});
      continue;
    }
    Random random(mix64(seed ^ kSeedMark), t);
    const double bound = 1 / std::sqrt(static_cast<double>(layout[t].shape[1]));
    for (std::size_t i = 0; i < bytes.size() / 2; ++i)
      write_value(bytes, delta::DType::kBF16, i, static_cast<float>((2 * random.uniform() - 1) * bound));
  }
  state.seal();
  return state;
}

SplitPolicy split_adapter(const delta::StateView& state) {
  SplitPolicy parts;
  for (const delta::TensorView& tensor : state)
    (is_adapter_tensor(tensor.name) ? parts.adapter : parts.base).push_back(tensor);
  return parts;
}

Result<delta::StateView> join_adapter(const delta::StateView& base, const delta::StateView& adapter,
                                      const AdapterConfig& config) {
  constexpr auto kOperation = "adapter";
  if (const auto it = std::find_if(base.begin(), base.end(), [](const auto& t) { return is_adapter_tensor(t.name); });
      it != base.end())
    return fail(Code::kInvalid, kOperation, "the base has the tensor '{}' of an adapter", it->name);
  ECHO_ASSIGN(const delta::StateView layout, adapter_layout(base, config));
  for (const delta::TensorView& expected : layout) {
    const delta::TensorView* tensor = find(adapter, expected.name);
    if (!tensor) return fail(Code::kInvalid, kOperation, "tensor '{}' is missing", expected.name);
    if (tensor->shape != expected.shape)
      return fail(Code::kInvalid, kOperation, "tensor '{}' has shape [{}], expected [{}]", expected.name,
                  fmt::join(tensor->shape, ", "), fmt::join(expected.shape, ", "));
  }
  for (const delta::TensorView& tensor : adapter)
    if (!find(layout, tensor.name))
      return fail(Code::kInvalid, kOperation,
                  "tensor '{}' does not belong to an adapter of rank {} on {}; expected names such as '{}'",
                  tensor.name, config.rank, fmt::join(config.targets, ", "), layout.front().name);
  delta::StateView policy = base;
  policy.insert(policy.end(), adapter.begin(), adapter.end());
  return delta::canonical(std::move(policy));
}

Result<delta::OwnedState> merge_adapter(const delta::StateView& policy, const AdapterConfig& config) {
  const SplitPolicy parts = split_adapter(policy);
  ECHO_TRY(join_adapter(parts.base, parts.adapter, config));  // only to check names and shapes
  ECHO_ASSIGN(delta::OwnedState merged, delta::copy_of(parts.base));
  const delta::StateView merged_view = merged.view();
  const auto scale = static_cast<float>(config.scale());
  for (std::size_t t = 0; t < merged_view.size(); ++t) {
    const std::string_view layer = layer_name(merged_view[t]);
    const delta::TensorView* const a = find(parts.adapter, fmt::format("{}{}.lora_A.weight", kAdapterPrefix, layer));
    const delta::TensorView* const b = find(parts.adapter, fmt::format("{}{}.lora_B.weight", kAdapterPrefix, layer));
    if (layer.empty() || a == nullptr || b == nullptr) continue;  // not adapted: the base's weight stays
    for (const delta::TensorView* tensor : {&merged_view[t], a, b}) ECHO_TRY(check_mergeable(*tensor));
    const auto out = static_cast<std::size_t>(merged_view[t].shape[0]),
               in = static_cast<std::size_t>(merged_view[t].shape[1]);
    const auto rank = static_cast<std::size_t>(config.rank);
    const std::vector<float> a_values = values_of(*a), b_values = values_of(*b);
    std::vector<float> row(in);  // one row of alpha / rank * B A
    const std::span<std::byte> bytes = merged.mutable_bytes(t);
    for (std::size_t o = 0; o < out; ++o) {
      std::fill(row.begin(), row.end(), 0.0f);
      for (std::size_t r = 0; r < rank; ++r) {
        const float factor = scale * b_values[o * rank + r];
        const float* const a_row = a_values.data() + r * in;
        for (std::size_t i = 0; i < in; ++i) row[i] += factor * a_row[i];
      }
      for (std::size_t i = 0; i < in; ++i)
        write_value(bytes, merged_view[t].dtype, o * in + i, read_value(merged_view[t], o * in + i) + row[i]);
    }
  }
  merged.seal();
  return merged;
}

}  // namespace echoline::model
