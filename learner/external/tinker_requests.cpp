// Checks the requests of a Tinker client. TinkerServer calls it.
#include "learner/external/tinker_requests.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/names.hpp"
#include "base/text.hpp"
#include "learner/external/tinker.pb.h"

namespace echoline::learner::tinker {
namespace {

namespace wire = echoline::tinker_wire;
using nlohmann::json;

constexpr std::uint64_t kNumberMax = 1'000'000'000'000'000'000;
constexpr std::size_t kExamplesMax = 65'536;  // of one forward_backward
constexpr std::uint32_t kSamplesMax = 4096, kStopsMax = 64;
constexpr std::size_t kStopBytesMax = 256, kTextShown = 80;
constexpr std::string_view kScheme = "tinker://";  // of a checkpoint's path
constexpr const char* kLosses = "cross_entropy, importance_sampling, ppo and cispo";

std::string shown(std::string_view text) { return printable(std::string(text.substr(0, kTextShown))); }

// Reads the fields of a JSON object, and keeps the first error.
class Fields {
 public:
  Fields(std::string_view text, const char* operation)
      : operation_(operation), object_(json::parse(text, nullptr, /*allow_exceptions=*/false)) {
    if (!object_.is_object()) refuse("the body is no JSON object");
  }
  Fields(json object, const char* operation) : operation_(operation), object_(std::move(object)) {
    if (!object_.is_object()) refuse("expected a JSON object");
  }

  const json* find(const char* name) const {
    if (!object_.is_object()) return nullptr;
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  std::string text(const char* name, std::size_t bytes_max = kNameBytesMax) {
    const json* value = find(name);
    if (value == nullptr) return {};
    if (!value->is_string() || value->get_ref<const std::string&>().size() > bytes_max) {
      refuse(fmt::format("{}: expected a text of at most {} bytes", name, bytes_max));
      return {};
    }
    return value->get<std::string>();
  }
  std::string required_text(const char* name) {
    std::string value = text(name);
    if (value.empty()) refuse(fmt::format("{} is missing", name));
    return value;
  }
  std::optional<std::uint64_t> whole(const char* name, std::uint64_t max = kNumberMax) {
    const json* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number_integer() || *value < 0 || value->get<std::uint64_t>() > max) {
      refuse(fmt::format("{}: expected a whole number from 0 to {}", name, max));
      return std::nullopt;
    }
    return value->get<std::uint64_t>();
  }
  std::uint64_t required_whole(const char* name, std::uint64_t max = kNumberMax) {
    const auto value = whole(name, max);
    if (!value) refuse(fmt::format("{} is missing", name));
    return value.value_or(0);
  }
  double number(const char* name, double absent) {
    const json* value = find(name);
    if (value == nullptr) return absent;
    if (!value->is_number() || !std::isfinite(value->get<double>())) {
      refuse(fmt::format("{}: expected a number", name));
      return absent;
    }
    return value->get<double>();
  }
  bool flag(const char* name, bool absent) {
    const json* value = find(name);
    if (value == nullptr) return absent;
    if (!value->is_boolean()) refuse(fmt::format("{}: expected true or false", name));
    return value->is_boolean() ? value->get<bool>() : absent;
  }
  Fields object(const char* name) {
    const json* value = find(name);
    return Fields(value == nullptr ? json::object() : *value, operation_);
  }
  void refuse(std::string reason) {
    if (!error_) error_ = Error{Code::kInvalid, operation_, std::move(reason)};
  }
  void refuse_as(const Fields& part) {
    if (part.error_ && !error_) error_ = part.error_;
  }
  Status status() const { return error_ ? Status(*error_) : ok(); }

