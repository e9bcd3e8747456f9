// vLLM: tokens in and out by /inference/v1/generate (`--enable-scale-out`), or else OpenAI completions; and its calls
// for trainers (VLLM_SERVER_DEV_MODE=1). Based on the answers of vLLM 0.32.
#include "worker/engines/answers.hpp"
#include "worker/engines/protocol.hpp"

namespace echoline::worker {
namespace {

// The one choice of an answer.
Result<json> only_choice(const json& answer) {
  const json& choices = at(answer, "choices");
  if (!choices.is_array() || choices.size() != 1 || at(choices[0], "index") != 0)
    return odd_answer("expected one choice with index 0, found {}", excerpt(choices));
  return choices[0];
}

class Vllm final : public Protocol {
 public:
  std::string_view name() const override { return "vLLM"; }
  std::vector<std::pair<std::string, std::string>> environment() const override {
    return {{"VLLM_SERVER_DEV_MODE", "1"}};
  }
  Call health() const override { return {"GET", "/health", ""}; }

  std::optional<Call> served_model() const override { return Call{"GET", "/v1/models", ""}; }
  // {"data": [{"root": "<the folder>"}]}
  std::filesystem::path served_folder(std::string_view body) const override {
    const Result<json> answer = parse_answer(body);
    if (!answer) return {};
    const json& models = at(*answer, "data");
    if (!models.is_array() || models.empty()) return {};
    const json& root = at(models[0], "root");
    return root.is_string() ? root.get<std::string>() : std::string();
  }

  std::optional<Call> which_interface() const override {
    return post(kGenerate, {{"token_ids", {0}}, {"sampling_params", sampling(1, 1)}});
  }
  Status settle_interface(int status, std::string_view body) override {
    generates_ = false;
    if (status == 403 || status == 404 || status == 405) return ok();  // absent or not enabled
    if (status != 200)
      return fail(Code::kUnavailable, "engine", "{}: expected status 200, found {} ({})", kGenerate, status,
                  printable(body, 300));
    ECHO_ASSIGN(const json answer, parse_answer(body));
    ECHO_ASSIGN(const json choice, only_choice(answer));
    generates_ = at(choice, "weight_versions").is_array();  // releases before 0.32 do not report the weights
    return ok();
  }
  // echoline's plug-in (clients/python/echoline/vllm_receiver.py) refuses another folder than vLLM's.
  std::optional<Call> which_receiver(const std::filesystem::path& folder) const override {
    return post("/init_weight_transfer_engine",
                {{"init_info", {{"folder", folder.string()}, {"interface", kReceiverInterface}}}});
  }
  Status settle_receiver(int status, std::string_view body) override {
    if (status == 200) return ok();
    if (status == 404 || status == 405) return fail(Code::kUnavailable, "engine", "it knows no weight transfer");
    const Result<json> answer = parse_answer(body);
    std::string why =
        text_of(at(answer ? *answer : json(), "error", "message")).value_or(fmt::format("status {}", status));
    // "Call to collective_rpc method failed: Worker failed with error '<the reason>', please check ..."
    if (const auto begin = why.find(kInWorker), end = why.rfind("', please"); begin < end && end < why.size())
      why = why.substr(begin + kInWorker.size(), end - begin - kInWorker.size());
    return fail(Code::kUnavailable, "engine", "{}", printable(why, 300));
  }
  // On a CPU, a reload leaves a tied head with the first policy's values (vLLM 0.32 packs it separately from the
  // embedding).
  bool wants_own_head() const override { return true; }

