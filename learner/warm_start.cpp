#include "learner/warm_start.hpp"

#include <algorithm>
#include <exception>

#include "learner/trainer.hpp"

namespace echoline::learner {
namespace {

struct Demonstrations {
  torch::Tensor ids;   // int64 [batch, tokens], right-padded
  torch::Tensor mask;  // bool [batch, tokens - 1]: entries that score a response token
};

// Problems first .. first + count - 1 with their demonstrated responses.
Result<Demonstrations> demonstrations(const data_plane::Adapter& adapter, const model::Tokenizer& tokenizer,
                                      std::uint64_t first, std::int64_t count, const torch::Device& device) {
  const auto end = tokenizer.end_of_text();
  if (!end) return fail(Code::kInvalid, "warm start", "the tokenizer has no {} token", model::kEndOfText);
  std::vector<std::vector<model::Token>> rows;
  std::vector<std::size_t> prompts;
  std::size_t width = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    ECHO_ASSIGN(const auto problem, adapter.problem(first + static_cast<std::uint64_t>(i)));
    const auto response = adapter.demonstration(problem);
    if (!response)
      return fail(
          Code::kInvalid, "warm start",
          "adapter {} has no demonstration for problem {}: choose another adapter or start from a trained model",
          adapter.name(), problem.id());
    ECHO_ASSIGN(auto tokens, tokenizer.encode(problem.prompt()));
    prompts.push_back(tokens.size());
    ECHO_ASSIGN(const auto answer, tokenizer.encode(*response));
    tokens.insert(tokens.end(), answer.begin(), answer.end());
    tokens.push_back(*end);
    width = std::max(width, tokens.size());
    rows.push_back(std::move(tokens));
  }
  Demonstrations result{torch::zeros({count, static_cast<std::int64_t>(width)}, torch::kInt64),
                        torch::zeros({count, static_cast<std::int64_t>(width) - 1}, torch::kBool)};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::copy(rows[i].begin(), rows[i].end(), result.ids.data_ptr<std::int64_t>() + i * width);
    bool* mask = result.mask.data_ptr<bool>() + i * (width - 1);
    std::fill(mask + prompts[i] - 1, mask + rows[i].size() - 1, true);
  }
  return Demonstrations{result.ids.to(device), result.mask.to(device)};
}

}  // namespace

Status validate(const WarmStartConfig& config) {
  ECHO_TRY(validate(config.optimizer));
  const auto positive = [](const char* name, std::int64_t found) -> Status {
    if (found >= 1) return ok();
    return fail(Code::kInvalid, "warm start settings", "{} must be at least 1, found {}", name, found);
  };
  ECHO_TRY(positive("steps_max", config.steps_max));
  ECHO_TRY(positive("batch_problems", config.batch_problems));
  ECHO_TRY(positive("probe_every", config.probe_every));
  ECHO_TRY(positive("probe_problems", config.probe_problems));
  ECHO_TRY(positive("response_tokens_max", config.response_tokens_max));
  if (!(config.target_accuracy > 0 && config.target_accuracy <= 1))
    return fail(Code::kInvalid, "warm start settings", "target_accuracy must be in (0, 1], found {}",
                config.target_accuracy);
  return ok();
}

Result<WarmStartReport> warm_start(model::Transformer& model, const model::Tokenizer& tokenizer,
                                   const data_plane::Adapter& adapter, const WarmStartConfig& config,
                                   const std::function<bool(const WarmStartProgress&)>& progress) try {
  ECHO_TRY(validate(config));
  std::vector<schema::Problem> probe;
  for (std::int64_t i = 0; i < config.probe_problems; ++i) {
    ECHO_ASSIGN(auto problem, adapter.problem(static_cast<std::uint64_t>(i)));
    probe.push_back(std::move(problem));
  }
  EvaluationOptions greedy;
  greedy.response_tokens_max = config.response_tokens_max;
  AdamW optimizer(named_parameters(model), config.optimizer);
  WarmStartReport report;
  auto next = static_cast<std::uint64_t>(config.probe_problems);
  while (report.steps < config.steps_max && !report.reached) {
    ECHO_ASSIGN(const auto batch, demonstrations(adapter, tokenizer, next, config.batch_problems, model.device()));
    next += static_cast<std::uint64_t>(config.batch_problems);
    const torch::Tensor log_probs = model.token_logprobs(batch.ids, 1.0, batch.mask).logprobs;
    const torch::Tensor loss = -log_probs.sum() / batch.mask.sum();
    loss.backward();
    optimizer.step();
    ++report.steps;
    if (report.steps % config.probe_every != 0 && report.steps != config.steps_max) continue;
    ECHO_ASSIGN(const auto evaluation, evaluate(model, tokenizer, adapter, probe, greedy));
    report.accuracy = evaluation.accuracy();
    report.reached = report.accuracy >= config.target_accuracy;
    if (progress && !progress({report.steps, loss.item<double>(), report.accuracy}))
      return fail(Code::kCancelled, "warm start", "stopped after step {}", report.steps);
  }
  return report;
} catch (const std::exception& error) {
  return fail(Code::kInternal, "warm start", "{}", error.what());
}

}  // namespace echoline::learner
