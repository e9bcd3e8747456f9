#include "model/probe.hpp"

#include <algorithm>

#include "model/torch.hpp"
#include "model/transformer.hpp"

namespace echoline::model {
namespace {

constexpr const char* kOperation = "try policy";
constexpr std::int64_t kTokens = 16;

}  // namespace

Status probe_policy(const delta::StateView& policy, const ModelConfig& config, double temperature, int threads) try {
  use_threads(threads);
  const torch::NoGradGuard no_gradients;
  ECHO_ASSIGN(const std::shared_ptr<Transformer> model,
              create(config, torch::kCPU, torch::kBFloat16));  // most of its memory is never touched
  for (auto& parameter : model->named_parameters()) {
    const auto tensor =
        std::find_if(policy.begin(), policy.end(), [&](const auto& t) { return t.name == parameter.key(); });
    if (tensor == policy.end()) return fail(Code::kInvalid, kOperation, "tensor '{}' is missing", parameter.key());
    const torch::Tensor given =
        torch::from_blob(const_cast<std::byte*>(tensor->bytes.data()), tensor->shape, torch::kBFloat16);
    if (parameter.value().storage().nbytes() > parameter.value().nbytes())
      parameter.value().copy_(
          given);  // a part of a larger block, which passes read as a whole: queries, keys and values
    else
      parameter.value().set_data(given);
  }
  const std::int64_t count = std::min(kTokens, config.positions_max);
  const torch::Tensor tokens =
      (torch::arange(count, torch::kLong) * config.vocab_size / count).to(torch::kLong).unsqueeze(0);
  const torch::Tensor hidden = model->hidden_states(tokens).view({count, config.hidden_size});
  for (std::int64_t i = 0; i < count; ++i) {
    const torch::Tensor likeliest =
        (model->logits(hidden.narrow(0, i, 1)) / (temperature > 0 ? temperature : 1.0)).log_softmax(-1).amax();
    if (!torch::isfinite(likeliest).item<bool>())
      return fail(Code::kInvalid, kOperation,
                  "its log-probabilities are not finite: after {} tokens of a probe the likeliest next token has {}. "
                  "Nothing can be generated with it; has training diverged?",
                  i + 1, likeliest.item<float>());
  }
  return ok();
} catch (const std::bad_alloc&) {
  return fail(Code::kExhausted, kOperation, "not enough memory to run it");
} catch (const c10::Error& error) {
  return fail(Code::kInternal, kOperation, "{}", error.what_without_backtrace());
}

}  // namespace echoline::model
