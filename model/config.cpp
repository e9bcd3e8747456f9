// Reads, writes and checks config.json, and defines the presets.
#include "model/config.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "delta/checkpoint.hpp"
#include "model/bf16.hpp"
#include "model/policy.hpp"
#include "model/tokenizer.hpp"

namespace echoline::model {
namespace {

using nlohmann::json;
constexpr std::string_view kErrorSource = "config.json";
constexpr std::uint64_t kModelConfigBytesMax = 16 << 20;
constexpr std::int64_t kLayersMax = 4096;  // that a model has
constexpr std::size_t kDenseLayersMax = kLayersMax;
constexpr std::uint64_t kUnsignedMax = std::uint64_t{1} << 62;  // fits in a std::int64_t; far above every valid size

template <class... Args>
Error config_error(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kInvalid, kErrorSource, format, std::forward<Args>(args)...);
}

// Reads fields of one JSON object and keeps the first error. A missing or null field that is not required leaves `out`
// unchanged.
class Fields {
 public:
  explicit Fields(const json& object) : object_(object) {}
  // Null if the field is missing or null.
  const json* get(const char* name) const {
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  void read_integer(const char* name, std::int64_t& out, bool required = true) {
    const json* value = get(name);
    if (!value) {
      if (required) record_error(config_error("'{}' is missing, expected an integer", name));
    } else if (!value->is_number_integer() ||
               (value->is_number_unsigned() && value->get<std::uint64_t>() > kUnsignedMax)) {
      record_error(config_error("'{}' is {}, expected an integer", name, value->dump()));
    } else {
      out = value->get<std::int64_t>();
    }
  }
  void read_number(const char* name, double& out) {
    const json* value = get(name);
    if (!value) return;
    if (value->is_number())
      out = value->get<double>();
    else
      record_error(config_error("'{}' is {}, expected a number", name, value->dump()));
  }
  void read_boolean(const char* name, bool& out) {
    const json* value = get(name);
    if (!value) return;
    if (value->is_boolean())
      out = value->get<bool>();
    else
      record_error(config_error("'{}' is {}, expected true or false", name, value->dump()));
  }
  void record_error(Error error) {
    if (!error_) error_ = std::move(error);
  }
  Status status() const { return error_ ? Status(*error_) : ok(); }

 private:
  const json& object_;
  std::optional<Error> error_;
};

Result<Token> token_of(const char* name, const json& value) {
  if (!value.is_number_integer() || value < 0 || value > std::numeric_limits<Token>::max()) {
    return config_error("'{}' is {}, expected a token id", name, value.dump());
  }
  return value.get<Token>();
}

// The implemented families, with the names of their classes in transformers, which config.json calls architectures.
constexpr std::pair<Family, const char*> kFamilies[] = {
    {Family::kQwen3, "Qwen3ForCausalLM"},     {Family::kQwen3Moe, "Qwen3MoeForCausalLM"},
    {Family::kQwen2, "Qwen2ForCausalLM"},     {Family::kLlama, "LlamaForCausalLM"},
    {Family::kMistral, "MistralForCausalLM"}, {Family::kGemma3, "Gemma3ForCausalLM"}};

// Factors that are not implemented, with the value that leaves the arithmetic unchanged. They are checked because a
// model derived from an implemented family may add them and keep its model_type.
constexpr std::pair<const char*, double> kNeutralFactors[] = {
    {"partial_rotary_factor", 1}, {"logits_scaling", 1},       {"logit_scale", 1},
    {"residual_multiplier", 1},   {"embedding_multiplier", 1}, {"attention_multiplier", 1}};
// Fields that are not implemented and change the arithmetic with any value.
constexpr const char* kAbsentFields[] = {"final_logit_softcapping", "attn_logit_softcapping", "clip_qkv",
                                         "no_rope_layers", "n_routed_experts"};
// Number of experts: the published name, and that of transformers 5. A dense family has neither field.
constexpr const char* kExpertCountFields[] = {"num_experts", "num_local_experts"};
// Fields of other mixtures that change the arithmetic with any value.
constexpr const char* kAbsentMixtureFields[] = {"n_shared_experts",
                                                "num_shared_experts",
                                                "shared_expert_intermediate_size",
                                                "n_group",
                                                "topk_group",
                                                "topk_method",
                                                "scoring_func",
                                                "scoring_function",
                                                "routed_scaling_factor",
                                                "moe_layer_freq",
                                                "first_k_dense_replace",
                                                "expert_layer_period"};

// Fails if a field asks for arithmetic that is not implemented.
Status check_arithmetic(const Fields& fields, Family family) {
  for (const auto& [name, neutral] : kNeutralFactors)
    if (const json* value = fields.get(name); value && *value != neutral)
      return config_error("'{}' is {}, expected {}: such a factor is not implemented", name, value->dump(), neutral);
  for (const char* name : kAbsentFields)
    if (const json* value = fields.get(name))
      return config_error("'{}' is {}, expected none: it is not implemented", name, value->dump());
  const bool is_mixture = family == Family::kQwen3Moe;
  for (const char* name : kExpertCountFields)
    if (const json* value = fields.get(name); value && !is_mixture)
      return config_error("'{}' is {}, expected none: of the mixtures of experts, only \"qwen3_moe\" is implemented",
                          name, value->dump());
  for (const char* name : kAbsentMixtureFields)
    if (const json* value = fields.get(name); value && is_mixture)
      return config_error("'{}' is {}, expected none: it is not implemented", name, value->dump());
  if (const json* value = fields.get("query_pre_attn_scalar"); value && family != Family::kGemma3)
    return config_error("'query_pre_attn_scalar' is {}, expected none: only \"gemma3_text\" has it", value->dump());
  if (const json* value = fields.get("use_bidirectional_attention"); value && *value != false)
    return config_error("'use_bidirectional_attention' is {}, expected false: it is not implemented", value->dump());
  return ok();
}

// Sets config.family. Fails if the file turns on a feature that is not implemented.
Status read_family_and_check_features(Fields& fields, ModelConfig& config) {
  const json* type = fields.get("model_type");
  bool is_known = false;
  for (const auto& [family, architecture] : kFamilies)
    if (type && *type == family_name(family)) {
      config.family = family;
      is_known = true;
    }
  if (!is_known) {
    return config_error(
        "'model_type' is {}, expected \"qwen3\", \"qwen3_moe\", \"qwen2\", \"llama\", \"mistral\" or \"gemma3_text\", "
        "the "
        "families implemented",
        type ? type->dump() : "missing");
  }
  const bool is_gemma = config.family == Family::kGemma3;
  const char *const activation_name = is_gemma ? "hidden_activation" : "hidden_act", *const expected_activation =
                                                                                         is_gemma ? "gelu_pytorch_tanh"
                                                                                                  : "silu";
  if (const json* activation = fields.get(activation_name); activation && *activation != expected_activation)
    return config_error("'{}' is {}, expected \"{}\"", activation_name, activation->dump(), expected_activation);
  if (const json* quantization = fields.get("quantization_config"))
    return config_error(
        "'quantization_config' is {}, expected none: quantised weights are not implemented",
        quantization->is_object() ? quantization->value("quant_method", json("an object")).dump() : "set");
  ECHO_TRY(check_arithmetic(fields, config.family));
  bool attention_bias = false, mlp_bias = false;
  fields.read_boolean("mlp_bias", mlp_bias);
  if (config.family != Family::kQwen2) fields.read_boolean("attention_bias", attention_bias);
  ECHO_TRY(fields.status());
  if (attention_bias)
    return config_error("'attention_bias' is true, expected false: biases of this family are not implemented");
  if (mlp_bias) return config_error("'mlp_bias' is true, expected false: biases of the MLP are not implemented");
  for (const char* name : {"torch_dtype", "dtype"}) {
    const json* dtype = fields.get(name);
    if (dtype && *dtype != "bfloat16" && *dtype != "float32") {
      return config_error("'{}' is {}, expected \"bfloat16\" or \"float32\"", name, dtype->dump());
    }
  }
  return ok();
}

// Reads the scaling from `object`, which is the field 'rope_scaling' or, in newer files, 'rope_parameters'.
Result<std::optional<RopeScaling>> read_rope_scaling(const char* name, const json& object) {
  if (!object.is_object()) return config_error("'{}' is {}, expected an object", name, object.dump());
  Fields fields(object);
  const json* type = fields.get("rope_type");
  if (!type) type = fields.get("type");  // the name in older files
  if (!type || *type == "default") return std::optional<RopeScaling>();
  RopeScaling scaling;
  if (*type == "linear") {
    if (!fields.get("factor")) return config_error("'{}.factor' is missing, expected a number", name);
    fields.read_number("factor", scaling.factor);
    ECHO_TRY(fields.status());
    scaling.is_linear = true;
    return std::optional(scaling);
  }
  if (*type != "llama3")
    return config_error(
        "'{}.rope_type' is {}, expected \"default\", \"linear\" or \"llama3\": other scalings are not implemented",
        name, type->dump());
  for (const char* required : {"factor", "low_freq_factor", "high_freq_factor"})
    if (!fields.get(required)) return config_error("'{}.{}' is missing, expected a number", name, required);
  fields.read_number("factor", scaling.factor);
  fields.read_number("low_freq_factor", scaling.low_freq_factor);
  fields.read_number("high_freq_factor", scaling.high_freq_factor);
  fields.read_integer("original_max_position_embeddings", scaling.original_positions);
  ECHO_TRY(fields.status());
  return std::optional(scaling);
}

// Reads the fields of a mixture of experts.
Result<ExpertsConfig> read_experts(const Fields& source) {
  Fields fields = source;
  ExpertsConfig experts;
  const json *published = fields.get(kExpertCountFields[0]), *newer = fields.get(kExpertCountFields[1]);
  if (published && newer && *published != *newer)
    return config_error("'{}' is {} and '{}' is {}, expected the same number or one of them", kExpertCountFields[0],
                        published->dump(), kExpertCountFields[1], newer->dump());
  fields.read_integer(newer ? kExpertCountFields[1] : kExpertCountFields[0], experts.count);
  fields.read_integer("num_experts_per_tok", experts.per_token);
  fields.read_integer("moe_intermediate_size", experts.intermediate_size);
  fields.read_boolean("norm_topk_prob", experts.weights_sum_to_1);
  fields.read_integer("decoder_sparse_step", experts.layer_step, /*required=*/false);
  ECHO_TRY(fields.status());
  if (const json* layers = fields.get("mlp_only_layers")) {
    if (!layers->is_array() || layers->size() > kDenseLayersMax)
      return config_error("'mlp_only_layers' is {}, expected a list of at most {} layers", layers->type_name(),
                          kDenseLayersMax);
    for (const json& layer : *layers) {
      if (!layer.is_number_integer() || layer < 0 || layer >= kDenseLayersMax)
        return config_error("'mlp_only_layers' has {}, expected numbers of layers from 0", layer.dump());
      experts.dense_layers.push_back(layer.get<std::int64_t>());
    }
    std::sort(experts.dense_layers.begin(), experts.dense_layers.end());
  }
  return experts;
}

// Reads the token ids of eos_token_id and bos_token_id.
Status read_special_tokens(const Fields& fields, ModelConfig& config) {
  if (const json* eos = fields.get("eos_token_id")) {
    for (const json& id : eos->is_array() ? *eos : json::array({*eos})) {
      ECHO_ASSIGN(const Token token, token_of("eos_token_id", id));
      config.eos.push_back(token);
    }
  }
  if (const json* bos = fields.get("bos_token_id")) {
    ECHO_ASSIGN(config.bos, token_of("bos_token_id", *bos));
  }
  return ok();
}

constexpr const char *kFullLayer = "full_attention", *kWindowedLayer = "sliding_attention";  // of layer_types

// Reads 'rope_parameters', an object in which newer files have the rotary settings; those of Gemma 3 by type of layer.
Status read_rope_parameters(const json& rope, ModelConfig& config) {
  if (!rope.is_object()) return config_error("'rope_parameters' is {}, expected an object", rope.dump());
  const Fields fields(rope);
  const json *full = fields.get(kFullLayer), *windowed = fields.get(kWindowedLayer);
  if (!full && !windowed) full = &rope;
  if (windowed) {
    if (config.family != Family::kGemma3)
      return config_error("'rope_parameters.{}' is set, expected none: only \"gemma3_text\" has it", kWindowedLayer);
    ECHO_ASSIGN(const std::optional<RopeScaling> scaling, read_rope_scaling("rope_parameters", *windowed));
    if (scaling)
      return config_error("'rope_parameters.{}' is {}, expected the rope_type \"default\"", kWindowedLayer,
                          windowed->dump());
    Fields nested(*windowed);
    nested.read_number("rope_theta", config.local_rope_theta);
    ECHO_TRY(nested.status());
  }
  if (!full) return ok();
  ECHO_ASSIGN(config.rope_scaling, read_rope_scaling("rope_parameters", *full));
  Fields nested(*full);
  nested.read_number("rope_theta", config.rope_theta);
  return nested.status();
}

// Reads which layers have a window, and its size.
Status read_sliding_window(const Fields& source, ModelConfig& config) {
  Fields fields = source;
  const bool is_gemma = config.family == Family::kGemma3, is_mistral = config.family == Family::kMistral;
  const bool is_qwen = config.family == Family::kQwen2 || config.family == Family::kQwen3;
  bool uses_window = false;  // the switch of Qwen
  fields.read_boolean("use_sliding_window", uses_window);
  ECHO_TRY(fields.status());
  if (uses_window && !is_qwen && !is_mistral && !is_gemma)
    return config_error("'use_sliding_window' is true, expected false: windows of this family are not implemented");
  // Mistral has a window unless the field is null; Gemma always has one.
  const json* const size = fields.get("sliding_window");
  const bool has_window = is_gemma || (is_mistral ? size != nullptr : is_qwen && uses_window);
  SlidingWindow window;
  if (has_window) fields.read_integer("sliding_window", window.tokens, /*required=*/false);
  ECHO_TRY(fields.status());
  std::int64_t first_windowed = 28, pattern = 6;  // transformers' values for missing fields
  if (is_qwen && has_window) fields.read_integer("max_window_layers", first_windowed, /*required=*/false);
  if (is_gemma) fields.read_integer("sliding_window_pattern", pattern, /*required=*/false);
  ECHO_TRY(fields.status());
  if (pattern < 1) return config_error("'sliding_window_pattern' is {}, expected 1 or more", pattern);
  const json* const types = fields.get("layer_types");
  if (types && (!types->is_array() || std::ssize(*types) != config.layers))
    return config_error("'layer_types' is {}, expected a list of 'num_hidden_layers' {} types of layers",
                        types->is_array() ? fmt::format("a list of {}", types->size()) : types->type_name(),
                        config.layers);
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    bool is_full = is_gemma ? (layer + 1) % pattern == 0 : is_qwen && layer < first_windowed;
    if (types) {
      const json& type = (*types)[static_cast<std::size_t>(layer)];
      if (type != kFullLayer && (type != kWindowedLayer || !has_window))
        return config_error("'layer_types' has {}, expected \"{}\"{}", type.dump(), kFullLayer,
                            has_window ? fmt::format(" or \"{}\": others are not implemented", kWindowedLayer)
                                       : ": others are not implemented, or need a window");
      if (is_mistral && has_window && window.tokens < config.positions_max && type == kFullLayer)
        return config_error("'layer_types' has {} and 'sliding_window' is {}, expected a window in every layer",
                            type.dump(), window.tokens);
      is_full = type == kFullLayer;
    }
    if (is_full) window.full_layers.push_back(layer);
  }
  // A window of all positions hides nothing. Gemma's layers with a window have other rotations all the same.
  const bool hides = window.tokens < config.positions_max && std::ssize(window.full_layers) < config.layers;
  if (is_gemma || (has_window && hides)) config.sliding_window = std::move(window);
  return ok();
}

// Sets transformers' values for fields that a config.json of Gemma 3 may lack.
void set_gemma_defaults(ModelConfig& config) {
  config.head_dim = 256;
  config.positions_max = 131072;
  config.rope_theta = 1e6;
  config.tie_embeddings = true;
}

// Reads a model that this program can compute; an error for any other.
Result<ModelConfig> read_computable(const json& root) {
  Fields fields(root);
  ModelConfig config;
  ECHO_TRY(read_family_and_check_features(fields, config));
  const bool is_gemma = config.family == Family::kGemma3;
  if (is_gemma) set_gemma_defaults(config);
  fields.read_integer("vocab_size", config.vocab_size);
  fields.read_integer("hidden_size", config.hidden_size);
  fields.read_integer("intermediate_size", config.intermediate_size);
  fields.read_integer("num_hidden_layers", config.layers);
  fields.read_integer("num_attention_heads", config.heads);
  // Hugging Face's defaults: Llama and Qwen2 derive kv_heads and head_dim. Qwen3 has a fixed head_dim (ModelConfig).
  config.kv_heads = config.heads;
  fields.read_integer("num_key_value_heads", config.kv_heads, /*required=*/config.qk_norm());
  if (config.family != Family::kQwen3 && !is_gemma && config.heads > 0)
    config.head_dim = config.hidden_size / config.heads;
  fields.read_integer("head_dim", config.head_dim, /*required=*/false);
  fields.read_integer("max_position_embeddings", config.positions_max, /*required=*/false);
  if (is_gemma) {
    fields.read_integer("query_pre_attn_scalar", config.query_scalar, /*required=*/false);
    fields.read_number("rope_local_base_freq", config.local_rope_theta);
  }
  fields.read_number("rms_norm_eps", config.rms_norm_eps);
  fields.read_number("rope_theta", config.rope_theta);
  fields.read_number("initializer_range", config.initializer_range);
  fields.read_boolean("tie_word_embeddings", config.tie_embeddings);
  if (const json* rope = fields.get("rope_parameters")) ECHO_TRY(read_rope_parameters(*rope, config));
  if (const json* scaling = fields.get("rope_scaling")) {
    ECHO_ASSIGN(config.rope_scaling, read_rope_scaling("rope_scaling", *scaling));
  }
  if (config.family == Family::kQwen3Moe) {
    ECHO_ASSIGN(config.experts, read_experts(fields));
  }
  ECHO_TRY(fields.status());
  if (config.layers >= 1 && config.layers <= kLayersMax) ECHO_TRY(read_sliding_window(fields, config));
  ECHO_TRY(read_special_tokens(fields, config));
  ECHO_TRY(config.validate());
  return config;
}

// Reads a model that this program cannot compute, but carries: it stores the weights and sends them to inference
// servers. Reads the fields that a run needs. Sizes are optional if only memory estimates use them. `text` is the whole
// file, `reason` why the model cannot be computed.
Result<ModelConfig> read_carried(const json& root, std::string_view text, std::string reason) {
  Fields outer(root);
  // Models for text and images keep the decoder's shape in an object of its own.
  const json* decoder = outer.get("text_config");
  Fields fields(decoder && decoder->is_object() ? *decoder : root);
  ModelConfig config;
  config.family = Family::kCarried;
  config.source_json = text;
  config.reason_not_computable = std::move(reason);
  const auto read = [&](const char* name, std::int64_t& out, bool required) {
    const bool is_only_outer = !fields.get(name) && outer.get(name);  // outside of 'text_config'
    (is_only_outer ? outer : fields).read_integer(name, out, required);
  };
  constexpr bool kRequired = true, kOptional = false;
  read("vocab_size", config.vocab_size, kRequired);
  read("max_position_embeddings", config.positions_max, kRequired);
  read("hidden_size", config.hidden_size, kOptional);
  read("num_hidden_layers", config.layers, kOptional);
  read("num_attention_heads", config.heads, kOptional);
  config.kv_heads = config.heads;
  read("num_key_value_heads", config.kv_heads, kOptional);
  if (config.heads > 0) config.head_dim = config.hidden_size / config.heads;
  read("head_dim", config.head_dim, kOptional);
  outer.read_boolean("tie_word_embeddings", config.tie_embeddings);
  ECHO_TRY(outer.status());
  ECHO_TRY(fields.status());
  ECHO_TRY(read_special_tokens(outer.get("eos_token_id") || outer.get("bos_token_id") ? outer : fields, config));
  ECHO_TRY(config.validate());
  return config;
}

}  // namespace