  Call draw(const Draw& d) const override {
    json params = sampling(d.temperature, d.tokens_max);
    params["logprobs"] = 0;
    params["ignore_eos"] = d.ends.empty();
    if (!d.ends.empty()) params["stop_token_ids"] = d.ends;
    if (!d.stop.empty()) params["stop"] = d.stop, params["include_stop_str_in_output"] = true;
    if (!generates_) return completion(d.context, std::move(params));
    return post(
        kGenerate,
        {{"token_ids", d.context}, {"sampling_params", params}, {"cache_salt", d.weights}, {"return_token_ids", true}});
  }
  Result<Piece> drawn(const Draw& d, std::string_view body) const override {
    ECHO_ASSIGN(const json answer, parse_answer(body));
    ECHO_ASSIGN(const json choice, only_choice(answer));
    Piece piece;
    piece.aborted = at(choice, "finish_reason") == "abort";
    if (const json& prompt = at(generates_ ? answer : choice, "prompt_token_ids"); !prompt.is_null()) {
      ECHO_ASSIGN(const auto context, tokens_of(prompt, "prompt_token_ids"));
      if (context != d.context) return odd_answer("it is about another prompt, of {} tokens", context.size());
    }
    const json& ids = at(choice, "token_ids");
    if (ids.is_null()) {
      if (piece.aborted) return piece;
      return odd_answer("no 'token_ids': it does not know `return_token_ids`, which vLLM has since 0.10.2");
    }
    ECHO_ASSIGN(piece.tokens, tokens_of(ids, "token_ids"));
    const json& logprobs = at(choice, "logprobs", generates_ ? "content" : "token_logprobs");
    if (!logprobs.is_array() || logprobs.size() != piece.tokens.size()) {
      if (piece.aborted) return Piece{{}, {}, true, {}};
      return odd_answer("expected {} log-probabilities, found {}", piece.tokens.size(), excerpt(logprobs));
    }
    for (std::size_t i = 0; i < logprobs.size(); ++i) {
      if (generates_ && at(logprobs[i], "token_id") != piece.tokens[i])
        return odd_answer("expected the log-probability of token {}, found {}", piece.tokens[i], excerpt(logprobs[i]));
      ECHO_ASSIGN(const double logprob, logprob_of(generates_ ? at(logprobs[i], "logprob") : logprobs[i]));
      piece.logprobs.push_back(logprob);
    }
    if (generates_) ECHO_TRY(read_spans(at(choice, "weight_versions"), piece));
    return piece;
  }

  Call probe(const std::vector<model::Token>& text) const override {
    json params = sampling(1, 1);
    params["prompt_logprobs"] = 0;
    params["ignore_eos"] = true;
    return completion(text, std::move(params));
  }
  // [null, {"<token>": {"logprob": ...}}, ...]
  Result<Probed> probed(const std::vector<model::Token>& text, std::string_view body) const override {
    ECHO_ASSIGN(const json answer, parse_answer(body));
    ECHO_ASSIGN(const json choice, only_choice(answer));
    const json& list = at(choice, "prompt_logprobs");
    if (!list.is_array() || list.size() != text.size())
      return odd_answer("expected {} entries in prompt_logprobs, found {}", text.size(), excerpt(list));
    Probed probed;
    for (std::size_t i = 1; i < list.size(); ++i) {
      const json& entry = at(list[i], std::to_string(text[i]).c_str());
      if (!entry.is_object())
        return odd_answer("expected the log-probability of token {} in prompt_logprobs, found {}", text[i],
                          excerpt(list[i]));
      ECHO_ASSIGN(const double logprob, logprob_of(at(entry, "logprob")));
      probed.logprobs.push_back(logprob);
    }
    return probed;
  }

  Call spread(const std::vector<model::Token>& text, double temperature) const override {
    json params = sampling(temperature, 1);
    params["logprobs"] = 5;
    params["return_tokens_as_token_ids"] = true;  // otherwise two tokens with the same text would be one
    return completion(text, std::move(params));
  }
  Result<double> spread_of(std::string_view body) const override {
    ECHO_ASSIGN(const json answer, parse_answer(body));
    ECHO_ASSIGN(const json choice, only_choice(answer));
    const json& top = at(choice, "logprobs", "top_logprobs");
    if (!top.is_array() || top.empty() || !top[0].is_object())
      return odd_answer("expected top_logprobs, found {}", excerpt(top));
    std::vector<double> all;
    for (const auto& [token, value] : top[0].items()) {
      ECHO_ASSIGN(const double logprob, logprob_of(value));
      all.push_back(logprob);
    }
    std::sort(all.rbegin(), all.rend());
    all.resize(std::min<std::size_t>(all.size(), 5));  // the drawn token may be a sixth
    return all.empty() ? 0.0 : all.front() - all.back();
  }
  std::string_view temper_how() const override { return "start it with --logprobs-mode processed_logprobs"; }

