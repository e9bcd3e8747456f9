// Supervised training before the first step. PolicyToTrain calls it.
#include "learner/training/warm_start.hpp"

#include <algorithm>
#include <exception>
#include <span>

#include "data_plane/policy_input.hpp"
#include "learner/training/trainer.hpp"

namespace echoline::learner {
namespace {

struct Demonstration {
  std::vector<std::int64_t> tokens;  // prompt and response
  std::size_t prompt_tokens = 0;
};

// Problems first .. first + count - 1 with their demonstrated responses.
Result<std::vector<Demonstration>> demonstrations(const data_plane::Adapter& adapter, const model::Phrasing& phrasing,
                                                  std::uint64_t first, std::int64_t count) {
  std::vector<Demonstration> rows;
  for (std::int64_t i = 0; i < count; ++i) {
    ECHO_ASSIGN(const auto problem, adapter.problem(first + static_cast<std::uint64_t>(i)));
    const auto response = adapter.demonstration(problem);
    if (!response)
      return fail(
          Code::kInvalid, "warm start",
          "adapter {} has no demonstration for problem {}: choose another adapter or start from a trained model",
          adapter.name(), problem.id());
    Demonstration row;
    auto prompt = phrasing.prompt(data_plane::prompt_of(problem));
    const auto answer = phrasing.tokenizer().encode(*response);
    if (!prompt || prompt->empty() || !answer) continue;  // the model's tokens cannot express the problem
    row.tokens.assign(prompt->begin(), prompt->end());
    row.prompt_tokens = row.tokens.size();
    row.tokens.insert(row.tokens.end(), answer->begin(), answer->end());
    row.tokens.push_back(phrasing.eos().front());
    rows.push_back(std::move(row));
  }
  if (rows.empty())
    return fail(Code::kInvalid, "warm start", "none of {} demonstrations can be written in the model's tokens", count);
  return rows;
}

// Computes the gradient of the mean cross-entropy of all response tokens, in passes that fit into memory. Returns the
// mean.
double compute_gradients(model::Transformer& model, const std::vector<Demonstration>& rows, AdamW& optimizer,
                         std::size_t tokens_max) {
  std::size_t tokens = 0;
  for (const Demonstration& row : rows) tokens += row.tokens.size() - row.prompt_tokens;
  double mean_loss = 0;
  for (std::size_t first = 0; first < rows.size();) {
    std::vector<model::ScoredSequence> part;
    std::size_t end = first, part_tokens = 0;
    while (end < rows.size() && (end == first || part_tokens + rows[end].tokens.size() <= tokens_max)) {
      part_tokens += rows[end].tokens.size();
      part.push_back({rows[end].tokens, rows[end].prompt_tokens, /*mask=*/{}});
      ++end;
    }
    const torch::Tensor loss =
        -model.packed_logprobs(model::pack(part, model.device())).logprobs.sum() / static_cast<double>(tokens);
    loss.backward();
    optimizer.gather_gradients();
    mean_loss += loss.item<double>();  // each part is divided by all tokens
    first = end;
  }
  return mean_loss;
}

}  // namespace

Status validate(const WarmStartConfig& config) {
  ECHO_TRY(validate(config.optimizer));
  const auto at_least_one = [](const char* name, std::int64_t value) -> Status {
    if (value >= 1) return ok();
    return fail(Code::kInvalid, "warm start settings", "{} must be at least 1, found {}", name, value);
  };
  ECHO_TRY(at_least_one("steps_max", config.steps_max));
  ECHO_TRY(at_least_one("batch_problems", config.batch_problems));
  ECHO_TRY(at_least_one("probe_every", config.probe_every));
  ECHO_TRY(at_least_one("probe_problems", config.probe_problems));
  ECHO_TRY(at_least_one("microbatch_tokens", config.microbatch_tokens));
  ECHO_TRY(at_least_one("response_tokens_max", config.response_tokens_max));
  if (!(config.target_accuracy > 0 && config.target_accuracy <= 1))
    return fail(Code::kInvalid, "warm start settings", "target_accuracy must be in (0, 1], found {}",
                config.target_accuracy);
  return ok();
}

Result<WarmStartReport> warm_start(model::Transformer& model, const model::Phrasing& phrasing,
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
  auto next_problem = static_cast<std::uint64_t>(config.probe_problems);  // the probe's problems are not trained on
  while (report.steps < config.steps_max && !report.reached_target) {
    ECHO_ASSIGN(const auto rows, demonstrations(adapter, phrasing, next_problem, config.batch_problems));
    next_problem += static_cast<std::uint64_t>(config.batch_problems);
    const double loss = compute_gradients(model, rows, optimizer, static_cast<std::size_t>(config.microbatch_tokens));
    optimizer.step();
    ++report.steps;
    if (report.steps % config.probe_every != 0 && report.steps != config.steps_max) continue;
    ECHO_ASSIGN(const auto evaluation, evaluate(model, phrasing, adapter, probe, greedy));
    report.accuracy = evaluation.accuracy();
    report.reached_target = report.accuracy >= config.target_accuracy;
    if (progress && !progress({.steps = report.steps, .loss = loss, .accuracy = report.accuracy}))
      return fail(Code::kCancelled, "warm start", "stopped after step {}", report.steps);
  }
  return report;
} catch (const std::exception& error) {
  return fail(Code::kInternal, "warm start", "{}", error.what());
}

}  // namespace echoline::learner
