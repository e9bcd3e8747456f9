// Packs a batch for an external trainer. The external policy source calls it at every step.
#include "learner/external/batch_file.hpp"

#include <nlohmann/json.hpp>
#include <span>

#include "data_plane/routed_experts.hpp"
#include "delta/safetensors.hpp"

namespace echoline::learner {
namespace {

template <class T>
delta::TensorView view_of_values(const char* name, delta::DType dtype, const std::vector<T>& values) {
  return {name, dtype, {static_cast<std::int64_t>(values.size())}, std::as_bytes(std::span(values))};
}

}  // namespace

Result<std::string> pack_batch(const std::vector<schema::Trajectory>& batch) {
  using delta::DType;
  if (batch.empty()) return fail(Code::kInvalid, "pack batch", "it is empty");
  std::vector<std::int32_t> prompt, response;
  std::vector<float> logprobs;
  std::vector<double> reward;
  std::vector<std::int64_t> prompt_ends, response_ends, versions, group, member, worker;
  std::vector<std::uint8_t> loss_mask, correct, finished;
  data_plane::RoutedExperts experts;  // of all trajectories so far, once one has any
  nlohmann::json problems = nlohmann::json::array();
  for (const schema::Trajectory& trajectory : batch) {
    const auto tokens = static_cast<std::size_t>(trajectory.prompt_tokens_size() + trajectory.response_tokens_size());
    ECHO_ASSIGN(const auto own_experts, data_plane::unpack_experts(trajectory.routed_experts(), tokens));
    if (experts.choices() == 0 && own_experts.choices() > 0) {
      experts = {own_experts.layers, own_experts.per_token, {}};
      experts.values.assign((prompt.size() + response.size()) * experts.choices(), -1);  // of earlier trajectories
    }
    // A mixture has one shape; other experts than those of the first trajectory are no experts of this model.
    if (own_experts.layers == experts.layers && own_experts.per_token == experts.per_token)
      experts.values.insert(experts.values.end(), own_experts.values.begin(), own_experts.values.end());
    else
      experts.values.insert(experts.values.end(), tokens * experts.choices(), -1);
    prompt.insert(prompt.end(), trajectory.prompt_tokens().begin(), trajectory.prompt_tokens().end());
    response.insert(response.end(), trajectory.response_tokens().begin(), trajectory.response_tokens().end());
    logprobs.insert(logprobs.end(), trajectory.logprobs().begin(), trajectory.logprobs().end());
    for (const schema::VersionSpan& span : trajectory.spans())
      versions.insert(versions.end(), span.end() - span.begin(), static_cast<std::int64_t>(span.version()));
    if (trajectory.loss_mask().empty())
      loss_mask.insert(loss_mask.end(), static_cast<std::size_t>(trajectory.response_tokens_size()), 1);
    else
      loss_mask.insert(loss_mask.end(), trajectory.loss_mask().begin(), trajectory.loss_mask().end());
    prompt_ends.push_back(static_cast<std::int64_t>(prompt.size()));
    response_ends.push_back(static_cast<std::int64_t>(response.size()));
    group.push_back(static_cast<std::int64_t>(trajectory.group()));
    member.push_back(trajectory.member());
    worker.push_back(static_cast<std::int64_t>(trajectory.worker()));
    reward.push_back(trajectory.reward());
    correct.push_back(trajectory.correct());
    finished.push_back(trajectory.finished());
    problems.push_back(trajectory.problem_id());
  }
  delta::StateView tensors{view_of_values("prompt_tokens", DType::kI32, prompt),
                           view_of_values("prompt_ends", DType::kI64, prompt_ends),
                           view_of_values("response_tokens", DType::kI32, response),
                           view_of_values("response_ends", DType::kI64, response_ends),
                           view_of_values("logprobs", DType::kF32, logprobs),
                           view_of_values("versions", DType::kI64, versions),
                           view_of_values("loss_mask", DType::kU8, loss_mask),
                           view_of_values("group", DType::kI64, group),
                           view_of_values("member", DType::kI64, member),
                           view_of_values("worker", DType::kI64, worker),
                           view_of_values("reward", DType::kF64, reward),
                           view_of_values("correct", DType::kU8, correct),
                           view_of_values("finished", DType::kU8, finished)};
  if (experts.choices() > 0)
    tensors.push_back({"routed_experts",
                       DType::kI16,
                       {static_cast<std::int64_t>(experts.tokens()), experts.layers, experts.per_token},
                       std::as_bytes(std::span(experts.values))});
  return delta::safetensors_bytes(tensors, {{"problems", problems.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false,
                                                                       nlohmann::json::error_handler_t::replace)}});
}

}  // namespace echoline::learner
