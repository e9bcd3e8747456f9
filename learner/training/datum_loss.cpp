// The losses of Tinker's forward_backward. PolicyToTrain calls it.
#include "learner/training/datum_loss.hpp"

#include <cmath>
#include <limits>

#include "model/packed.hpp"

namespace echoline::learner {
namespace {

constexpr auto kOperation = "forward_backward";

// The values of one kind of several examples, one after another.
torch::Tensor joined(std::span<const Datum> data, std::vector<float> Datum::*values, const torch::Device& device) {
  std::vector<float> all;
  for (const Datum& datum : data) all.insert(all.end(), (datum.*values).begin(), (datum.*values).end());
  return model::upload(torch::tensor(all, torch::kFloat), device);
}

// The sum of the loss over all tokens of `data`, whose log-probabilities are `logprobs`.
torch::Tensor datum_loss(const DatumBatch& batch, std::span<const Datum> data, const torch::Tensor& logprobs) {
  const torch::Device device = logprobs.device();
  if (batch.loss == DatumLoss::kCrossEntropy) return -(joined(data, &Datum::weights, device) * logprobs).sum();
  const torch::Tensor advantages = joined(data, &Datum::advantages, device);
  const torch::Tensor ratio = (logprobs - joined(data, &Datum::logprobs, device)).exp();
  if (batch.loss == DatumLoss::kImportanceSampling) return -(ratio * advantages).sum();
  const torch::Tensor clipped = ratio.clamp(batch.ratio_min, batch.ratio_max);
  if (batch.loss == DatumLoss::kPpo) return -torch::minimum(ratio * advantages, clipped * advantages).sum();
  return -(clipped.detach() * logprobs * advantages).sum();
}

Status check_fits(const Datum& datum, std::size_t index, const model::ModelConfig& config) {
  if (std::ssize(datum.input) > config.positions_max)
    return fail(Code::kInvalid, kOperation, "data[{}] has {} tokens, the model has positions for {}", index,
                datum.input.size(), config.positions_max);
  for (const auto* tokens : {&datum.input, &datum.targets})
    for (const std::int64_t token : *tokens)
      if (token < 0 || token >= config.vocab_size)
        return fail(Code::kInvalid, kOperation, "data[{}] has token {}, expected 0 to {}", index, token,
                    config.vocab_size - 1);
  return ok();
}

}  // namespace

Result<DatumResult> compute_datum_loss(model::Transformer& model, AdamW& optimizer, const DatumBatch& batch,
                                       std::int64_t microbatch_tokens) try {
  for (std::size_t i = 0; i < batch.data.size(); ++i) ECHO_TRY(check_fits(batch.data[i], i, model.config()));
  DatumResult result;
  const torch::AutoGradMode with_gradient(!batch.forward_only);
  const std::span<const Datum> data = batch.data;
  for (std::size_t begin = 0; begin < data.size();) {
    std::size_t end = begin;
    for (std::int64_t tokens = 0; end < data.size(); ++end) {
      tokens += std::ssize(data[end].input);
      if (end > begin && tokens > microbatch_tokens) break;
    }
    const std::span<const Datum> part = data.subspan(begin, end - begin);
    // Every token is scored, so the packed model's scores are one per target, in order. The token behind the input only
    // says so: a target need not be the next token of the input.
    std::vector<std::vector<std::int64_t>> tokens;
    std::vector<std::int64_t> targets;
    for (const Datum& datum : part) {
      tokens.push_back(datum.input);
      tokens.back().push_back(datum.targets.back());
      targets.insert(targets.end(), datum.targets.begin(), datum.targets.end());
    }
    std::vector<model::ScoredSequence> sequences;
    for (const std::vector<std::int64_t>& sequence : tokens)
      sequences.push_back({.tokens = sequence, .prompt = 1, .mask = {}});
    model::PackedTokens packed = model::pack(sequences, model.device());
    packed.targets = model::upload(torch::tensor(targets, torch::kLong), model.device());
    const torch::Tensor logprobs =
        model.packed_logprobs(packed, /*temperature=*/1.0, /*as_trained=*/true).logprobs.to(torch::kFloat);
    const torch::Tensor loss = datum_loss(batch, part, logprobs);
    const torch::Tensor values = logprobs.detach().to(torch::kCPU).contiguous();
    const float* value = values.data_ptr<float>();
    for (const Datum& datum : part) {
      result.logprobs.emplace_back(value, value + datum.targets.size());
      value += datum.targets.size();
    }
    result.loss_sum += loss.item<double>();
    if (!batch.forward_only) {
      loss.backward();
      optimizer.gather_gradients();
    }
    begin = end;
  }
  return result;
} catch (const std::exception& error) {
  optimizer.clear_gradients();
  return fail(Code::kInternal, kOperation, "{}; the gradients since the last optim_step are dropped", error.what());
}

Result<OptimizerConfig> optimizer_config(const AdamSettings& settings, const OptimizerConfig& run) {
  const auto check = [](const char* name, double value, double min, double max) -> Status {
    if (value >= min && value <= max) return ok();  // false for NaN
    return fail(Code::kInvalid, "optim_step", "{} is {}, expected {} to {}", name, value, min, max);
  };
  constexpr double kBelowOne = 1 - 1e-9;
  ECHO_TRY(check("learning_rate", settings.learning_rate, 0, 100));
  ECHO_TRY(check("beta1", settings.beta1, 0, kBelowOne));
  ECHO_TRY(check("beta2", settings.beta2, 0, kBelowOne));
  ECHO_TRY(check("eps", settings.epsilon, 1e-30, 1));
  ECHO_TRY(check("weight_decay", settings.weight_decay, 0, 100));
  ECHO_TRY(check("grad_clip_norm", settings.gradient_norm_max, 0, 1e30));
  OptimizerConfig config = run;  // its storage of moments stays
  config.learning_rate = settings.learning_rate;
  config.beta1 = settings.beta1;
  config.beta2 = settings.beta2;
  config.epsilon = settings.epsilon;
  config.weight_decay = settings.weight_decay;
  config.gradient_norm_max =
      settings.gradient_norm_max > 0 ? settings.gradient_norm_max : std::numeric_limits<double>::infinity();
  config.warmup_updates = 0;
  config.schedule = Schedule::kConstant;
  return config;
}

}  // namespace echoline::learner
