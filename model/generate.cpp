// Generates by a RunningBatch over the caller's model.
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
  // Non-owning: the caller keeps the model alive.
  const std::shared_ptr<Transformer> borrowed(std::shared_ptr<void>{}, &model);
  RunningBatch batch(borrowed,
                     {.rows_max = std::ssize(prompts), .cache_max = {std::numeric_limits<std::uint64_t>::max()}});
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    Sequence sequence{i, prompts[i], sampling};
    sequence.sampling.seed = Random(sampling.seed, i).next();
    ECHO_TRY(batch.add(std::move(sequence)));
  }
  std::vector<Generation> out(prompts.size());
  const auto store_ended = [&](std::vector<Ended> ended) -> Status {
    for (Ended& one : ended) {
      ECHO_ASSIGN(out[one.id], std::move(one.generation));
    }
    return ok();
  };
  while (batch.running() + batch.waiting() > 0) {
    ECHO_TRY(store_ended(batch.step()));
    if (!interrupted || batch.running() + batch.waiting() == 0) continue;
    if (interrupted()) ECHO_TRY(store_ended(batch.interrupt()));
    batch.set_weights_version(0);  // interrupted() may have loaded other weights: later rows share no earlier prompt
  }
  return out;
}

Result<std::vector<float>> score(Transformer& model, const std::vector<Token>& prompt,
                                 const std::vector<Token>& continuation, double temperature) {
  std::vector<Token> all = prompt;
  all.insert(all.end(), continuation.begin(), continuation.end());
  if (prompt.empty() || continuation.empty())
    return fail(Code::kInvalid, "score", "the {} is empty, expected at least one token",
                prompt.empty() ? "prompt" : "continuation");
  Sampling sampling;
  sampling.temperature = temperature;
  sampling.tokens_max = 1;
  // check_request() requires room for one more token, so the last token is checked as a prompt of its own.
  all.pop_back();
  ECHO_TRY(check_request(model.config(), all, sampling));
  ECHO_TRY(check_request(model.config(), {continuation.back()}, sampling));
  all.push_back(continuation.back());
  try {
    torch::NoGradGuard no_grad;
    const torch::Tensor ids =
        torch::tensor(std::vector<std::int64_t>(all.begin(), all.end()), torch::kLong).unsqueeze(0);
    const torch::Tensor scores = model.token_logprobs(ids.to(model.device()), temperature).logprobs.cpu().contiguous();
    const float* first = scores.data_ptr<float>() + (prompt.size() - 1);
    return std::vector<float>(first, first + continuation.size());
  } catch (const std::exception& e) {  // after the checks above, only a lack of memory is left
    return fail(Code::kExhausted, "score", "{} tokens: {}", all.size(), e.what());
  }
}

}  // namespace echoline::model
