// The protocol of vLLM, used by the remote engine. It samples through /inference/v1/generate if the server has that
// (`--enable-scale-out`), otherwise through OpenAI completions. It changes weights by vLLM's calls for trainers, which
// the server offers only with VLLM_SERVER_DEV_MODE=1. Based on the answers of vLLM 0.32.
#include "worker/engines/answers.hpp"
#include "worker/engines/expert_rows.hpp"
#include "worker/engines/protocol.hpp"

namespace echoline::worker {
namespace {

// Returns the single element of an answer's "choices".
Result<json> only_choice(const json& answer) {
  const json& choices = at(answer, "choices");
  if (!choices.is_array() || choices.size() != 1 || at(choices[0], "index") != 0)
    return unexpected_answer("expected one choice with index 0, found {}", excerpt(choices));
  return choices[0];
}

class Vllm final : public Protocol {
 public:
  std::string_view name() const override { return "vLLM"; }
  std::vector<std::pair<std::string, std::string>> environment() const override {
    return {{"VLLM_SERVER_DEV_MODE", "1"}, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"}};
  }
  // Four adapters at once, so that responses can finish under the adapters of three earlier policies.
  std::string adapter_options(std::int64_t rank) const override {
    return fmt::format("--enable-lora --max-lora-rank {} --max-loras 4 --lora-target-modules MODULES", rank);
  }
  Call health() const override { return {"GET", "/health", ""}; }

  std::optional<Call> served_folder_request() const override { return Call{"GET", "/v1/models", ""}; }
  // Parses {"data": [{"root": "<the folder>"}]}.
  std::filesystem::path parse_served_folder(std::string_view body) const override {
    const Result<json> answer = parse_answer(body);
    if (!answer) return {};
    const json& models = at(*answer, "data");
    if (!models.is_array() || models.empty()) return {};
    const json& root = at(models[0], "root");
    return root.is_string() ? root.get<std::string>() : std::string();
  }

  std::optional<Call> interface_request() const override {
    return post(kGeneratePath,  // any prompt, such as token 0
                {{"token_ids", {0}}, {"sampling_params", sampling_params(/*temperature=*/1, /*tokens_max=*/1)}});
  }
  Status on_interface_response(int status, std::string_view body) override {
    has_generate_endpoint_ = false;
    if (status == 403 || status == 404 || status == 405) return ok();  // missing or not enabled: completions are used
    if (status != 200)
      return fail(Code::kUnavailable, "engine", "{}: expected status 200, found {} ({})", kGeneratePath, status,
                  printable(body, 300));
    ECHO_ASSIGN(const json answer, parse_answer(body));
    ECHO_ASSIGN(const json choice, only_choice(answer));
    // Releases before 0.32 do not report the weights, so they are used through completions.
    has_generate_endpoint_ = at(choice, "weight_versions").is_array();
    return ok();
  }
  // echoline's plug-in (clients/python/echoline/vllm_receiver.py) accepts only the folder that vLLM serves.
  std::optional<Call> receiver_request(const std::filesystem::path& folder) const override {
    return post("/init_weight_transfer_engine",
                {{"init_info", {{"folder", folder.string()}, {"interface", kReceiverInterface}}}});
  }
  Status on_receiver_response(int status, std::string_view body) override {
    if (status == 200) return ok();
    if (status == 404 || status == 405)  // the release lacks this call
      return fail(Code::kUnavailable, "engine", "it knows no weight transfer");
    const Result<json> answer = parse_answer(body);  // an error answer need not be JSON
    std::string reason =
        text_of(at(answer ? *answer : json(), "error", "message")).value_or(fmt::format("status {}", status));
    // "Call to collective_rpc method failed: Worker failed with error '<the reason>', please check ..."
    if (const auto begin = reason.find(kWorkerErrorPrefix), end = reason.rfind("', please");
        begin < end && end < reason.size())  // both were found: npos is larger than any size
      reason = reason.substr(begin + kWorkerErrorPrefix.size(), end - begin - kWorkerErrorPrefix.size());
    return fail(Code::kUnavailable, "engine", "{}", printable(reason, 300));
  }
  // On a CPU, vLLM 0.32 packs an output head that is tied to the embedding separately. A reload without a tensor for
  // the head leaves it with the first policy's values.
  bool needs_separate_head() const override { return true; }

  Call sample_call(const SampleRequest& request) const override {
    json params = sampling_params(request.temperature, request.tokens_max);
    params["logprobs"] = 0;                             // of the sampled token only, without alternatives
    params["ignore_eos"] = request.end_tokens.empty();  // the model's own ending tokens do not count then
    if (!request.end_tokens.empty()) params["stop_token_ids"] = request.end_tokens;
    if (!request.stop_strings.empty()) {
      params["stop"] = request.stop_strings;
      params["include_stop_str_in_output"] = true;
    }
    if (!has_generate_endpoint_) return completion_call(request.context, std::move(params), request.adapter);
    json body = {{"token_ids", request.context},
                 {"sampling_params", params},
                 {"cache_salt", request.weights_name},
                 {"return_token_ids", true}};
    if (!request.adapter.empty()) body["model"] = request.adapter;
    return post(kGeneratePath, body);
  }
  Result<SampleResponse> parse_sample_response(const SampleRequest& request, std::string_view body) const override {
    ECHO_ASSIGN(const json answer, parse_answer(body));
    ECHO_ASSIGN(const json choice, only_choice(answer));
    ECHO_TRY(check_adapter(answer, request.adapter));
    SampleResponse sampled;
    sampled.aborted = at(choice, "finish_reason") == "abort";
    const json& prompt_holder = has_generate_endpoint_ ? answer : choice;  // completions repeat the prompt per choice
    if (const json& prompt = at(prompt_holder, "prompt_token_ids"); !prompt.is_null()) {  // null: it is not repeated
      ECHO_ASSIGN(const auto context, tokens_of(prompt, "prompt_token_ids"));
      if (context != request.context)
        return unexpected_answer("it is about another prompt, of {} tokens", context.size());
    }
    const json& ids = at(choice, "token_ids");
    if (ids.is_null()) {
      if (sampled.aborted) return sampled;  // without tokens: aborted before the first one
      return unexpected_answer(
          "no 'token_ids': the server does not know `return_token_ids`, which vLLM has since 0.10.2");
    }
    ECHO_ASSIGN(sampled.tokens, tokens_of(ids, "token_ids"));
    // By token: the generate endpoint sends an object, completions only the number.
    const json& logprobs = at(choice, "logprobs", has_generate_endpoint_ ? "content" : "token_logprobs");
    if (!logprobs.is_array() || logprobs.size() != sampled.tokens.size()) {
      // An aborted response may lack log-probabilities. Its tokens cannot be used then.
      if (sampled.aborted) return SampleResponse{.tokens = {}, .logprobs = {}, .aborted = true, .spans = {}};
      return unexpected_answer("expected {} log-probabilities, found {}", sampled.tokens.size(), excerpt(logprobs));
    }
    for (std::size_t i = 0; i < logprobs.size(); ++i) {
      if (has_generate_endpoint_ && at(logprobs[i], "token_id") != sampled.tokens[i])
        return unexpected_answer("expected the log-probability of token {}, found {}", sampled.tokens[i],
                                 excerpt(logprobs[i]));
      const json& value = has_generate_endpoint_ ? at(logprobs[i], "logprob") : logprobs[i];
      ECHO_ASSIGN(const double logprob, logprob_of(value));
      sampled.logprobs.push_back(logprob);
    }
    ECHO_TRY(read_experts(answer, choice, request, sampled));
    // Spans tell which tokens came from which version of the base weights. With an adapter they tell nothing: the base
    // never changes, and a request keeps its adapter.
    if (has_generate_endpoint_ && request.adapter.empty()) ECHO_TRY(read_spans(at(choice, "weight_versions"), sampled));
    return sampled;
  }

  Call scores_request(const std::vector<model::Token>& text, const std::string& adapter) const override {
    json params = sampling_params(/*temperature=*/1, /*tokens_max=*/1);
    params["prompt_logprobs"] = 0;  // those of the prompt's own tokens
    params["ignore_eos"] = true;    // an ending token must not end the request before its token
    return completion_call(text, std::move(params), adapter);
  }
  // Parses prompt_logprobs: [null, {"<token>": {"logprob": ...}}, ...].
  Result<TextScores> parse_scores(const std::vector<model::Token>& text, const std::string& adapter,
                                  std::string_view body) const override {
    ECHO_ASSIGN(const json answer, parse_answer(body));
    ECHO_ASSIGN(const json choice, only_choice(answer));
    ECHO_TRY(check_adapter(answer, adapter));
    const json& entries = at(choice, "prompt_logprobs");
    if (!entries.is_array() || entries.size() != text.size())
      return unexpected_answer("expected {} entries in prompt_logprobs, found {}", text.size(), excerpt(entries));
    TextScores scores;
    for (std::size_t i = 1; i < entries.size(); ++i) {  // the first token has no log-probability
      const json& entry = at(entries[i], std::to_string(text[i]).c_str());
      if (!entry.is_object())
        return unexpected_answer("expected the log-probability of token {} in prompt_logprobs, found {}", text[i],
                                 excerpt(entries[i]));
      ECHO_ASSIGN(const double logprob, logprob_of(at(entry, "logprob")));
      scores.logprobs.push_back(logprob);
    }
    return scores;
  }

  Call spread_request(const std::vector<model::Token>& text, double temperature) const override {
    json params = sampling_params(temperature, /*tokens_max=*/1);
    params["logprobs"] = kSpreadRank;
    params["return_tokens_as_token_ids"] = true;  // otherwise two tokens with the same text would be one
    return completion_call(text, std::move(params), /*adapter=*/{});
  }
  Result<double> parse_spread(std::string_view body) const override {
    ECHO_ASSIGN(const json answer, parse_answer(body));
    ECHO_ASSIGN(const json choice, only_choice(answer));
    const json& top = at(choice, "logprobs", "top_logprobs");
    if (!top.is_array() || top.empty() || !top[0].is_object())
      return unexpected_answer("expected top_logprobs, found {}", excerpt(top));
    std::vector<double> highest;
    for (const auto& [token, value] : top[0].items()) {
      ECHO_ASSIGN(const double logprob, logprob_of(value));
      highest.push_back(logprob);
    }
    if (highest.empty()) return 0.0;  // no difference: the caller then warns that it sees no temperature
    std::sort(highest.rbegin(), highest.rend());
    highest.resize(std::min(highest.size(), kSpreadRank));  // the sampled token may be an additional entry
    return highest.front() - highest.back();
  }
  std::string_view temperature_logprobs_hint() const override {
    return "start it with --logprobs-mode processed_logprobs";
  }

  bool keeps_responses() const override { return has_generate_endpoint_; }
  Step pause() const override {
    return {.call = {"POST", has_generate_endpoint_ ? "/pause?mode=keep" : "/pause?mode=abort", ""}, .optional = true};
  }
  std::vector<Step> load(const std::filesystem::path&, Version version) const override {
    std::vector<Step> steps{{.call = post("/collective_rpc", {{"method", "reload_weights"}}), .long_work = true}};
    // Keys and values of the earlier weights must not be used again. With the generate endpoint, requests separate them
    // by `cache_salt`. Completions have no such field, so the cache is emptied.
    if (has_generate_endpoint_)
      steps.push_back(version_step(version));
    else
      steps.push_back({{"POST", "/reset_prefix_cache", ""}});
    return steps;
  }
  // The receiver plug-in reads the changed tensors from the folder, without a reload of the others.
  std::vector<Step> hand_over(const Handover& handover) const override {
    json info = {{"version", fmt::format("{}", handover.version)}};
    if (handover.base) {  // otherwise the receiver reads all tensors
      info["base"] = fmt::format("{}", *handover.base);
      info["tensors"] = handover.changed;
    }
    std::vector<Step> steps{{.call = post("/start_weight_update", json::object())},
                            {.call = post("/update_weights", {{"update_info", info}}), .long_work = true},
                            {.call = post("/finish_weight_update", {{"weight_version", info["version"]}})}};
    if (!has_generate_endpoint_) steps.push_back({{"POST", "/reset_prefix_cache", ""}});  // as in load()
    return steps;
  }
  // Ends an update that has begun. vLLM refuses the call if no update has begun.
  std::vector<Step> abort_handover() const override {
    return {{.call = post("/finish_weight_update", json::object()), .optional = true}};
  }
  Step resume() const override { return {.call = {"POST", "/resume", ""}, .optional = true}; }

  Call adapter_limits_request() const override { return {"GET", "/server_info?config_format=json", ""}; }
  // Parses {"vllm_config": {"lora_config": {"max_lora_rank": 16, "max_loras": 4, ...}}}; lora_config is null without
  // --enable-lora.
  Result<AdapterLimits> adapter_limits(int status, std::string_view body) const override {
    if (status == 404 || status == 405) return AdapterLimits{};  // a release without this call: the limits are unknown
    if (status != 200)
      return fail(Code::kUnavailable, "engine", "/server_info: expected status 200, found {} ({})", status,
                  printable(body, 300));
    ECHO_ASSIGN(const json answer, parse_answer(body));
    const json& config = at(answer, "vllm_config", "lora_config");
    if (config.is_null()) return fail(Code::kInvalid, "engine", "it was started without --enable-lora");
    // On a CPU, vLLM 0.32 wraps the output head for adapters unless target_modules leaves it out. It then ends at the
    // first probe (a prompt with log-probabilities) under an adapter, if it computes another request, too.
    const auto targets = config.find("target_modules");  // null: all modules; missing: an older release
    const bool wraps_head = targets != config.end() && targets->is_null();
    if (wraps_head && at(answer, "vllm_config", "device_config", "device") == "cpu")
      return fail(Code::kInvalid, "engine",
                  "on a CPU it needs --lora-target-modules, with the modules of "
                  "learner.adapter.targets and without lm_head");
    const json &at_once = at(config, "max_loras"), &rank = at(config, "max_lora_rank");
    if (!at_once.is_number_unsigned() || !rank.is_number_unsigned())  // vLLM always reports both
      return unexpected_answer("expected max_loras and max_lora_rank in lora_config, found {}", excerpt(config));
    AdapterLimits limits{at_once.get<std::size_t>(), rank.get<std::int64_t>(), /*modules=*/std::nullopt};
    if (const json& modules = at(config, "target_modules"); modules.is_array()) {  // otherwise it takes all modules
      limits.modules.emplace();
      for (const json& module : modules)
        if (const auto name = text_of(module)) {
          limits.modules->push_back(*name);
          // vLLM computes some modules together. An adapter names them separately, as the checkpoint does.
          if (*name == "qkv_proj")
            for (const char* part : {"q_proj", "k_proj", "v_proj"}) limits.modules->emplace_back(part);
          if (*name == "gate_up_proj")
            for (const char* part : {"gate_proj", "up_proj"}) limits.modules->emplace_back(part);
        }
    }
    return limits;
  }
  Step load_adapter(const std::string& name, const std::filesystem::path& folder) const override {
    return {.call = post("/v1/load_lora_adapter", {{"lora_name", name}, {"lora_path", folder.string()}}),
            .long_work = true};
  }
  Call unload_adapter(const std::string& name) const override {
    return post("/v1/unload_lora_adapter", {{"lora_name", name}});
  }

  std::vector<Step> name_weights(Version version) const override {
    if (!has_generate_endpoint_) return {};  // completions do not report the version
    return {version_step(version)};
  }

 private:
  static constexpr const char* kGeneratePath = "/inference/v1/generate";
  static constexpr std::size_t kSpreadRank = 5;  // the spread is from the most likely token to the one of this rank
  static constexpr int kReceiverInterface = 1;   // version of the plug-in's interface
  static constexpr std::string_view kWorkerErrorPrefix = "failed with error '";

  static Call post(const char* path, const json& body) { return {"POST", path, body.dump()}; }
  // An answer to a request that named an adapter must be of that adapter.
  static Status check_adapter(const json& answer, const std::string& adapter) {
    if (adapter.empty() || at(answer, "model") == adapter) return ok();
    return fail(Code::kStale, "answer of the engine", "expected model '{}', found {}", adapter,
                excerpt(at(answer, "model")));
  }
  static Call completion_call(const std::vector<model::Token>& prompt, json body, const std::string& adapter) {
    if (!adapter.empty()) body["model"] = adapter;
    body["prompt"] = prompt;
    body["n"] = 1;
    body["return_token_ids"] = true;
    body["stream"] = false;
    return post("/v1/completions", body);
  }
  static Step version_step(Version version) {
    return {.call = post("/update_weight_version", {{"new_version", fmt::format("{}", version)}})};
  }
  // States all parameters for which generation_config.json may have other values, because vLLM takes its defaults from
  // that file. Sends no seed, because a server's samples are never replayed, and because a seed crashes
  // vLLM 0.32 on a CPU if the server reads the prompt in parts.
  static json sampling_params(double temperature, std::int64_t tokens_max) {
    return {{"max_tokens", tokens_max},
            {"temperature", temperature},
            {"top_p", 1.0},
            {"top_k", -1},
            {"min_p", 0.0},
            {"frequency_penalty", 0.0},
            {"presence_penalty", 0.0},
            {"repetition_penalty", 1.0}};
  }
  // Reads 'routed_experts', which a server with --enable-return-routed-experts sends: those of the prompt and of all
  // tokens but the last. Some releases send those of the prompt apart.
  static Status read_experts(const json& answer, const json& choice, const SampleRequest& request,
                             SampleResponse& sampled) {
    for (const json* rows : {&at(answer, "prompt_routed_experts"), &at(choice, "routed_experts")}) {
      if (rows->is_null()) continue;  // the server does not send this part
      if (!rows->is_string()) return unexpected_answer("expected base64 in routed_experts, found {}", excerpt(*rows));
      ECHO_ASSIGN(const auto part, parse_expert_rows(rows->get_ref<const std::string&>()));
      const bool is_first = sampled.experts.choices() == 0;
      if (is_first) sampled.experts = {part.layers, part.per_token, {}};
      if (part.layers != sampled.experts.layers || part.per_token != sampled.experts.per_token)
        return unexpected_answer("routed_experts of {} layers and {} experts after those of {} layers and {} experts",
                                 part.layers, part.per_token, sampled.experts.layers, sampled.experts.per_token);
      sampled.experts.values.insert(sampled.experts.values.end(), part.values.begin(), part.values.end());
    }
    const std::size_t tokens = request.context.size() + sampled.tokens.size();
    if (sampled.experts.tokens() > tokens)
      return unexpected_answer("routed_experts of {} tokens, expected at most {}", sampled.experts.tokens(), tokens);
    return ok();
  }
  // Parses [{"version": "3", "start": 0, "end": 5}, ...]. The spans must cover all tokens.
  static Status read_spans(const json& spans, SampleResponse& sampled) {
    std::size_t end = 0;
    if (spans.is_array())
      for (const json& span : spans) {
        const auto version_text = text_of(at(span, "version"));
        const bool follows = at(span, "start") == end;
        const json& span_end = at(span, "end");
        const bool has_tokens = span_end.is_number_unsigned() && span_end.get<std::size_t>() > end;
        if (!version_text || !follows || !has_tokens) break;  // the check below fails unless all tokens are covered
        end = span_end.get<std::size_t>();
        sampled.spans.push_back({*version_text, end});
      }
    if (end == sampled.tokens.size()) return ok();
    return unexpected_answer("expected spans of {} tokens in weight_versions, found {}", sampled.tokens.size(),
                             excerpt(spans));
  }

  bool has_generate_endpoint_ = false;  // serves kGeneratePath
};

}  // namespace

std::unique_ptr<Protocol> vllm_protocol() { return std::make_unique<Vllm>(); }

}  // namespace echoline::worker