const char* family_name(Family family) {
  switch (family) {
    case Family::kQwen3Moe:
      return "qwen3_moe";
    case Family::kQwen2:
      return "qwen2";
    case Family::kMistral:
      return "mistral";
    case Family::kLlama:
      return "llama";
    case Family::kGemma3:
      return "gemma3_text";
    case Family::kCarried:
      return "carried";
    default:
      return "qwen3";
  }
}

Result<ModelConfig> ModelConfig::from_json(std::string_view text, ModelUse use) {
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object())
    return config_error("expected a JSON object, found {}", root.is_discarded() ? "malformed JSON" : root.type_name());
  auto computable = read_computable(root);
  if (computable || use == ModelUse::kCompute) return computable;
  return read_carried(root, text, computable.error().detail);
}

Result<ModelConfig> ModelConfig::from_folder(const std::filesystem::path& folder, ModelUse use) {
  const std::filesystem::path path = folder / "config.json";
  ECHO_ASSIGN(const std::string text, read_file(path, kModelConfigBytesMax));
  auto config = from_json(text, use);
  if (!config) return fail(config.error().code, path.string(), "{}", config.error().detail);
  if (const std::filesystem::path adapter = folder / kAdapterConfigFile; std::filesystem::exists(adapter)) {
    ECHO_ASSIGN(const std::string adapter_text, read_file(adapter, kModelConfigBytesMax));
    auto read = AdapterConfig::from_json(adapter_text);
    if (!read) return fail(read.error().code, adapter.string(), "{}", read.error().detail);
    config->adapter = *std::move(read);
  }
  if (config->family != Family::kCarried) return config;
  ECHO_ASSIGN(const delta::Checkpoint weights, delta::Checkpoint::open(folder));
  for (const delta::TensorView& tensor : weights.view()) {
    ECHO_ASSIGN(const std::int64_t elements, delta::element_count(tensor.shape));
    config->carried_elements += static_cast<std::uint64_t>(elements);
    config->carried_bytes.count += tensor.bytes.size();
  }
  return config;
}

