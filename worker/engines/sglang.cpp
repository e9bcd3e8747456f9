// The protocol of SGLang: its /generate and its calls that change weights. The remote engine uses it.
#include "worker/engines/answers.hpp"
#include "worker/engines/protocol.hpp"

namespace echoline::worker {
namespace {

// Tokens with their log-probabilities. In JSON: [[logprob, token, text], ...].
struct ScoredTokens {
  std::vector<model::Token> tokens;
  std::vector<double> logprobs;
};

// Parses the elements of `list` from index `first` on.
Result<ScoredTokens> parse_scored(const json& list, const char* list_name, std::size_t first) {
  if (!list.is_array())
    return unexpected_answer("expected a list in {}, found {}: is `return_logprob` known to it?", list_name,
                             excerpt(list));
  ScoredTokens result;
  for (std::size_t i = first; i < list.size(); ++i) {
    if (!list[i].is_array() || list[i].size() < 2)
      return unexpected_answer("expected [log-probability, token] in {}, found {}", list_name, excerpt(list[i]));
    ECHO_ASSIGN(const double logprob, logprob_of(list[i][0]));
    ECHO_ASSIGN(const model::Token token, token_of(list[i][1]));
    result.logprobs.push_back(logprob);
    result.tokens.push_back(token);
  }
  return result;
}

Status check_success(std::string_view body) {
  ECHO_ASSIGN(const json answer, parse_answer(body));
  if (at(answer, "success") == true) return ok();
  return fail(Code::kUnavailable, "load policy", "{}",
              printable(text_of(at(answer, "message")).value_or("it contains neither success nor a reason"), 500));
}

class Sglang final : public Protocol {
 public:
  std::string_view name() const override { return "SGLang"; }
  Call health() const override { return {"GET", "/health", ""}; }
  // Four adapters at once, so that responses can finish under the adapters of three earlier policies.
  std::string adapter_options(std::int64_t rank) const override {
    return fmt::format("--enable-lora --max-lora-rank {} --lora-target-modules all --max-loras-per-batch 4", rank);
  }

  Call sample_call(const SampleRequest& request) const override {
    json params = sampling_params(request.temperature, request.tokens_max, request.seed, request.end_tokens);
    if (!request.stop_strings.empty()) params["stop"] = request.stop_strings;
    return generate_call({{"input_ids", request.context}, {"sampling_params", params}, {"return_logprob", true}},
                         request.adapter);
  }
  Result<SampleResponse> parse_sample_response(const SampleRequest& request, std::string_view body) const override {
    ECHO_ASSIGN(const json answer, parse_answer(body));
    SampleResponse sampled;
    sampled.aborted = at(answer, "meta_info", "finish_reason", "type") == "abort";
    const json& list = at(answer, "meta_info", "output_token_logprobs");
    if (sampled.aborted && list.is_null()) return sampled;  // without tokens: aborted before the first one
    ECHO_ASSIGN(ScoredTokens scored, parse_scored(list, "output_token_logprobs", /*first=*/0));
    if (const json& ids = at(answer, "output_ids"); !ids.is_null()) {  // null: the tokens are only in `list`
      ECHO_ASSIGN(const auto tokens, tokens_of(ids, "output_ids"));
      if (tokens != scored.tokens) {
        if (sampled.aborted) return sampled;  // without its tokens, because some lack log-probabilities
        return unexpected_answer("{} log-probabilities, which are not those of the {} tokens", scored.tokens.size(),
                                 tokens.size());
      }
    }
    sampled.tokens = std::move(scored.tokens);
    sampled.logprobs = std::move(scored.logprobs);
    // SGLang reports the version of the base. Under an adapter this does not matter, because the adapter stays the same
    // for a request.
    if (const auto weights_name = text_of(at(answer, "meta_info", "weight_version"));
        weights_name && request.adapter.empty())
      sampled.spans = {{*weights_name, sampled.tokens.size()}};
    return sampled;
  }

  Call scores_request(const std::vector<model::Token>& text, const std::string& adapter) const override {
    return generate_call(
        {{"input_ids", text},
         {"sampling_params", sampling_params(/*temperature=*/1, /*tokens_max=*/1, /*seed=*/1, /*end_tokens=*/{})},
         {"return_logprob", true},
         {"logprob_start_len", 0}},  // index of the first token whose log-probability is sent
        adapter);
  }
  // SGLang's answers do not say under which adapter they were computed, so that is not checked.
  Result<TextScores> parse_scores(const std::vector<model::Token>& text, const std::string& adapter,
                                  std::string_view body) const override {
    ECHO_ASSIGN(const json answer, parse_answer(body));
    ECHO_ASSIGN(ScoredTokens scored,
                parse_scored(at(answer, "meta_info", "input_token_logprobs"), "input_token_logprobs",
                             /*first=*/1));  // the first token of a text has no log-probability
    if (!std::equal(scored.tokens.begin(), scored.tokens.end(), text.begin() + 1, text.end()))
      return unexpected_answer(
          "expected log-probabilities of the {} tokens that were sent, without the first; found {} log-probabilities, "
          "or "
          "those of other tokens",
          text.size(), scored.tokens.size());
    // With an adapter, weight_version is the version of the base, which says nothing about the adapter.
    return TextScores{std::move(scored.logprobs),
                      adapter.empty() ? text_of(at(answer, "meta_info", "weight_version")) : std::nullopt};
  }

