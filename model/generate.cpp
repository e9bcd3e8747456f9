// Implements generate(), which runs all prompts in one RunningBatch on the caller's model, and score().
#include "model/generate.hpp"

#include <limits>

#include "base/random.hpp"
#include "model/running_batch.hpp"

namespace echoline::model {

Result<std::vector<Generation>> generate(Transformer& model, const std::vector<std::vector<Token>>& prompts,
                                         const Sampling& sampling, const std::function<bool()>& interrupted) {
  for (std::size_t i = 0; i < prompts.size(); ++i)
    if (const Status valid = check_request(model.config(), prompts[i], sampling); !valid)
      return fail(valid.error().code, valid.error().operation, "prompt {}: {}", i, valid.error().detail);
  // This pointer does not own the model, because the caller keeps it alive.
  const std::shared_ptr<Transformer> borrowed(std::shared_ptr<void>{}, &model);
  RunningBatch batch(borrowed,
                     {.rows_max = std::ssize(prompts), .cache_max = {std::numeric_limits<std::uint64_t>::max()}});
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    Sequence sequence{i, prompts[i], sampling};
    sequence.sampling.seed = Random(sampling.seed, i).next();
    ECHO_TRY(batch.add(std::move(sequence)));
  }
  std::vector<Generation> out(prompts.size());
  const auto store_results = [&](std::vector<Ended> ended_sequences) -> Status {
    for (Ended& sequence : ended_sequences) {
      ECHO_ASSIGN(out[sequence.id], std::move(sequence.generation));
    }
    return ok();
  };
  while (batch.running() + batch.waiting() > 0) {
    ECHO_TRY(store_results(batch.step()));
    if (!interrupted || batch.running() + batch.waiting() == 0) continue;
    if (interrupted()) ECHO_TRY(store_results(batch.interrupt()));
    // interrupted() may have loaded other weights, so later prompts must not reuse the keys and values of earlier ones.
    // Any call of set_weights_version() prevents that, even with the same version.
    batch.set_weights_version(0);
  }
  return out;
}

Result<std::vector<float>> score(Transformer& model, const std::vector<Token>& prompt,
                                 const std::vector<Token>& continuation, double temperature) {
  std::vector<Token> text = prompt;
  text.insert(text.end(), continuation.begin(), continuation.end());
  if (prompt.empty() || continuation.empty())
    return fail(Code::kInvalid, "score", "the {} is empty, expected at least one token",
                prompt.empty() ? "prompt" : "continuation");
  Sampling sampling;
  sampling.temperature = temperature;
  sampling.tokens_max = 1;
  // check_request() requires room for one more token, so the last token is checked as a prompt of its own.
  text.pop_back();
  ECHO_TRY(check_request(model.config(), text, sampling));
  ECHO_TRY(check_request(model.config(), {continuation.back()}, sampling));
  text.push_back(continuation.back());
  try {
    torch::NoGradGuard no_grad;
    const torch::Tensor ids =
        torch::tensor(std::vector<std::int64_t>(text.begin(), text.end()), torch::kLong).unsqueeze(0);
    const torch::Tensor scores = model.token_logprobs(ids.to(model.device()), temperature).logprobs.cpu().contiguous();
    const float* first_score = scores.data_ptr<float>() + (prompt.size() - 1);
    return std::vector<float>(first_score, first_score + continuation.size());
  } catch (const std::exception& e) {  // after the checks above, only a lack of memory can be the reason
    return fail(Code::kExhausted, "score", "{} tokens: {}", text.size(), e.what());
  }
}

}  // namespace echoline::model
