// Reads, writes and checks config.json, and defines the presets.
#include "model/config.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "delta/checkpoint.hpp"
#include "model/tokenizer.hpp"

namespace echoline::model {
namespace {

using nlohmann::json;
constexpr std::string_view kErrorSource = "config.json";

template <class... Args>
Error bad(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kInvalid, kErrorSource, format, std::forward<Args>(args)...);
}

// Reads fields of one JSON object and keeps the first error.
class Fields {
 public:
  explicit Fields(const json& object) : object_(object) {}
  const json* get(const char* name) const {
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  void integer(const char* name, std::int64_t& out, bool required = true) {
    const json* value = get(name);
    if (!value) {
      if (required) note(bad("'{}' is missing, expected an integer", name));
    } else if (!value->is_number_integer() ||  // the limit keeps unsigned values within std::int64_t
               (value->is_number_unsigned() && value->get<std::uint64_t>() > std::uint64_t{1} << 62)) {
      note(bad("'{}' is {}, expected an integer", name, value->dump()));
    } else {
      out = value->get<std::int64_t>();
    }
  }
  void number(const char* name, double& out) {
    const json* value = get(name);
    if (!value) return;
    if (value->is_number())
      out = value->get<double>();
    else
      note(bad("'{}' is {}, expected a number", name, value->dump()));
  }
  void boolean(const char* name, bool& out) {
    const json* value = get(name);
    if (!value) return;
    if (value->is_boolean())
      out = value->get<bool>();
    else
      note(bad("'{}' is {}, expected true or false", name, value->dump()));
  }
  void note(Error error) {
    if (!error_) error_ = std::move(error);
  }
  Status status() const { return error_ ? Status(*error_) : ok(); }

 private:
  const json& object_;
  std::optional<Error> error_;
};

Result<Token> token_of(const char* name, const json& value) {
  if (!value.is_number_integer() || value < 0 || value > std::numeric_limits<Token>::max()) {
    return bad("'{}' is {}, expected a token id", name, value.dump());
  }
  return value.get<Token>();
}

constexpr std::pair<Family, const char*> kFamilies[] = {
    {Family::kQwen3, "Qwen3ForCausalLM"}, {Family::kQwen2, "Qwen2ForCausalLM"}, {Family::kLlama, "LlamaForCausalLM"}};

// Sets c.family. Fails if the file turns on a feature that is not implemented.
Status read_family_and_check_features(Fields& fields, ModelConfig& c) {
  const json* type = fields.get("model_type");
  bool known = false;
  for (const auto& [family, architecture] : kFamilies)
    if (type && *type == family_name(family)) c.family = family, known = true;
  if (!known) {
    return bad("'model_type' is {}, expected \"qwen3\", \"qwen2\" or \"llama\", the families implemented",
               type ? type->dump() : "missing");
  }
  if (const json* act = fields.get("hidden_act"); act && *act != "silu") {
    return bad("'hidden_act' is {}, expected \"silu\"", act->dump());
  }
  if (const json* quantization = fields.get("quantization_config"))
    return bad("'quantization_config' is {}, expected none: quantised weights are not implemented",
               quantization->is_object() ? quantization->value("quant_method", json("an object")).dump() : "set");
  bool bias = false, sliding = false, mlp_bias = false;
  fields.boolean("mlp_bias", mlp_bias);
  if (c.family != Family::kQwen2) fields.boolean("attention_bias", bias);
  fields.boolean("use_sliding_window", sliding);
  ECHO_TRY(fields.status());
  if (bias) return bad("'attention_bias' is true, expected false: biases of this family are not implemented");
  if (mlp_bias) return bad("'mlp_bias' is true, expected false: biases of the MLP are not implemented");
  if (sliding) return bad("'use_sliding_window' is true, expected false: sliding windows are not implemented");
  for (const char* name : {"torch_dtype", "dtype"}) {
    const json* dtype = fields.get(name);
    if (dtype && *dtype != "bfloat16" && *dtype != "float32") {
      return bad("'{}' is {}, expected \"bfloat16\" or \"float32\"", name, dtype->dump());
    }
  }
  return ok();
}

// Reads 'rope_scaling', or 'rope_parameters' of newer exports.
Result<std::optional<RopeScaling>> scaling_of(const char* name, const json& object) {
  if (!object.is_object()) return bad("'{}' is {}, expected an object", name, object.dump());
  Fields fields(object);
  const json* type = fields.get("rope_type");
  if (!type) type = fields.get("type");  // older exports
  if (!type || *type == "default") return std::optional<RopeScaling>();
  if (*type != "llama3")
    return bad("'{}.rope_type' is {}, expected \"default\" or \"llama3\": other scalings are not implemented", name,
               type->dump());
  RopeScaling scaling;
  for (const char* required : {"factor", "low_freq_factor", "high_freq_factor"})
    if (!fields.get(required)) return bad("'{}.{}' is missing, expected a number", name, required);
  fields.number("factor", scaling.factor);
  fields.number("low_freq_factor", scaling.low_freq_factor);
  fields.number("high_freq_factor", scaling.high_freq_factor);
  fields.integer("original_max_position_embeddings", scaling.original_positions);
  ECHO_TRY(fields.status());
  return std::optional(scaling);
}

// Reads the token ids of eos_token_id and bos_token_id.
Status read_special_tokens(const Fields& fields, ModelConfig& c) {
  if (const json* eos = fields.get("eos_token_id")) {
    for (const json& id : eos->is_array() ? *eos : json::array({*eos})) {
      ECHO_ASSIGN(const Token token, token_of("eos_token_id", id));
      c.eos.push_back(token);
    }
  }
  if (const json* bos = fields.get("bos_token_id")) {
    ECHO_ASSIGN(c.bos, token_of("bos_token_id", *bos));
  }
  return ok();
}

Result<ModelConfig> read_computable(const json& root) {
  Fields fields(root);
  ModelConfig c;
  ECHO_TRY(read_family_and_check_features(fields, c));
  fields.integer("vocab_size", c.vocab_size);
  fields.integer("hidden_size", c.hidden_size);
  fields.integer("intermediate_size", c.intermediate_size);
  fields.integer("num_hidden_layers", c.layers);
  fields.integer("num_attention_heads", c.heads);
  // Hugging Face's defaults: Llama and Qwen2 derive kv_heads and head_dim. Qwen3 has a fixed head_dim (ModelConfig).
  c.kv_heads = c.heads;
  fields.integer("num_key_value_heads", c.kv_heads, /*required=*/c.family == Family::kQwen3);
  if (c.family != Family::kQwen3 && c.heads > 0) c.head_dim = c.hidden_size / c.heads;
  fields.integer("head_dim", c.head_dim, /*required=*/false);
  fields.integer("max_position_embeddings", c.positions_max, /*required=*/false);
  fields.number("rms_norm_eps", c.rms_norm_eps);
  fields.number("rope_theta", c.rope_theta);
  fields.number("initializer_range", c.initializer_range);
  fields.boolean("tie_word_embeddings", c.tie_embeddings);
  // Newer exports nest the rotary settings.
  if (const json* rope = fields.get("rope_parameters")) {
    if (!rope->is_object()) return bad("'rope_parameters' is {}, expected an object", rope->dump());
    Fields nested(*rope);
    ECHO_ASSIGN(c.rope_scaling, scaling_of("rope_parameters", *rope));
    nested.number("rope_theta", c.rope_theta);
    ECHO_TRY(nested.status());
  }
  if (const json* scaling = fields.get("rope_scaling")) {
    ECHO_ASSIGN(c.rope_scaling, scaling_of("rope_scaling", *scaling));
  }
  ECHO_TRY(fields.status());
  ECHO_TRY(read_special_tokens(fields, c));
  ECHO_TRY(c.validate());
  return c;
}

// Reads what a run needs of a model that this program only carries. Sizes that decide about memory may be absent: a
// server that generates with the model knows them.
Result<ModelConfig> read_carried(const json& root, std::string_view text, std::string reason) {
  Fields outer(root);
  // Models for text and images keep the decoder's shape in an object of its own.
  const json* decoder = outer.get("text_config");
  Fields fields(decoder && decoder->is_object() ? *decoder : root);
  ModelConfig c;
  c.family = Family::kCarried;
  c.source_json = text;
  c.reason_not_computable = std::move(reason);
  const auto read = [&](const char* name, std::int64_t& out, bool required) {
    (fields.get(name) || !outer.get(name) ? fields : outer).integer(name, out, required);
  };
  read("vocab_size", c.vocab_size, true);
  read("max_position_embeddings", c.positions_max, true);
  read("hidden_size", c.hidden_size, false);
  read("num_hidden_layers", c.layers, false);
  read("num_attention_heads", c.heads, false);
  c.kv_heads = c.heads;
  read("num_key_value_heads", c.kv_heads, false);
  if (c.heads > 0) c.head_dim = c.hidden_size / c.heads;
  read("head_dim", c.head_dim, false);
  outer.boolean("tie_word_embeddings", c.tie_embeddings);
  ECHO_TRY(outer.status());
  ECHO_TRY(fields.status());
  ECHO_TRY(read_special_tokens(outer.get("eos_token_id") || outer.get("bos_token_id") ? outer : fields, c));
  ECHO_TRY(c.validate());
  return c;
}

}  // namespace

const char* family_name(Family family) {
  switch (family) {
    case Family::kQwen2:
      return "qwen2";
    case Family::kLlama:
      return "llama";
    case Family::kCarried:
      return "carried";
    default:
      return "qwen3";
  }
}

Result<ModelConfig> ModelConfig::from_json(std::string_view text, ModelUse use) {
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object())
    return bad("expected a JSON object, found {}", root.is_discarded() ? "malformed JSON" : root.type_name());
  auto computable = read_computable(root);
  if (computable || use == ModelUse::kCompute) return computable;
  return read_carried(root, text, computable.error().detail);
}