std::string ModelConfig::summary() const {
  if (family != Family::kCarried)
    return fmt::format("{} of {} parameters{}", family_name(family), parameters(),
                       experts ? fmt::format(", {} of them active", active_parameters()) : "");
  const json root = json::parse(source_json, nullptr, /*allow_exceptions=*/false);
  return fmt::format("{}, carried only{}",
                     root.is_object() ? root.value("model_type", json("unknown")).dump() : "unknown",
                     carried_elements > 0 ? fmt::format(", of {} values", carried_elements) : "");
}

Status ModelConfig::check_computable() const {
  if (family != Family::kCarried) return ok();
  return config_error(
      "{}. This program can only carry such a policy: use learner.trainer: external and an inference server",
      reason_not_computable);
}

std::string ModelConfig::to_json() const {
  if (family == Family::kCarried) return source_json;
  nlohmann::ordered_json fields_of_file = {
      {"architectures",
       {std::find_if(std::begin(kFamilies), std::end(kFamilies),
                     [&](const auto& entry) { return entry.first == family; })
            ->second}},
      {"model_type", family_name(family)},
      {"vocab_size", vocab_size},
      {"hidden_size", hidden_size},
      {"intermediate_size", intermediate_size},
      {"num_hidden_layers", layers},
      {"num_attention_heads", heads},
      {"num_key_value_heads", kv_heads},
      {"head_dim", head_dim},
      {"max_position_embeddings", positions_max},
      {"rms_norm_eps", rms_norm_eps},
      {"rope_theta", rope_theta},
      {"rope_scaling", nullptr},
      {"initializer_range", initializer_range},
      {"tie_word_embeddings", tie_embeddings},
      {"attention_bias", false},  // ignored for Qwen2, whose model_type implies its biases
      {"attention_dropout", 0.0},
      {"hidden_act", "silu"},
      {"use_sliding_window", false},
      {"torch_dtype", "bfloat16"},
      {"use_cache", true},
  };
  if (family == Family::kMistral)
    fields_of_file["sliding_window"] = nullptr;  // without the field, transformers sets a window
  if (family == Family::kGemma3) {
    fields_of_file.erase("hidden_act");
    fields_of_file["hidden_activation"] = "gelu_pytorch_tanh";
    fields_of_file["query_pre_attn_scalar"] = query_scalar;
    fields_of_file["rope_local_base_freq"] = local_rope_theta;
  }
  if (sliding_window) {
    fields_of_file["sliding_window"] = sliding_window->tokens;
    if (family == Family::kQwen2 || family == Family::kQwen3) fields_of_file["use_sliding_window"] = true;
    if (family != Family::kMistral) {
      std::vector<const char*> types;
      for (std::int64_t layer = 0; layer < layers; ++layer)
        types.push_back(window_of(layer) > 0 ? kWindowedLayer : kFullLayer);
      fields_of_file["layer_types"] = types;
    }
  }
  if (rope_scaling && rope_scaling->is_linear)
    fields_of_file["rope_scaling"] = {{"rope_type", "linear"}, {"factor", rope_scaling->factor}};
  if (rope_scaling && !rope_scaling->is_linear)
    fields_of_file["rope_scaling"] = {{"rope_type", "llama3"},
                                      {"factor", rope_scaling->factor},
                                      {"low_freq_factor", rope_scaling->low_freq_factor},
                                      {"high_freq_factor", rope_scaling->high_freq_factor},
                                      {"original_max_position_embeddings", rope_scaling->original_positions}};
  if (experts) {
    fields_of_file["num_experts"] = experts->count;
    fields_of_file["num_experts_per_tok"] = experts->per_token;
    fields_of_file["moe_intermediate_size"] = experts->intermediate_size;
    fields_of_file["norm_topk_prob"] = experts->weights_sum_to_1;
    fields_of_file["decoder_sparse_step"] = experts->layer_step;
    fields_of_file["mlp_only_layers"] = experts->dense_layers;
  }
  if (eos.size() == 1) fields_of_file["eos_token_id"] = eos.front();
  if (eos.size() > 1) fields_of_file["eos_token_id"] = eos;
  if (bos) fields_of_file["bos_token_id"] = *bos;
  return fields_of_file.dump(2) + "\n";
}

