// vLLM: completions as OpenAI has them, with tokens, and its calls for those who train (VLLM_SERVER_DEV_MODE=1).
#include "worker/engines/answers.hpp"
#include "worker/engines/protocol.hpp"

namespace echoline::worker {
namespace {

// The one choice of an answer.
Result<json> only_choice(std::string_view body) {
  ECHO_ASSIGN(const json answer, parse_answer(body));
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

  Call draw(const Draw& d) const override {
    json body = sampling(d.context, d.temperature, d.tokens_max, d.seed);
    body["logprobs"] = 0;
    body["ignore_eos"] = d.ends.empty();
    if (!d.ends.empty()) body["stop_token_ids"] = d.ends;
    if (!d.stop.empty()) body["stop"] = d.stop, body["include_stop_str_in_output"] = true;
    return post("/v1/completions", body);
  }
  Result<Piece> drawn(const Draw& d, std::string_view body) const override {
    ECHO_ASSIGN(const json choice, only_choice(body));
    Piece piece;
    piece.aborted = at(choice, "finish_reason") == "abort";
    if (const json& prompt = at(choice, "prompt_token_ids"); !prompt.is_null()) {
      ECHO_ASSIGN(const auto context, tokens_of(prompt, "prompt_token_ids"));
      if (context != d.context) return odd_answer("it is about another prompt, of {} tokens", context.size());
    }
    const json& ids = at(choice, "token_ids");
    if (ids.is_null()) {
      if (piece.aborted) return piece;
      return odd_answer("no 'token_ids': it does not know `return_token_ids`, which vLLM has since 0.10.2");
    }
    ECHO_ASSIGN(piece.tokens, tokens_of(ids, "token_ids"));
    const json& logprobs = at(choice, "logprobs", "token_logprobs");
    if (!logprobs.is_array() || logprobs.size() != piece.tokens.size()) {
      if (piece.aborted) return Piece{{}, {}, true, std::nullopt};
      return odd_answer("expected {} log-probabilities in token_logprobs, found {}", piece.tokens.size(),
                        excerpt(logprobs));
    }
    for (const json& one : logprobs) {
      ECHO_ASSIGN(const double logprob, logprob_of(one));
      piece.logprobs.push_back(logprob);
    }
    return piece;
  }

  Call probe(const std::vector<model::Token>& text) const override {
    json body = sampling(text, 1, 1, 1);
    body["prompt_logprobs"] = 0;
    body["ignore_eos"] = true;
    return post("/v1/completions", body);
  }
  // [null, {"<token>": {"logprob": ...}}, ...]
  Result<Probed> probed(const std::vector<model::Token>& text, std::string_view body) const override {
    ECHO_ASSIGN(const json choice, only_choice(body));
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
    json body = sampling(text, temperature, 1, 1);
    body["logprobs"] = 5;
    body["return_tokens_as_token_ids"] = true;  // two tokens of the same text would be one
    return post("/v1/completions", body);
  }
  Result<double> spread_of(std::string_view body) const override {
    ECHO_ASSIGN(const json choice, only_choice(body));
    const json& top = at(choice, "logprobs", "top_logprobs");
    if (!top.is_array() || top.empty() || !top[0].is_object())
      return odd_answer("expected top_logprobs, found {}", excerpt(top));
    std::vector<double> all;
    for (const auto& [token, value] : top[0].items()) {
      ECHO_ASSIGN(const double logprob, logprob_of(value));
      all.push_back(logprob);
    }
    std::sort(all.rbegin(), all.rend());
    all.resize(std::min<std::size_t>(all.size(), 5));  // the one that was drawn may be a sixth
    return all.empty() ? 0.0 : all.front() - all.back();
  }
  std::string_view temper_how() const override { return "start it with --logprobs-mode processed_logprobs"; }

  Step pause() const override { return {{"POST", "/pause?mode=abort", ""}, true}; }
  std::vector<Step> load(const std::filesystem::path&, Version) const override {
    return {{.call = post("/collective_rpc", {{"method", "reload_weights"}}), .long_work = true},
            {{"POST", "/reset_prefix_cache", ""}}};
  }
  Step resume() const override { return {{"POST", "/resume", ""}, true}; }
  std::vector<Step> begun(Version) const override { return {}; }

 private:
  static Call post(const char* path, const json& body) { return {"POST", path, body.dump()}; }
  // All that generation_config.json might say otherwise, which vLLM takes its defaults from.
  static json sampling(const std::vector<model::Token>& prompt, double temperature, std::int64_t tokens_max,
                       std::uint64_t seed) {
    return {{"prompt", prompt},
            {"max_tokens", tokens_max},
            {"n", 1},
            {"temperature", temperature},
            {"top_p", 1.0},
            {"top_k", -1},
            {"min_p", 0.0},
            {"frequency_penalty", 0.0},
            {"presence_penalty", 0.0},
            {"repetition_penalty", 1.0},
            {"seed", seed & 0x7fffffff},
            {"return_token_ids", true},
            {"stream", false}};
  }
};

}  // namespace

std::unique_ptr<Protocol> vllm_protocol() { return std::make_unique<Vllm>(); }

}  // namespace echoline::worker
