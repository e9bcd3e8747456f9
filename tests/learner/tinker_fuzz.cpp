// The requests of a Tinker client: any bytes are refused with a reason, or give values within the limits.
#include <fmt/format.h>

#include <string_view>

#include "base/result.hpp"
#include "learner/external/tinker_requests.hpp"
#include "tests/fuzz/input.hpp"

namespace tinker = echoline::learner::tinker;

namespace {

void check_batch(const echoline::learner::DatumBatch& batch) {
  ECHO_CHECK(!batch.data.empty() && batch.ratio_min <= batch.ratio_max, "a batch without examples or with no range");
  for (const auto& datum : batch.data) {
    const bool is_supervised = batch.loss == echoline::learner::DatumLoss::kCrossEntropy;
    ECHO_CHECK(!datum.input.empty() && datum.targets.size() == datum.input.size(), "targets do not fit the input");
    ECHO_CHECK(datum.weights.size() == (is_supervised ? datum.input.size() : 0), "weights do not fit the input");
    ECHO_CHECK(datum.advantages.size() == (is_supervised ? 0 : datum.input.size()) &&
                   datum.logprobs.size() == datum.advantages.size(),
               "advantages do not fit the input");
  }
}

void check(const echoline::Result<tinker::Numbered>& request) {
  if (!request) {
    ECHO_CHECK(!request.error().message().empty(), "a refusal without a reason");
    return;
  }
  ECHO_CHECK(request->session.empty() ? !request->model.empty() && request->number >= 1 : request->model.empty(),
             "an operation without a place");
  if (const auto* batch = std::get_if<echoline::learner::DatumBatch>(&request->operation)) check_batch(*batch);
  if (const auto* save = std::get_if<tinker::SaveWeights>(&request->operation))
    ECHO_CHECK(!save->name.empty() && save->name.find('/') == std::string::npos && save->name.front() != '.',
               "a checkpoint's name that is no file name");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  check(tinker::parse_forward_backward(bytes));
  check(tinker::parse_create_model(bytes));
  check(tinker::parse_optim_step(bytes));
  check(tinker::parse_save_weights(bytes));
  check(tinker::parse_load_weights(bytes));
  check(tinker::parse_save_for_sampler(bytes));
  (void)tinker::parse_sampling_session(bytes);
  (void)tinker::parse_text(bytes, "request_id");
  (void)tinker::parse_path(bytes, "weights");
  const tinker::Limits limits{.response_tokens_max = 16, .positions_max = 64, .vocab_size = 100};
  if (const auto sample = tinker::parse_sample(bytes, limits)) {
    ECHO_CHECK(!sample->request.prompt.empty() && sample->request.samples >= 1 &&
                   sample->request.prompt.size() + sample->request.tokens_max <= 64,
               "a request for samples beyond the limits");
    for (const auto token : sample->request.prompt) ECHO_CHECK(token >= 0 && token < 100, "token {}", token);
  }
  return 0;
}