Status ModelConfig::validate() const {
  constexpr std::int64_t kExpertsMax = 4096, kExpertsPerTokenMax = 256;
  const struct {
    const char* name;
    std::int64_t value, maximum;
  } sizes[] = {{"vocab_size", vocab_size, 1 << 24},
               {"hidden_size", hidden_size, 1 << 20},
               {"intermediate_size", intermediate_size, 1 << 22},
               {"num_hidden_layers", layers, kLayersMax},
               {"num_attention_heads", heads, 4096},
               {"num_key_value_heads", kv_heads, 4096},
               {"head_dim", head_dim, 4096},
               {"max_position_embeddings", positions_max, 1 << 26}};
  for (const auto& size : sizes) {
    if (size.value < 1 || size.value > size.maximum) {
      return config_error("'{}' is {}, expected 1 to {}", size.name, size.value, size.maximum);
    }
  }
  if (family != Family::kCarried && heads % kv_heads != 0) {
    return config_error("'num_attention_heads' is {}, expected a multiple of 'num_key_value_heads' {}", heads,
                        kv_heads);
  }
  if (family != Family::kCarried && head_dim % 2 != 0)
    return config_error("'head_dim' is {}, expected an even number", head_dim);
  const auto is_positive = [](double x) { return std::isfinite(x) && x > 0; };
  if (!is_positive(rms_norm_eps)) return config_error("'rms_norm_eps' is {}, expected a positive number", rms_norm_eps);
  if (!is_positive(rope_theta)) return config_error("'rope_theta' is {}, expected a positive number", rope_theta);
  if (rope_scaling) {
    const RopeScaling& scaling = *rope_scaling;
    const bool is_valid = is_positive(scaling.factor) && is_positive(scaling.low_freq_factor) &&
                          is_positive(scaling.high_freq_factor) && scaling.low_freq_factor < scaling.high_freq_factor &&
                          scaling.original_positions >= 1;
    if (!is_valid)
      return config_error(
          "'rope_scaling' has factor {}, low_freq_factor {}, high_freq_factor {} and "
          "original_max_position_embeddings {}, expected positive numbers, the low factor below the high one",
          scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_positions);
  }
  if (sliding_window) {
    const bool has_windows =
        family == Family::kQwen2 || family == Family::kQwen3 || family == Family::kMistral || family == Family::kGemma3;
    if (!has_windows) return config_error("a model of the family {} has a sliding window", family_name(family));
    if (sliding_window->tokens < 1 || sliding_window->tokens > 1 << 26)
      return config_error("'sliding_window' is {}, expected 1 to {}", sliding_window->tokens, 1 << 26);
  }
  if (family == Family::kGemma3) {
    if (!sliding_window) return config_error("a model of the family {} has no sliding window", family_name(family));
    if (query_scalar < 1) return config_error("'query_pre_attn_scalar' is {}, expected at least 1", query_scalar);
    if (!is_positive(local_rope_theta))
      return config_error("'rope_local_base_freq' is {}, expected a positive number", local_rope_theta);
  }
  if (experts.has_value() != (family == Family::kQwen3Moe))
    return config_error("a model of the family {} has {}experts", family_name(family), experts ? "" : "no ");
  if (experts) {
    if (experts->count < 1 || experts->count > kExpertsMax)
      return config_error("'num_experts' is {}, expected 1 to {}", experts->count, kExpertsMax);
    if (experts->per_token < 1 || experts->per_token > experts->count || experts->per_token > kExpertsPerTokenMax)
      return config_error("'num_experts_per_tok' is {}, expected 1 to {}", experts->per_token,
                          std::min(experts->count, kExpertsPerTokenMax));
    if (experts->intermediate_size < 1 || experts->intermediate_size > 1 << 22)
      return config_error("'moe_intermediate_size' is {}, expected 1 to {}", experts->intermediate_size, 1 << 22);
    if (experts->layer_step < 1 || experts->layer_step > layers)
      return config_error("'decoder_sparse_step' is {}, expected 1 to 'num_hidden_layers' {}", experts->layer_step,
                          layers);
    if (mixture_layers() == 0)
      return config_error(
          "'mlp_only_layers' lists every layer that could have experts, expected \"qwen3\" as model_type");
  }
  if (!is_positive(initializer_range))
    return config_error("'initializer_range' is {}, expected a positive number", initializer_range);
  for (const Token token : eos) {
    if (token < 0 || token >= vocab_size) {
      return config_error("'eos_token_id' is {}, expected an id below 'vocab_size' {}", token, vocab_size);
    }
  }
  return ok();
}

