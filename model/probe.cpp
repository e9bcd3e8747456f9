// Implements probe_policy() with a Transformer whose weights are the policy's own memory.
#include "model/probe.hpp"

#include <algorithm>
#include <cmath>

#include "model/probe_text.hpp"
#include "model/torch.hpp"
#include "model/transformer.hpp"

namespace echoline::model {
namespace {

constexpr const char* kOperation = "try policy";

}  // namespace

Result<std::vector<double>> probe_policy(const delta::StateView& policy, const ModelConfig& config, double temperature,
                                         int threads) try {
  use_threads(threads);
  const torch::NoGradGuard no_gradients;
  ECHO_ASSIGN(const std::shared_ptr<Transformer> model,
              create(config, torch::kCPU, torch::kBFloat16));  // most of its memory is replaced before any use
  for (auto& parameter : model->named_parameters()) {
    const auto tensor =
        std::find_if(policy.begin(), policy.end(), [&](const auto& entry) { return entry.name == parameter.key(); });
    if (tensor == policy.end()) return fail(Code::kInvalid, kOperation, "tensor '{}' is missing", parameter.key());
    const torch::Tensor policy_weights =
        torch::from_blob(const_cast<std::byte*>(tensor->bytes.data()), tensor->shape, torch::kBFloat16);
    if (parameter.value().storage().nbytes() > parameter.value().nbytes())
      parameter.value().copy_(policy_weights);  // a part of a block, such as queries, which a pass reads as a whole
    else
      parameter.value().set_data(policy_weights);
  }
  const std::vector<Token> text = probe_text(config);
  const auto count = static_cast<std::int64_t>(text.size());
  const torch::Tensor tokens =
      torch::tensor(std::vector<std::int64_t>(text.begin(), text.end()), torch::kLong).unsqueeze(0);
  const torch::Tensor hidden = model->hidden_states(tokens).view({count, config.hidden_size});
  std::vector<double> logprobs;
  for (std::int64_t i = 0; i < count; ++i) {
    const torch::Tensor logits = model->logits(hidden.narrow(0, i, 1)).flatten();
    const auto likeliest_logprob =
        (logits / (temperature > 0 ? temperature : 1.0)).log_softmax(-1).amax().item<float>();
    if (!std::isfinite(likeliest_logprob))
      return fail(Code::kInvalid, kOperation,
                  "its log-probabilities are not finite: after {} tokens of a probe the likeliest next token has {}. "
                  "Nothing can be generated with it; has training diverged?",
                  i + 1, likeliest_logprob);
    // At temperature 1, like the log-probabilities of an engine with which these are compared.
    if (i + 1 < count) logprobs.push_back(logits.log_softmax(-1)[text[static_cast<std::size_t>(i) + 1]].item<double>());
  }
  return logprobs;
} catch (const std::bad_alloc&) {
  return fail(Code::kExhausted, kOperation, "not enough memory to run it");
} catch (const c10::Error& error) {
  return fail(Code::kInternal, kOperation, "{}", error.what_without_backtrace());
}

}  // namespace echoline::model