  Call spread_request(const std::vector<model::Token>& text, double temperature) const override {
    return generate_call(
        {{"input_ids", text},
         {"sampling_params", sampling_params(temperature, /*tokens_max=*/1, /*seed=*/1, /*end_tokens=*/{})},
         {"return_logprob", true},
         {"top_logprobs_num", kSpreadRank}},
        /*adapter=*/{});
  }
  Result<double> parse_spread(std::string_view body) const override {
    ECHO_ASSIGN(const json answer, parse_answer(body));
    const json& top = at(answer, "meta_info", "output_top_logprobs");
    if (!top.is_array() || top.empty())
      return unexpected_answer("expected output_top_logprobs, found {}", excerpt(top));
    ECHO_ASSIGN(const ScoredTokens scored, parse_scored(top[0], "output_top_logprobs", /*first=*/0));
    if (scored.logprobs.empty()) return 0.0;  // no spread, as if the temperature were ignored
    const auto [lowest, highest] = std::minmax_element(scored.logprobs.begin(), scored.logprobs.end());
    return *highest - *lowest;
  }
  std::string_view temperature_logprobs_hint() const override {
    return "start it without SGLANG_RETURN_ORIGINAL_LOGPROB (RETURN_ORIGINAL_LOGPROB in older releases)";
  }

  Step pause() const override { return {.call = post("/pause_generation", {{"mode", "abort"}}), .optional = true}; }
  std::vector<Step> load(const std::filesystem::path& folder, Version version) const override {
    return {{.call = post("/update_weights_from_disk", {{"model_path", folder.string()},
                                                        {"load_format", nullptr},  // that of the server's start
                                                        {"abort_all_requests", false},
                                                        {"weight_version", fmt::format("{}", version)},
                                                        {"flush_cache", true},
                                                        {"keep_pause", false},
                                                        {"is_async", false}}),
             .long_work = true,
             .check_answer = check_success}};
  }
  Step resume() const override { return {.call = post("/continue_generation", json::object()), .optional = true}; }

  Call adapter_limits_request() const override { return {"GET", "/get_server_info", ""}; }
  // Parses {"enable_lora": true, "max_lora_rank": 16, "max_loras_per_batch": 4, ...}.
  Result<AdapterLimits> adapter_limits(int status, std::string_view body) const override {
    if (status == 404 || status == 405) return AdapterLimits{};  // a release without this call: the limits are unknown
    if (status != 200)
      return fail(Code::kUnavailable, "engine", "/get_server_info: expected status 200, found {} ({})", status,
                  printable(body, 300));
    ECHO_ASSIGN(const json answer, parse_answer(body));
    // Missing: the release does not report whether it takes adapters. null: the option was not set, so it takes none.
    const auto enable_lora = answer.find("enable_lora");
    const bool is_off = enable_lora != answer.end() && (*enable_lora == false || enable_lora->is_null());
    if (is_off) return fail(Code::kInvalid, "engine", "it was started without --enable-lora");
    AdapterLimits limits;
    if (const json& at_once = at(answer, "max_loras_per_batch"); at_once.is_number_unsigned())
      limits.at_once = at_once.get<std::size_t>();
    if (const json& rank = at(answer, "max_lora_rank"); rank.is_number_unsigned())
      limits.rank = rank.get<std::int64_t>();
    return limits;
  }
  Step load_adapter(const std::string& name, const std::filesystem::path& folder) const override {
    return {.call = post("/load_lora_adapter", {{"lora_name", name}, {"lora_path", folder.string()}}),
            .long_work = true,
            .check_answer = check_success};
  }
  Call unload_adapter(const std::string& name) const override {
    return post("/unload_lora_adapter", {{"lora_name", name}});
  }

  std::vector<Step> name_weights(Version version) const override {
    return {{.call = post("/update_weight_version",
                          {{"new_version", fmt::format("{}", version)}, {"abort_all_requests", false}}),
             .optional = true}};
  }

 private:
  static constexpr int kSpreadRank = 5;  // spread_request() compares the most likely token with this one
  static constexpr std::uint64_t kSeedMask = 0x7fffffff;  // SGLang's seeds are signed 32-bit numbers

  static Call post(const char* path, const json& body) { return {"POST", path, body.dump()}; }
  static Call generate_call(json body, const std::string& adapter) {
    if (!adapter.empty()) body["lora_path"] = adapter;
    return post("/generate", body);
  }
  // States all parameters for which a server or model may have its own default.
  static json sampling_params(double temperature, std::int64_t tokens_max, std::uint64_t seed,
                              const std::vector<model::Token>& end_tokens) {
    json params = {{"max_new_tokens", tokens_max},
                   {"temperature", temperature},
                   {"top_p", 1.0},
                   {"top_k", -1},
                   {"min_p", 0.0},
                   {"frequency_penalty", 0.0},
                   {"presence_penalty", 0.0},
                   {"repetition_penalty", 1.0},
                   {"ignore_eos", end_tokens.empty()},  // without end tokens, the model's own do not count either
                   {"no_stop_trim", true},              // keeps the stop string in the response
                   {"sampling_seed", seed & kSeedMask}};
    if (!end_tokens.empty()) params["stop_token_ids"] = end_tokens;
    return params;
  }
};

}  // namespace

std::unique_ptr<Protocol> sglang_protocol() { return std::make_unique<Sglang>(); }

}  // namespace echoline::worker