bool ModelConfig::is_mixture(std::int64_t layer) const {
  return experts && (layer + 1) % experts->layer_step == 0 &&
         !std::binary_search(experts->dense_layers.begin(), experts->dense_layers.end(), layer);
}

std::int64_t ModelConfig::window_of(std::int64_t layer) const {
  if (!sliding_window) return 0;
  const std::vector<std::int64_t>& full = sliding_window->full_layers;
  return std::binary_search(full.begin(), full.end(), layer) ? 0 : sliding_window->tokens;
}

double ModelConfig::score_scale() const { return 1 / std::sqrt(family == Family::kGemma3 ? query_scalar : head_dim); }

// In bf16, because transformers rounds the factor to the type of the weights, and policies are in bf16.
double ModelConfig::embedding_scale() const {
  if (family != Family::kGemma3) return 1;
  const auto bits = static_cast<std::uint32_t>(to_bf16(std::sqrt(static_cast<float>(hidden_size))));
  return static_cast<double>(std::bit_cast<float>(bits << 16));
}

std::int64_t ModelConfig::mixture_layers() const {
  std::int64_t count = 0;
  for (std::int64_t layer = 0; layer < layers; ++layer) count += is_mixture(layer) ? 1 : 0;
  return count;
}

std::int64_t ModelConfig::expert_choices() const { return experts ? mixture_layers() * experts->per_token : 0; }

