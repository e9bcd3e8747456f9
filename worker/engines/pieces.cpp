// Checks the answers of an inference server before their tokens become part of a response.
#include "worker/engines/pieces.hpp"

#include <algorithm>
#include <cmath>

#include "worker/engines/expert_rows.hpp"
#include "worker/groups.hpp"

namespace echoline::worker {
namespace {

constexpr double kLogprobMax = 1e-3;  // nats; rounding may raise a log-probability above 0, by this at most

}  // namespace

Status check_sequence(const Sequence& sequence, const model::ModelConfig& model, std::string_view server) {
  if (sequence.sampling)
    return fail(Code::kInvalid, "generate",
                "{} generates only with the run's settings: a request with settings of its "
                "own needs the built-in engine",
                server);
  if (sequence.prompt.empty() || sequence.tokens_max < 1 ||
      std::ssize(sequence.prompt) + sequence.tokens_max > model.positions_max)
    return fail(Code::kInvalid, "generate",
                "expected a prompt and room for {} tokens in {} positions, found a prompt of {}", sequence.tokens_max,
                model.positions_max, sequence.prompt.size());
  for (const model::Token token : sequence.prompt)
    if (token < 0 || token >= model.vocab_size)
      return fail(Code::kInvalid, "generate", "token {} of the prompt, the vocabulary ends at {}", token,
                  model.vocab_size - 1);
  return ok();
}

Status append_sampled(const Task& task, const SampleRequest& sample_request, const SampleResponse& sampled,
                      const std::vector<Span>& versions, Response& response) {
  const auto corrupt = [](std::string what) { return fail(Code::kCorrupt, "answer of the engine", "{}", what); };
  const std::size_t count = sampled.tokens.size();
  if (sampled.logprobs.size() != count)
    return corrupt(fmt::format("{} log-probabilities of {} tokens", sampled.logprobs.size(), count));
  if (std::ssize(sampled.tokens) > sample_request.tokens_max)
    return corrupt(fmt::format("{} tokens, {} were asked for", count, sample_request.tokens_max));
  for (std::size_t i = 0; i < count; ++i) {
    const double logprob = sampled.logprobs[i];
    if (!std::isfinite(logprob) || logprob > kLogprobMax)
      return corrupt(fmt::format("log-probability {} of token {}", logprob, i));
    if (sampled.tokens[i] < 0 || sampled.tokens[i] >= task.model.vocab_size)
      return corrupt(fmt::format("token {}, the vocabulary ends at {}", sampled.tokens[i], task.model.vocab_size - 1));
    const bool ends = std::find(sample_request.end_tokens.begin(), sample_request.end_tokens.end(),
                                sampled.tokens[i]) != sample_request.end_tokens.end();
    if (ends && i + 1 < count)
      return corrupt(fmt::format("it goes on after token {}, which ends a response", sampled.tokens[i]));
    response.ended = ends;  // in the end that of the last token
  }
  // A server may stop at a stop string that response_end() below does not find. The response has then not ended: the
  // next request continues it.
  const bool may_have_stopped = !sample_request.stop_strings.empty() && count > 0;
  const bool may_be_short = sampled.aborted || response.ended || may_have_stopped;
  if (std::ssize(sampled.tokens) < sample_request.tokens_max && !may_be_short)
    return corrupt(fmt::format("it stops after {} of {} tokens, and none of them ends a response of this run", count,
                               sample_request.tokens_max));
  if (count == 0) return ok();
  const std::size_t tokens_before = response.tokens.size();
  response.tokens.insert(response.tokens.end(), sampled.tokens.begin(), sampled.tokens.end());
  // Rounding may have raised a value above 0, at most to kLogprobMax.
  for (const double logprob : sampled.logprobs) response.logprobs.push_back(static_cast<float>(std::min(logprob, 0.0)));
  if (const auto end = task.phrasing->response_end(response.tokens, tokens_before)) {
    response.ended = true;
    response.tokens.resize(*end);  // servers may notice a stop string some tokens late
    response.logprobs.resize(*end);
  }
  if (task.spec.records_experts()) {
    // The answer's experts begin with those of the context. Those of tokens that were cut off above are dropped.
    data_plane::RoutedExperts experts = sampled.experts;
    keep_mixture_layers(task.model, experts);
    const std::size_t tokens_kept = sample_request.context.size() + response.tokens.size() - tokens_before;
    experts.values.resize(std::min(experts.values.size(), tokens_kept * experts.choices()));
    data_plane::extend(response.experts, experts);
  }
  std::vector<Span>& spans = response.spans;
  for (const Span& span : versions) {
    const std::size_t begin = spans.empty() ? 0 : spans.back().end;
    const std::size_t end = std::min(tokens_before + span.end, response.tokens.size());
    if (end <= begin) continue;  // all tokens of the span were cut off above
    if (spans.empty() || spans.back().version != span.version) spans.push_back({span.version, 0});
    spans.back().end = end;
  }
  return ok();
}

}  // namespace echoline::worker
