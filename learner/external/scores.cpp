// Parses an external trainer's log-probabilities and compares them with the workers'.
#include "learner/external/scores.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "delta/safetensors.hpp"

namespace echoline::learner {
namespace {

constexpr double kLogRatioMax = 20;         // as in the loss: keeps results finite
constexpr double kLogprobMin = -100;        // an impossible token counts as a very unlikely one
constexpr float kRoundingErrorMax = 1e-3f;  // nats beyond the valid range that rounding explains

Result<std::vector<float>> values_of(const delta::TensorView& tensor, std::size_t tokens) {
  if (tensor.dtype != delta::DType::kF32 ||
      tensor.shape != std::vector<std::int64_t>{static_cast<std::int64_t>(tokens)})
    return fail(Code::kInvalid, "scores",
                "{}: expected F32 [{}], one number for each response token of the batch, found {} [{}]", tensor.name,
                tokens, delta::dtype_name(tensor.dtype), fmt::join(tensor.shape, ", "));
  std::vector<float> values(tokens);
  if (tokens > 0) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

}  // namespace

Result<TokenScores> parse_scores(const std::string& bytes, std::size_t tokens) {
  ECHO_ASSIGN(const auto content,
              delta::parse_safetensors(std::as_bytes(std::span(bytes)), "the scores that were sent"));
  TokenScores scores;
  for (const delta::TensorView& tensor : content.tensors) {
    if (tensor.name != "logprobs" && tensor.name != "entropies")
      return fail(Code::kInvalid, "scores", "expected the tensors logprobs and entropies, found '{}'", tensor.name);
    std::vector<float>& values = tensor.name == "logprobs" ? scores.logprobs : scores.entropies;
    ECHO_ASSIGN(values, values_of(tensor, tokens));
  }
  if (scores.logprobs.size() != tokens) return fail(Code::kInvalid, "scores", "the tensor logprobs is missing");
  // NaN (not computed) is accepted, because each comparison with it is false.
  for (const float logprob : scores.logprobs)
    if (logprob > kRoundingErrorMax)
      return fail(Code::kInvalid, "scores", "a log-probability is {}, which is above 0", logprob);
  for (const float entropy : scores.entropies)
    if (entropy < -kRoundingErrorMax || std::isinf(entropy))
      return fail(Code::kInvalid, "scores", "an entropy is {}, expected a number from 0", entropy);
  return scores;
}

ScoreComparison compare_scores(const std::vector<schema::Trajectory>& batch, const TokenScores& scores) {
  ScoreComparison comparison;
  double entropy = 0, behaviour_kl = 0;
  std::uint64_t all_tokens = 0, responses = 0;
  const bool has_entropies = !scores.entropies.empty();
  std::size_t next_begin = 0;  // first token of the next response
  for (const schema::Trajectory& trajectory : batch) {
    const std::size_t begin = next_begin;
    next_begin += static_cast<std::size_t>(trajectory.response_tokens_size());
    double surprise = 0, dispute = 0, entropy_sum = 0, kl_sum = 0;
    std::uint64_t tokens = 0;
    bool is_complete = true;  // all of its trained tokens have scores
    for (int i = 0; i < trajectory.response_tokens_size() && is_complete; ++i) {
      if (trajectory.loss_mask_size() != 0 && trajectory.loss_mask(i) == 0) continue;
      const std::size_t token = begin + static_cast<std::size_t>(i);
      const double logprob = std::max<double>(scores.logprobs[token], kLogprobMin);
      const double token_entropy = has_entropies ? scores.entropies[token] : 0;
      is_complete = !std::isnan(scores.logprobs[token]) && !std::isnan(token_entropy);
      const double log_ratio = std::clamp(logprob - trajectory.logprobs(i), -kLogRatioMax, kLogRatioMax);
      ++tokens;
      surprise += has_entropies ? -logprob - token_entropy : 0;  // 0 accuses no worker
      dispute += std::abs(logprob - trajectory.logprobs(i));
      entropy_sum += token_entropy;
      kl_sum += std::expm1(log_ratio) - log_ratio;  // the k3 estimate, as in the loss
    }
    if (!is_complete || tokens == 0) continue;
    Scrutiny& worker_scrutiny = comparison.scrutiny[WorkerId{trajectory.worker()}];
    ++worker_scrutiny.responses;
    worker_scrutiny.surprise += surprise / static_cast<double>(tokens);
    worker_scrutiny.dispute += dispute / static_cast<double>(tokens);
    entropy += entropy_sum;
    behaviour_kl += kl_sum;
    all_tokens += tokens;
    ++responses;
  }
  comparison.figures = {{"scored_responses", responses}};
  if (all_tokens == 0) return comparison;
  comparison.figures["behaviour_kl"] = behaviour_kl / static_cast<double>(all_tokens);
  if (has_entropies) comparison.figures["entropy"] = entropy / static_cast<double>(all_tokens);
  return comparison;
}

}  // namespace echoline::learner