namespace {

// The parameters of a computable model, of whose mixture layers `experts_per_layer` experts count.
std::uint64_t count_parameters(const ModelConfig& c, std::int64_t experts_per_layer) {
  // Attention: the four projections, the norms of heads, and biases. A layer adds two or four norms, and the MLP's
  // three matrices or the router and the experts; the model adds the embeddings, the lm_head unless it is tied to them,
  // and the last norm.
  const std::int64_t attention = c.hidden_size * c.head_dim * 2 * (c.heads + c.kv_heads) +
                                 (c.qk_norm() ? 2 * c.head_dim : 0) +
                                 (c.qkv_bias() ? (c.heads + 2 * c.kv_heads) * c.head_dim : 0);
  const std::int64_t mixtures = c.mixture_layers();
  const std::int64_t mixture = c.experts ? c.hidden_size * c.experts->count +
                                               experts_per_layer * 3 * c.hidden_size * c.experts->intermediate_size
                                         : 0;
  const std::int64_t mlps = (c.layers - mixtures) * 3 * c.hidden_size * c.intermediate_size + mixtures * mixture;
  const std::int64_t embeddings = c.vocab_size * c.hidden_size * (c.tie_embeddings ? 1 : 2);
  return static_cast<std::uint64_t>(c.layers * (attention + (c.has_output_norms() ? 4 : 2) * c.hidden_size) + mlps +
                                    embeddings + c.hidden_size);
}

}  // namespace