  bool keeps_responses() const override { return generates_; }
  Step pause() const override { return {{"POST", generates_ ? "/pause?mode=keep" : "/pause?mode=abort", ""}, true}; }
  std::vector<Step> load(const std::filesystem::path&, Version version) const override {
    std::vector<Step> steps{{.call = post("/collective_rpc", {{"method", "reload_weights"}}), .long_work = true}};
    if (generates_)
      steps.push_back(version_step(version));  // `cache_salt` separates keys and values of different weights
    else
      steps.push_back({{"POST", "/reset_prefix_cache", ""}});
    return steps;
  }
  std::vector<Step> hand_over(const Handover& handover) const override {
    json info = {{"version", fmt::format("{}", handover.version)}};
    if (handover.base) info["base"] = fmt::format("{}", *handover.base), info["tensors"] = handover.changed;
    std::vector<Step> steps{{.call = post("/start_weight_update", json::object())},
                            {.call = post("/update_weights", {{"update_info", info}}), .long_work = true},
                            {.call = post("/finish_weight_update", {{"weight_version", info["version"]}})}};
    if (!generates_) steps.push_back({{"POST", "/reset_prefix_cache", ""}});
    return steps;
  }
  // Ends an update that has begun; vLLM refuses the call if there is none.
  std::vector<Step> give_up_handing_over() const override {
    return {{.call = post("/finish_weight_update", json::object()), .optional = true}};
  }
  Step resume() const override { return {{"POST", "/resume", ""}, true}; }
  std::vector<Step> name_weights(Version version) const override {
    if (!generates_) return {};
    return {version_step(version)};
  }

 private:
  static constexpr const char* kGenerate = "/inference/v1/generate";
  static constexpr int kReceiverInterface = 1;
  static constexpr std::string_view kInWorker = "failed with error '";

  static Call post(const char* path, const json& body) { return {"POST", path, body.dump()}; }
  static Call completion(const std::vector<model::Token>& prompt, json body) {
    body["prompt"] = prompt;
    body["n"] = 1;
    body["return_token_ids"] = true;
    body["stream"] = false;
    return post("/v1/completions", body);
  }
  static Step version_step(Version version) {
    return {.call = post("/update_weight_version", {{"new_version", fmt::format("{}", version)}})};
  }
  // All parameters for which generation_config.json may have other values, since vLLM takes its defaults from it. No
  // seed: a server's draws are never replayed, and on a CPU, a seeded prompt that is read in parts crashes vLLM 0.32.
  static json sampling(double temperature, std::int64_t tokens_max) {
    return {{"max_tokens", tokens_max},
            {"temperature", temperature},
            {"top_p", 1.0},
            {"top_k", -1},
            {"min_p", 0.0},
            {"frequency_penalty", 0.0},
            {"presence_penalty", 0.0},
            {"repetition_penalty", 1.0}};
  }
  // [{"version": "3", "start": 0, "end": 5}, ...]; the spans must cover all tokens.
  static Status read_spans(const json& list, Piece& piece) {
    std::size_t end = 0;
    if (list.is_array())
      for (const json& span : list) {
        const auto weights = text_of(at(span, "version"));
        if (!weights || at(span, "start") != end || !at(span, "end").is_number_unsigned() ||
            at(span, "end").get<std::size_t>() <= end)
          break;
        end = at(span, "end").get<std::size_t>();
        piece.spans.push_back({*weights, end});
      }
    if (end == piece.tokens.size()) return ok();
    return odd_answer("expected spans of {} tokens in weight_versions, found {}", piece.tokens.size(), excerpt(list));
  }

  bool generates_ = false;  // /inference/v1/generate
};

}  // namespace

std::unique_ptr<Protocol> vllm_protocol() { return std::make_unique<Vllm>(); }

}  // namespace echoline::worker