 private:
  const char* operation_;
  json object_;
  std::optional<Error> error_;
};

// Ends a parser of an operation with a number. The model and its number must be known for a failure to take its turn.
Result<Numbered> numbered(Fields& fields, Numbered result) {
  const Status parsed = fields.status();
  if (!parsed && (result.model.empty() || result.number == 0)) return parsed.error();
  if (!parsed) result.operation = Refused{parsed.error().message()};
  return result;
}

Numbered place_of(Fields& fields) {
  Numbered result;
  result.model = fields.required_text("model_id");
  result.number = fields.required_whole("seq_id");
  if (result.number == 0) fields.refuse("seq_id: expected a whole number from 1 on");
  return result;
}

template <class T>
std::vector<T> values_of(std::string_view bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

// Returns a dense tensor with one dimension of `count` values.
Result<const wire::Tensor*> find_tensor(const wire::Datum& datum, const std::string& name, std::size_t count) {
  const auto it = datum.loss_fn_inputs().find(name);
  if (it == datum.loss_fn_inputs().end())
    return fail(Code::kInvalid, "forward_backward", "loss_fn_inputs['{}'] is missing", name);
  const wire::Tensor& tensor = it->second;
  if (!tensor.has_dense())
    return fail(Code::kInvalid, "forward_backward", "loss_fn_inputs['{}'] is sparse, expected a dense tensor", name);
  if (tensor.shape_size() > 1)
    return fail(Code::kInvalid, "forward_backward",
                "loss_fn_inputs['{}'] has {} dimensions, expected one value per token: several targets per token are "
                "not supported",
                name, tensor.shape_size());
  const std::size_t value_bytes = tensor.dtype() == wire::DATA_TYPE_INT64     ? 8
                                  : tensor.dtype() == wire::DATA_TYPE_FLOAT32 ? 4
                                                                              : 0;
  if (value_bytes == 0)
    return fail(Code::kInvalid, "forward_backward", "loss_fn_inputs['{}'] has type {}, expected float32 or int64", name,
                static_cast<int>(tensor.dtype()));
  if (tensor.dense().size() != count * value_bytes)
    return fail(Code::kInvalid, "forward_backward",
                "loss_fn_inputs['{}'] has {} bytes, expected one value for each of the {} tokens of model_input", name,
                tensor.dense().size(), count);
  return &tensor;
}

Result<std::vector<float>> read_floats(const wire::Datum& datum, const std::string& name, std::size_t count) {
  ECHO_ASSIGN(const wire::Tensor* tensor, find_tensor(datum, name, count));
  std::vector<float> values;
  if (tensor->dtype() == wire::DATA_TYPE_FLOAT32) {
    values = values_of<float>(tensor->dense());
  } else {
    for (const std::int64_t value : values_of<std::int64_t>(tensor->dense()))
      values.push_back(static_cast<float>(value));
  }
  for (const float value : values)
    if (!std::isfinite(value))
      return fail(Code::kInvalid, "forward_backward", "loss_fn_inputs['{}'] has a value that is not finite", name);
  return values;
}

Result<Datum> read_datum(const wire::Datum& datum, DatumLoss loss) {
  Datum result;
  for (const wire::Chunk& chunk : datum.model_input()) {
    if (!chunk.has_encoded_text())
      return fail(Code::kInvalid, "forward_backward", "model_input has an image or audio, expected tokens");
    const std::string& bytes = chunk.encoded_text().tokens();
    if (bytes.size() % sizeof(std::int32_t) != 0)
      return fail(Code::kInvalid, "forward_backward", "model_input has {} bytes, expected int32 tokens", bytes.size());
    for (const std::int32_t token : values_of<std::int32_t>(bytes)) result.input.push_back(token);
  }
  const std::size_t count = result.input.size();
  if (count == 0) return fail(Code::kInvalid, "forward_backward", "model_input has no tokens");
  ECHO_ASSIGN(const wire::Tensor* targets, find_tensor(datum, "target_tokens", count));
  if (targets->dtype() != wire::DATA_TYPE_INT64)
    return fail(Code::kInvalid, "forward_backward", "loss_fn_inputs['target_tokens'] is no int64 tensor");
  result.targets = values_of<std::int64_t>(targets->dense());
  std::vector<std::string> known{"target_tokens"};
  if (loss == DatumLoss::kCrossEntropy) {
    ECHO_ASSIGN(result.weights, read_floats(datum, "weights", count));
    known.emplace_back("weights");
  } else {
    ECHO_ASSIGN(result.logprobs, read_floats(datum, "logprobs", count));
    ECHO_ASSIGN(result.advantages, read_floats(datum, "advantages", count));
    known.insert(known.end(), {"logprobs", "advantages"});
  }
  for (const auto& [name, tensor] : datum.loss_fn_inputs())
    if (std::find(known.begin(), known.end(), name) == known.end())
      return fail(Code::kInvalid, "forward_backward", "loss_fn_inputs['{}'] is not used by this loss: expected {}",
                  shown(name), fmt::join(known, ", "));
  return result;
}

Result<DatumBatch> read_batch(const wire::ForwardBackwardRequest& request) {
  DatumBatch batch;
  batch.forward_only = request.forward_only();
  if (request.loss_fn() == "cross_entropy")
    batch.loss = DatumLoss::kCrossEntropy;
  else if (request.loss_fn() == "importance_sampling")
    batch.loss = DatumLoss::kImportanceSampling;
  else if (request.loss_fn() == "ppo")
    batch.loss = DatumLoss::kPpo;
  else if (request.loss_fn() == "cispo")
    batch.loss = DatumLoss::kCispo;
  else
    return fail(Code::kInvalid, "forward_backward",
                "loss_fn '{}' is not supported, expected {}; another loss can be "
                "computed by the client's forward_backward_custom",
                shown(request.loss_fn()), kLosses);
  std::map<std::string, double> settings(request.loss_fn_config().begin(), request.loss_fn_config().end());
  for (const auto& [name, value] : request.loss_fn_config_v2()) {
    if (value.value_case() != wire::LossSetting::kNumber)
      return fail(Code::kInvalid, "forward_backward", "loss_fn_config['{}'] is no number", shown(name));
    settings[name] = value.number();
  }
  for (const auto& [name, value] : settings) {
    const bool is_low = name == "clip_low_threshold", is_high = name == "clip_high_threshold";
    if ((!is_low && !is_high) || batch.loss == DatumLoss::kCrossEntropy || batch.loss == DatumLoss::kImportanceSampling)
      return fail(Code::kInvalid, "forward_backward",
                  "loss_fn_config['{}'] is not used by '{}': clip_low_threshold and clip_high_threshold are, by ppo "
                  "and cispo",
                  shown(name), request.loss_fn());
    if (!std::isfinite(value) || value < 0)
      return fail(Code::kInvalid, "forward_backward", "loss_fn_config['{}'] is {}, expected 0 or more", name, value);
    (is_low ? batch.ratio_min : batch.ratio_max) = value;
  }
  if (batch.ratio_min > batch.ratio_max)
    return fail(Code::kInvalid, "forward_backward", "clip_low_threshold {} is above clip_high_threshold {}",
                batch.ratio_min, batch.ratio_max);
  if (request.data().empty() || static_cast<std::size_t>(request.data_size()) > kExamplesMax)
    return fail(Code::kInvalid, "forward_backward", "{} examples, expected 1 to {}", request.data_size(), kExamplesMax);
  for (int i = 0; i < request.data_size(); ++i) {
    auto datum = read_datum(request.data(i), batch.loss);
    if (!datum) return fail(Code::kInvalid, "forward_backward", "data[{}]: {}", i, datum.error().detail);
    batch.data.push_back(*std::move(datum));
  }
  return batch;
}

// A checkpoint's name becomes the name of a folder.
void check_name(Fields& fields, const std::string& name) {
  if (name.empty() || name.front() == '.' || !has_only_name_characters(name))
    fields.refuse(fmt::format("path '{}': expected a name of letters, digits, '-', '_' and '.'", shown(name)));
}

}  // namespace

Result<Numbered> parse_forward_backward(std::string_view protobuf) {
  wire::ForwardBackwardRequest request;
  if (protobuf.size() > INT32_MAX || !request.ParseFromArray(protobuf.data(), static_cast<int>(protobuf.size())))
    return fail(Code::kInvalid, "forward_backward", "{} bytes that are no ForwardBackwardRequest of Tinker's client",
                protobuf.size());
  if (request.model_id().empty() || request.model_id().size() > kNameBytesMax || request.seq_id() < 1)
    return fail(Code::kInvalid, "forward_backward", "expected a model_id and a seq_id from 1 on");
  Numbered result;
  result.model = request.model_id();
  result.number = static_cast<std::uint64_t>(request.seq_id());
  auto batch = read_batch(request);
  if (batch)
    result.operation = *std::move(batch);
  else
    result.operation = Refused{batch.error().message()};
  return result;
}

Result<Numbered> parse_create_model(std::string_view text) {
  Fields fields(text, "create_model");
  Numbered result;
  result.session = fields.required_text("session_id");
  result.model_number = fields.required_whole("model_seq_id");
  CreateModel create;
  create.base_model = fields.text("base_model", 4096);
  if (create.base_model.empty()) fields.refuse("base_model is missing");
  if (fields.find("lora_config") != nullptr) {
    Fields lora = fields.object("lora_config");
    create.rank = static_cast<std::int64_t>(lora.required_whole("rank", 1 << 20));
    create.seed = lora.whole("seed");
    create.train_mlp = lora.flag("train_mlp", true);
    create.train_attention = lora.flag("train_attn", true);
    create.train_unembedding = lora.flag("train_unembed", true);
    fields.refuse_as(lora);
  }
  Fields optimizer = fields.object("optimizer_config");
  if (const std::string type = optimizer.text("type"); !type.empty() && type != "adamw")
    fields.refuse(fmt::format("optimizer_config.type '{}' is not supported, expected adamw", shown(type)));
  fields.refuse_as(optimizer);
  ECHO_TRY(fields.status());
  result.operation = create;
  return result;
}

Result<Numbered> parse_optim_step(std::string_view text) {
  Fields fields(text, "optim_step");
  Numbered result = place_of(fields);
  if (fields.find("optimizer_params") != nullptr) fields.refuse("optimizer_params: expected adam_params");
  Fields params = fields.object("adam_params");
  AdamSettings adam;
  adam.learning_rate = params.number("learning_rate", adam.learning_rate);
  adam.beta1 = params.number("beta1", adam.beta1);
  adam.beta2 = params.number("beta2", adam.beta2);
  adam.epsilon = params.number("eps", adam.epsilon);
  adam.weight_decay = params.number("weight_decay", adam.weight_decay);
  adam.gradient_norm_max = params.number("grad_clip_norm", adam.gradient_norm_max);
  fields.refuse_as(params);
  result.operation = OptimStep{adam};
  return numbered(fields, std::move(result));
}

Result<Numbered> parse_save_weights(std::string_view text) {
  Fields fields(text, "save_weights");
  Numbered result = place_of(fields);
  SaveWeights save{.name = fields.required_text("path"), .overwrite = fields.flag("overwrite", false)};
  check_name(fields, save.name);
  result.operation = std::move(save);
  return numbered(fields, std::move(result));
}

Result<Numbered> parse_load_weights(std::string_view text) {
  Fields fields(text, "load_weights");
  Numbered result;
  if (fields.find("session_id") != nullptr) {
    result.session = fields.required_text("session_id");
    result.model_number = fields.required_whole("model_seq_id");
  } else {
    result = place_of(fields);
  }
  LoadWeights load{.path = fields.text("path", 4 * kNameBytesMax), .optimizer = fields.flag("optimizer", false)};
  if (const auto path = parse_path(load.path, "weights"); !path) fields.refuse(path.error().detail);
  result.operation = std::move(load);
  if (!result.session.empty()) {
    ECHO_TRY(fields.status());
    return result;
  }
  return numbered(fields, std::move(result));
}

Result<Numbered> parse_save_for_sampler(std::string_view text) {
  Fields fields(text, "save_weights_for_sampler");
  Numbered result = place_of(fields);
  SaveForSampler save;
  save.name = fields.text("path");
  save.session_number = fields.whole("sampling_session_seq_id");
  if (!save.name.empty()) check_name(fields, save.name);
  if (save.name.empty() && !save.session_number) fields.refuse("expected a path or a sampling_session_seq_id");
  const std::string kind = fields.text("kind");
  save.follows_newer = kind == "inflight";
  if (!kind.empty() && kind != "inflight" && kind != "snapshot")
    fields.refuse(fmt::format("kind '{}', expected snapshot or inflight", shown(kind)));
  result.operation = std::move(save);
  return numbered(fields, std::move(result));
}

Result<SamplingSession> parse_sampling_session(std::string_view text) {
  Fields fields(text, "create_sampling_session");
  SamplingSession session{.session = fields.required_text("session_id"),
                          .number = fields.required_whole("sampling_session_seq_id"),
                          .base_model = fields.text("base_model", 4096),
                          .model_path = fields.text("model_path", 4 * kNameBytesMax)};
  if (session.base_model.empty() && session.model_path.empty()) fields.refuse("expected a model_path, or a base_model");
  ECHO_TRY(fields.status());
  return session;
}

Result<SessionSample> parse_sample(std::string_view text, const Limits& limits) {
  Fields fields(text, "asample");
  SessionSample sample;
  sample.sampling_session = fields.text("sampling_session_id", 4 * kNameBytesMax);
  if (sample.sampling_session.empty()) fields.refuse("expected a sampling_session_id: use a sampling client");
  sample.number = fields.required_whole("seq_id");
  SampleRequest& request = sample.request;
  request.samples = static_cast<std::uint32_t>(fields.whole("num_samples", kSamplesMax).value_or(1));
  if (request.samples == 0) fields.refuse(fmt::format("num_samples: expected 1 to {}", kSamplesMax));
  for (const char* name : {"prompt_logprobs", "record_stability_info"})
    if (fields.flag(name, false))
      fields.refuse(
          fmt::format("{} is not supported; forward with cross_entropy gives log-probabilities of given "
                      "tokens",
                      name));
  for (const char* name : {"topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"})
    if (fields.whole(name).value_or(0) != 0) fields.refuse(fmt::format("{} is not supported, expected 0", name));
  if (fields.find("target_prompt_logprobs") != nullptr) fields.refuse("target_prompt_logprobs is not supported");

  const auto read_tokens = [&](const json& values, const char* name, std::vector<model::Token>& tokens) {
    for (const json& value : values) {
      if (!value.is_number_integer() || value < 0 || value >= limits.vocab_size)
        return fields.refuse(fmt::format("{}: expected tokens from 0 to {}", name, limits.vocab_size - 1));
      if (std::ssize(tokens) >= limits.positions_max)
        return fields.refuse(fmt::format("{}: more tokens than the model's {} positions", name, limits.positions_max));
      tokens.push_back(value.get<model::Token>());
    }
  };
  Fields prompt = fields.object("prompt");
  const json* chunks = prompt.find("chunks");
  if (chunks == nullptr || !chunks->is_array()) fields.refuse("prompt: expected chunks");
  for (const json& chunk : chunks != nullptr && chunks->is_array() ? *chunks : json::array()) {
    if (!chunk.is_object() || !chunk.contains("tokens") || !chunk["tokens"].is_array()) {
      fields.refuse("prompt: expected chunks of tokens; images and audio are not supported");
      break;
    }
    read_tokens(chunk["tokens"], "prompt", request.prompt);
  }
  if (request.prompt.empty()) fields.refuse("prompt: expected at least one token");

  Fields params = fields.object("sampling_params");
  request.tokens_max = static_cast<std::uint32_t>(params.whole("max_tokens", 1U << 30).value_or(0));
  if (params.find("max_tokens") == nullptr) request.tokens_max = limits.response_tokens_max;
  if (request.tokens_max < 1 || request.tokens_max > limits.response_tokens_max)
    fields.refuse(fmt::format("max_tokens is {}, expected 1 to {} (rollout.response_tokens_max of the run file)",
                              request.tokens_max, limits.response_tokens_max));
  if (std::ssize(request.prompt) + request.tokens_max > limits.positions_max)
    fields.refuse(fmt::format("{} tokens of the prompt and max_tokens {} exceed the model's {} positions",
                              request.prompt.size(), request.tokens_max, limits.positions_max));
  request.temperature = params.number("temperature", 1);
  if (request.temperature < 0 || request.temperature > 100) fields.refuse("temperature: expected 0 to 100");
  request.top_p = params.number("top_p", 1);
  if (!(request.top_p > 0 && request.top_p <= 1)) fields.refuse("top_p: expected a number above 0, at most 1");
  const double top_k = params.number("top_k", -1);
  if (top_k < -1 || top_k > 1e9 || top_k != std::floor(top_k)) fields.refuse("top_k: expected -1 or a whole number");
  request.top_k = top_k > 0 ? static_cast<std::uint32_t>(top_k) : 0;
  sample.has_seed = params.find("seed") != nullptr;
  request.seed = params.whole("seed").value_or(0);

  sample.has_default_stop = true;
  if (const json* stop = params.find("stop"); stop != nullptr) {
    const json list = stop->is_string() ? json::array({*stop}) : *stop;
    if (!list.is_array() || list.size() > kStopsMax) {
      fields.refuse(fmt::format("stop: expected a text, or a list of at most {} texts or tokens", kStopsMax));
    } else if (list.empty()) {
      sample.has_default_stop = false;
    } else if (list.front().is_number()) {
      read_tokens(list, "stop", request.end_tokens);
    } else {
      for (const json& text_stop : list) {
        if (!text_stop.is_string() || text_stop.get_ref<const std::string&>().empty() ||
            text_stop.get_ref<const std::string&>().size() > kStopBytesMax) {
          fields.refuse(fmt::format("stop: expected texts of 1 to {} bytes", kStopBytesMax));
          break;
        }
        request.stop.push_back(text_stop.get<std::string>());
      }
    }
  }
  fields.refuse_as(params);
  ECHO_TRY(fields.status());
  return sample;
}

Result<std::string> parse_text(std::string_view text, const char* field) {
  Fields fields(text, field);
  std::string value = fields.text(field, 8 * kNameBytesMax);
  if (value.empty()) fields.refuse("it is missing");
  ECHO_TRY(fields.status());
  return value;
}

std::string to_text(const CheckpointPath& path, std::string_view kind) {
  return fmt::format("{}{}/{}/{}", kScheme, path.model, kind, path.name);
}

Result<CheckpointPath> parse_path(std::string_view path, std::string_view kind) {
  const std::string middle = fmt::format("/{}/", kind);
  const std::size_t at = path.find(middle);
  if (!path.starts_with(kScheme) || at == std::string_view::npos)
    return fail(Code::kInvalid, "path", "'{}': expected tinker://MODEL/{}/NAME", shown(path), kind);
  CheckpointPath parsed{std::string(path.substr(kScheme.size(), at - kScheme.size())),
                        std::string(path.substr(at + middle.size()))};
  if (parsed.model.empty() || parsed.name.empty() || parsed.name.find('/') != std::string::npos ||
      parsed.name.front() == '.' || parsed.name.size() > kNameBytesMax)
    return fail(Code::kInvalid, "path", "'{}': expected tinker://MODEL/{}/NAME", shown(path), kind);
  return parsed;
}

}  // namespace echoline::learner::tinker