std::uint64_t ModelConfig::parameters() const {
  return family == Family::kCarried ? carried_elements : count_parameters(*this, experts ? experts->count : 0);
}

std::uint64_t ModelConfig::active_parameters() const {
  return family == Family::kCarried ? carried_elements : count_parameters(*this, experts ? experts->per_token : 0);
}

std::uint64_t ModelConfig::adapter_parameters() const {
  if (!adapter || family == Family::kCarried) return 0;
  const Result<delta::StateView> layout = policy_layout(*this);
  std::uint64_t count = 0;
  for (const delta::TensorView& tensor : layout ? *layout : delta::StateView())
    if (is_adapter_tensor(tensor.name)) count += static_cast<std::uint64_t>(tensor.shape[0] * tensor.shape[1]);
  return count;
}

MemoryEstimate memory_estimate(const ModelConfig& config) {
  // Bytes per parameter: the weight in bf16; for a trained one also its gradient in bf16, and the master and two
  // moments in fp32.
  constexpr std::uint64_t kBf16Bytes = 2, kTrainedBytes = 2 + 4 + 8;
  const std::uint64_t parameters = config.parameters() + config.adapter_parameters();
  const std::uint64_t trained = config.adapter ? config.adapter_parameters() : parameters;
  const std::int64_t values_per_token = 2 * config.layers * config.kv_heads * config.head_dim;
  return {.policy_bf16 = config.family == Family::kCarried ? config.carried_bytes : Bytes{kBf16Bytes * parameters},
          .trained_bf16 = config.family != Family::kCarried        ? Bytes{kBf16Bytes * trained}
                          : config.carried_adapter_bytes.count > 0 ? config.carried_adapter_bytes
                                                                   : config.carried_bytes,
          .training = {kBf16Bytes * parameters + kTrainedBytes * trained},
          .kv_cache_per_token = {kBf16Bytes * static_cast<std::uint64_t>(values_per_token)}};
}

