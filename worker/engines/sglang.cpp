// SGLang's own interface: /generate and its calls for changing weights.
#include "worker/engines/answers.hpp"
#include "worker/engines/protocol.hpp"

namespace echoline::worker {
namespace {

// Layout: [[logprob, token, text], ...]
struct Scored {
  std::vector<model::Token> tokens;
  std::vector<double> logprobs;
};

Result<Scored> scored(const json& list, const char* what, std::size_t from) {
  if (!list.is_array())
    return odd_answer("expected a list in {}, found {}: is `return_logprob` known to it?", what, excerpt(list));
  Scored all;
  for (std::size_t i = from; i < list.size(); ++i) {
    if (!list[i].is_array() || list[i].size() < 2)
      return odd_answer("expected [log-probability, token] in {}, found {}", what, excerpt(list[i]));
    ECHO_ASSIGN(const double logprob, logprob_of(list[i][0]));
    ECHO_ASSIGN(const model::Token token, token_of(list[i][1]));
    all.logprobs.push_back(logprob);
    all.tokens.push_back(token);
  }
  return all;
}

Status succeeded(std::string_view body) {
  ECHO_ASSIGN(const json answer, parse_answer(body));
  if (at(answer, "success") == true) return ok();
  return fail(Code::kUnavailable, "load policy", "{}",
              printable(text_of(at(answer, "message")).value_or("it contains neither success nor a reason"), 500));
}

class Sglang final : public Protocol {
 public:
  std::string_view name() const override { return "SGLang"; }
  Call health() const override { return {"GET", "/health", ""}; }

  Call draw(const Draw& d) const override {
    json params = sampling(d.temperature, d.tokens_max, d.seed, d.ends);
    if (!d.stop.empty()) params["stop"] = d.stop;
    return generate({{"input_ids", d.context}, {"sampling_params", params}, {"return_logprob", true}});
  }
  Result<Piece> drawn(const Draw&, std::string_view body) const override {
    ECHO_ASSIGN(const json answer, parse_answer(body));
    Piece piece;
    piece.aborted = at(answer, "meta_info", "finish_reason", "type") == "abort";
    const json& list = at(answer, "meta_info", "output_token_logprobs");
    if (piece.aborted && list.is_null()) return piece;  // before its first token
    ECHO_ASSIGN(Scored all, scored(list, "output_token_logprobs", 0));
    if (const json& ids = at(answer, "output_ids"); !ids.is_null()) {
      ECHO_ASSIGN(const auto tokens, tokens_of(ids, "output_ids"));
      if (tokens != all.tokens) {
        if (piece.aborted) return piece;
        return odd_answer("{} log-probabilities, which are not those of the {} tokens", all.tokens.size(),
                          tokens.size());
      }
    }
    piece.tokens = std::move(all.tokens);
    piece.logprobs = std::move(all.logprobs);
    if (const auto weights = text_of(at(answer, "meta_info", "weight_version")))
      piece.spans = {{*weights, piece.tokens.size()}};
    return piece;
  }

  Call probe(const std::vector<model::Token>& text) const override {
    return generate({{"input_ids", text},
                     {"sampling_params", sampling(1, 1, 1, {})},
                     {"return_logprob", true},
                     {"logprob_start_len", 0}});
  }
  Result<Probed> probed(const std::vector<model::Token>& text, std::string_view body) const override {
    ECHO_ASSIGN(const json answer, parse_answer(body));
    ECHO_ASSIGN(Scored all, scored(at(answer, "meta_info", "input_token_logprobs"), "input_token_logprobs", 1));
    if (!std::equal(all.tokens.begin(), all.tokens.end(), text.begin() + 1, text.end()))
      return odd_answer("{} log-probabilities of a text of {} tokens, or of another text", all.tokens.size(),
                        text.size());
    return Probed{std::move(all.logprobs), text_of(at(answer, "meta_info", "weight_version"))};
  }

  Call spread(const std::vector<model::Token>& text, double temperature) const override {
    return generate({{"input_ids", text},
                     {"sampling_params", sampling(temperature, 1, 1, {})},
                     {"return_logprob", true},
                     {"top_logprobs_num", 5}});
  }
  Result<double> spread_of(std::string_view body) const override {
    ECHO_ASSIGN(const json answer, parse_answer(body));
    const json& top = at(answer, "meta_info", "output_top_logprobs");
    if (!top.is_array() || top.empty()) return odd_answer("expected output_top_logprobs, found {}", excerpt(top));
    ECHO_ASSIGN(const Scored all, scored(top[0], "output_top_logprobs", 0));
    const auto [least, most] = std::minmax_element(all.logprobs.begin(), all.logprobs.end());
    return all.logprobs.empty() ? 0.0 : *most - *least;
  }
  std::string_view temper_how() const override {
    return "start it without SGLANG_RETURN_ORIGINAL_LOGPROB (RETURN_ORIGINAL_LOGPROB in older releases)";
  }

  Step pause() const override { return {post("/pause_generation", {{"mode", "abort"}}), true}; }
  std::vector<Step> load(const std::filesystem::path& folder, Version version) const override {
    return {{.call = post("/update_weights_from_disk", {{"model_path", folder.string()},
                                                        {"load_format", nullptr},
                                                        {"abort_all_requests", false},
                                                        {"weight_version", fmt::format("{}", version)},
                                                        {"flush_cache", true},
                                                        {"keep_pause", false},
                                                        {"is_async", false}}),
             .long_work = true,
             .accepts = succeeded}};
  }
  Step resume() const override { return {post("/continue_generation", json::object()), true}; }
  std::vector<Step> name_weights(Version version) const override {
    return {
        {post("/update_weight_version", {{"new_version", fmt::format("{}", version)}, {"abort_all_requests", false}}),
         true}};
  }

 private:
  static Call post(const char* path, const json& body) { return {"POST", path, body.dump()}; }
  static Call generate(const json& body) { return post("/generate", body); }
  // All parameters for which a server or model may have its own default.
  static json sampling(double temperature, std::int64_t tokens_max, std::uint64_t seed,
                       const std::vector<model::Token>& ends) {
    json params = {{"max_new_tokens", tokens_max},
                   {"temperature", temperature},
                   {"top_p", 1.0},
                   {"top_k", -1},
                   {"min_p", 0.0},
                   {"frequency_penalty", 0.0},
                   {"presence_penalty", 0.0},
                   {"repetition_penalty", 1.0},
                   {"ignore_eos", ends.empty()},
                   {"no_stop_trim", true},
                   {"sampling_seed", seed & 0x7fffffff}};
    if (!ends.empty()) params["stop_token_ids"] = ends;
    return params;
  }
};

}  // namespace

std::unique_ptr<Protocol> sglang_protocol() { return std::make_unique<Sglang>(); }

}  // namespace echoline::worker
