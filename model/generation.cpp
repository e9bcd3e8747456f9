// Checks the parameters of a generation.
#include "model/generation.hpp"

#include <cmath>

namespace echoline::model {

Status check_request(const ModelConfig& config, const std::vector<Token>& prompt, const Sampling& sampling) {
  const auto invalid = []<class... Args>(fmt::format_string<Args...> format, Args&&... args) -> Status {
    return fail(Code::kInvalid, "generate", format, std::forward<Args>(args)...);
  };
  if (!(sampling.temperature >= 0) || !std::isfinite(sampling.temperature))
    return invalid("temperature is {}, expected a number >= 0", sampling.temperature);
  if (!(sampling.top_p > 0 && sampling.top_p <= 1))
    return invalid("top_p is {}, expected 0 < top_p <= 1", sampling.top_p);
  if (sampling.top_k < 0) return invalid("top_k is {}, expected at least 0", sampling.top_k);
  if (!(sampling.min_p >= 0 && sampling.min_p <= 1))
    return invalid("min_p is {}, expected 0 <= min_p <= 1", sampling.min_p);
  if (sampling.tokens_max < 1) return invalid("tokens_max is {}, expected at least 1", sampling.tokens_max);
  if (prompt.empty()) return invalid("the prompt is empty, expected at least one token");
  if (static_cast<std::int64_t>(prompt.size()) > config.positions_max - sampling.tokens_max)
    return invalid("the prompt has {} tokens, which with tokens_max {} exceeds the model's {} positions", prompt.size(),
                   sampling.tokens_max, config.positions_max);
  for (const Token token : prompt)
    if (token < 0 || token >= config.vocab_size)
      return invalid("the prompt contains token {}, expected 0 to {}", token, config.vocab_size - 1);
  return ok();
}

}  // namespace echoline::model