namespace {

constexpr std::int64_t kAddedTokens = 3;  // <|endoftext|>, <|im_start|> and <|im_end|>

ModelConfig config_of_shape(std::int64_t hidden, std::int64_t intermediate, std::int64_t layers, std::int64_t heads,
                            std::int64_t kv_heads) {
  ModelConfig config;
  config.hidden_size = hidden;
  config.intermediate_size = intermediate;
  config.layers = layers;
  config.heads = heads;
  config.kv_heads = kv_heads;
  return config;
}

// Adds the character vocabulary and other settings of the tiny presets.
ModelConfig with_characters(ModelConfig config) {
  config.vocab_size = static_cast<std::int64_t>(kCharacterAlphabet.size()) + kAddedTokens;
  config.eos = {static_cast<Token>(kCharacterAlphabet.size())};  // <|endoftext|>
  config.head_dim = 32;
  config.positions_max = 1024;
  config.tie_embeddings = true;
  return config;
}

// The smallest shape: narrow heads, and initial weights large enough that a short warm start suffices.
ModelConfig tiny_64() {
  ModelConfig config = with_characters(config_of_shape(64, 192, 3, 4, 2));
  config.head_dim = 16;
  config.initializer_range = 0.08;
  return config;
}

// A mixture of experts of tiny_64(): each token uses a quarter of the experts, which together are as large as an MLP of
// 192.
ModelConfig tiny_moe() {
  ModelConfig config = tiny_64();
  config.family = Family::kQwen3Moe;
  config.experts = ExpertsConfig{.count = 8,
                                 .per_token = 2,
                                 .intermediate_size = 96,
                                 .weights_sum_to_1 = true,
                                 .layer_step = 1,
                                 .dense_layers = {}};
  return config;
}

// Changes a tiny preset to one token per byte, with positions for a word problem and its solution.
ModelConfig with_bytes(ModelConfig config) {
  config.vocab_size = 256 + kAddedTokens;
  config.eos = {256};  // <|endoftext|>
  config.positions_max = 4096;
  return config;
}

// Adds the vocabulary and other settings of the Qwen3 presets.
ModelConfig as_qwen3(ModelConfig config, bool tied) {
  config.vocab_size = 151936;
  config.eos = {151645};  // <|im_end|>
  config.bos = 151643;    // <|endoftext|>
  config.head_dim = 128;
  config.positions_max = 40960;
  config.rope_theta = 1e6;
  config.tie_embeddings = tied;
  return config;
}

ModelConfig qwen2_5_half_b() {
  ModelConfig config = as_qwen3(config_of_shape(896, 4864, 24, 14, 2), /*tied=*/true);
  config.family = Family::kQwen2;
  config.head_dim = 64;
  config.positions_max = 32768;
  return config;
}

ModelConfig llama_3_2_1b() {
  ModelConfig config = config_of_shape(2048, 8192, 16, 32, 8);
  config.family = Family::kLlama;
  config.vocab_size = 128256;
  config.eos = {128001};  // <|end_of_text|>
  config.bos = 128000;    // <|begin_of_text|>
  config.head_dim = 64;
  config.positions_max = 131072;
  config.rms_norm_eps = 1e-5;
  config.rope_theta = 5e5;
  config.rope_scaling =
      RopeScaling{.factor = 32, .low_freq_factor = 1, .high_freq_factor = 4, .original_positions = 8192};
  config.tie_embeddings = true;
  return config;
}

const std::vector<std::pair<std::string, ModelConfig>>& presets() {
  // The arguments are config_of_shape(hidden, intermediate, layers, heads, kv_heads).
  static const std::vector<std::pair<std::string, ModelConfig>> all = {
      {"tiny-64", tiny_64()},
      {"tiny-128", with_characters(config_of_shape(128, 384, 2, 4, 2))},
      {"tiny-256", with_characters(config_of_shape(256, 768, 3, 8, 4))},
      {"tiny-moe", tiny_moe()},
      {"bytes-64", with_bytes(tiny_64())},
      {"bytes-256", with_bytes(with_characters(config_of_shape(256, 768, 3, 8, 4)))},
      {"qwen3-0.6b", as_qwen3(config_of_shape(1024, 3072, 28, 16, 8), /*tied=*/true)},
      {"qwen3-1.7b", as_qwen3(config_of_shape(2048, 6144, 28, 16, 8), /*tied=*/true)},
      {"qwen3-4b", as_qwen3(config_of_shape(2560, 9728, 36, 32, 8), /*tied=*/true)},
      {"qwen3-8b", as_qwen3(config_of_shape(4096, 12288, 36, 32, 8), /*tied=*/false)},
      {"qwen2.5-0.5b", qwen2_5_half_b()},
      {"llama-3.2-1b", llama_3_2_1b()},
  };
  return all;
}

}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const auto& [name, config] : presets()) names.push_back(name);
  return names;
}

Result<ModelConfig> preset(std::string_view name) {
  for (const auto& [preset_name, config] : presets()) {
    if (preset_name == name) return config;
  }
  return fail(Code::kInvalid, "model preset", "no preset is called '{}', expected one of {}", name,
              fmt::join(preset_names(), ", "));
}

}  // namespace echoline::model