Result<ModelConfig> ModelConfig::from_folder(const std::filesystem::path& folder, ModelUse use) {
  const std::filesystem::path path = folder / "config.json";
  ECHO_ASSIGN(const std::string text, read_file(path, 16 << 20));
  auto config = from_json(text, use);
  if (!config) return fail(config.error().code, path.string(), "{}", config.error().detail);
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
  if (family != Family::kCarried) return fmt::format("{} of {} parameters", family_name(family), parameters());
  const json root = json::parse(source_json, nullptr, /*allow_exceptions=*/false);
  return fmt::format("{}, carried only{}",
                     root.is_object() ? root.value("model_type", json("unknown")).dump() : "unknown",
                     carried_elements > 0 ? fmt::format(", of {} values", carried_elements) : "");
}

Status ModelConfig::check_computable() const {
  if (family != Family::kCarried) return ok();
  return bad("{}. This program can only carry such a policy: use learner.trainer: external and an inference server",
             reason_not_computable);
}

std::string ModelConfig::to_json() const {
  if (family == Family::kCarried) return source_json;
  nlohmann::ordered_json j = {
      {"architectures",
       {std::find_if(std::begin(kFamilies), std::end(kFamilies),
                     [&](const auto& known) { return known.first == family; })
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
  if (rope_scaling)
    j["rope_scaling"] = {{"rope_type", "llama3"},
                         {"factor", rope_scaling->factor},
                         {"low_freq_factor", rope_scaling->low_freq_factor},
                         {"high_freq_factor", rope_scaling->high_freq_factor},
                         {"original_max_position_embeddings", rope_scaling->original_positions}};
  if (eos.size() == 1) j["eos_token_id"] = eos.front();
  if (eos.size() > 1) j["eos_token_id"] = eos;
  if (bos) j["bos_token_id"] = *bos;
  return j.dump(2) + "\n";
}

Status ModelConfig::validate() const {
  const struct {
    const char* name;
    std::int64_t value, maximum;
  } sizes[] = {{"vocab_size", vocab_size, 1 << 24},
               {"hidden_size", hidden_size, 1 << 20},
               {"intermediate_size", intermediate_size, 1 << 22},
               {"num_hidden_layers", layers, 4096},
               {"num_attention_heads", heads, 4096},
               {"num_key_value_heads", kv_heads, 4096},
               {"head_dim", head_dim, 4096},
               {"max_position_embeddings", positions_max, 1 << 26}};
  for (const auto& size : sizes) {
    if (size.value < 1 || size.value > size.maximum) {
      return bad("'{}' is {}, expected 1 to {}", size.name, size.value, size.maximum);
    }
  }
  if (family != Family::kCarried && heads % kv_heads != 0) {
    return bad("'num_attention_heads' is {}, expected a multiple of 'num_key_value_heads' {}", heads, kv_heads);
  }
  if (family != Family::kCarried && head_dim % 2 != 0)
    return bad("'head_dim' is {}, expected an even number", head_dim);
  const auto positive = [](double x) { return std::isfinite(x) && x > 0; };
  if (!positive(rms_norm_eps)) return bad("'rms_norm_eps' is {}, expected a positive number", rms_norm_eps);
  if (!positive(rope_theta)) return bad("'rope_theta' is {}, expected a positive number", rope_theta);
  if (rope_scaling) {
    const RopeScaling& r = *rope_scaling;
    const bool is_valid = positive(r.factor) && positive(r.low_freq_factor) && positive(r.high_freq_factor) &&
                          r.low_freq_factor < r.high_freq_factor && r.original_positions >= 1;
    if (!is_valid)
      return bad(
          "'rope_scaling' has factor {}, low_freq_factor {}, high_freq_factor {} and "
          "original_max_position_embeddings {}, expected positive numbers, the low factor below the high one",
          r.factor, r.low_freq_factor, r.high_freq_factor, r.original_positions);
  }
  if (!positive(initializer_range))
    return bad("'initializer_range' is {}, expected a positive number", initializer_range);
  for (const Token token : eos) {
    if (token < 0 || token >= vocab_size) {
      return bad("'eos_token_id' is {}, expected an id below 'vocab_size' {}", token, vocab_size);
    }
  }
  return ok();
}

std::uint64_t ModelConfig::parameters() const {
  if (family == Family::kCarried) return carried_elements;
  const std::int64_t attention = hidden_size * head_dim * 2 * (heads + kv_heads) + (qk_norm() ? 2 * head_dim : 0) +
                                 (qkv_bias() ? (heads + 2 * kv_heads) * head_dim : 0);
  const std::int64_t layer = attention + 3 * hidden_size * intermediate_size + 2 * hidden_size;
  const std::int64_t embeddings = vocab_size * hidden_size * (tie_embeddings ? 1 : 2);
  return static_cast<std::uint64_t>(layers * layer + embeddings + hidden_size);
}

MemoryEstimate memory_estimate(const ModelConfig& config) {
  const std::uint64_t n = config.parameters();
  const Bytes policy = config.family == Family::kCarried ? config.carried_bytes : Bytes{2 * n};
  // 2 policy + 2 gradient + 4 master + 8 moments, bytes per parameter
  return {policy, {16 * n}, {static_cast<std::uint64_t>(2 * 2 * config.layers * config.kv_heads * config.head_dim)}};
}

namespace {

ModelConfig shape(std::int64_t hidden, std::int64_t inner, std::int64_t layers, std::int64_t heads, std::int64_t kv) {
  ModelConfig c;
  c.hidden_size = hidden;
  c.intermediate_size = inner;
  c.layers = layers;
  c.heads = heads;
  c.kv_heads = kv;
  return c;
}

ModelConfig tiny(ModelConfig c) {
  c.vocab_size = static_cast<std::int64_t>(kCharacterAlphabet.size()) + 3;
  c.eos = {static_cast<Token>(kCharacterAlphabet.size())};  // <|endoftext|>
  c.head_dim = 32;
  c.positions_max = 1024;
  c.tie_embeddings = true;
  return c;
}

// Narrow heads, and weights large enough for a short warm start to work.
ModelConfig tiny_64() {
  ModelConfig c = tiny(shape(64, 192, 3, 4, 2));
  c.head_dim = 16;
  c.initializer_range = 0.08;
  return c;
}

// One token per byte, and room for a word problem with its solution.
ModelConfig bytes(ModelConfig c) {
  c.vocab_size = 256 + 3;
  c.eos = {256};  // <|endoftext|>
  c.positions_max = 4096;
  return c;
}

ModelConfig qwen3(ModelConfig c, bool tied) {
  c.vocab_size = 151936;
  c.eos = {151645};
  c.bos = 151643;
  c.head_dim = 128;
  c.positions_max = 40960;
  c.rope_theta = 1e6;
  c.tie_embeddings = tied;
  return c;
}

ModelConfig qwen2_5_half_b() {
  ModelConfig c = qwen3(shape(896, 4864, 24, 14, 2), true);
  c.family = Family::kQwen2;
  c.head_dim = 64;
  c.positions_max = 32768;
  return c;
}

ModelConfig llama_3_2_1b() {
  ModelConfig c = shape(2048, 8192, 16, 32, 8);
  c.family = Family::kLlama;
  c.vocab_size = 128256;
  c.eos = {128001};
  c.bos = 128000;
  c.head_dim = 64;
  c.positions_max = 131072;
  c.rms_norm_eps = 1e-5;
  c.rope_theta = 5e5;
  c.rope_scaling = RopeScaling{32, 1, 4, 8192};
  c.tie_embeddings = true;
  return c;
}

const std::vector<std::pair<std::string, ModelConfig>>& presets() {
  static const std::vector<std::pair<std::string, ModelConfig>> all = {
      {"tiny-64", tiny_64()},
      {"tiny-128", tiny(shape(128, 384, 2, 4, 2))},
      {"tiny-256", tiny(shape(256, 768, 3, 8, 4))},
      {"bytes-64", bytes(tiny_64())},
      {"bytes-256", bytes(tiny(shape(256, 768, 3, 8, 4)))},
      {"qwen3-0.6b", qwen3(shape(1024, 3072, 28, 16, 8), true)},
      {"qwen3-1.7b", qwen3(shape(2048, 6144, 28, 16, 8), true)},
      {"qwen3-4b", qwen3(shape(2560, 9728, 36, 32, 8), true)},
      {"qwen3-8b", qwen3(shape(4096, 12288, 36, 32, 8), false)},
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
  for (const auto& [known, config] : presets()) {
    if (known == name) return config;
  }
  return fail(Code::kInvalid, "model preset", "no preset is called '{}', expected one of {}", name,
              fmt::join(preset_names(), ", "));
}

}  // namespace echoline::model
