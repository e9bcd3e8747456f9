// Checks trajectories for SubmissionChecker, and computes figures of a batch for the training loop.
#include "learner/batch.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "data_plane/routed_experts.hpp"

namespace echoline::learner {

Status check_trainable(const schema::Trajectory& trajectory, const model::ModelConfig& shape) {
  constexpr auto kOperation = "learner step";
  if (trajectory.prompt_tokens_size() == 0 || trajectory.response_tokens_size() == 0)
    return fail(Code::kInvalid, kOperation, "trajectory {} has {} prompt and {} response tokens, expected some of both",
                trajectory.id(), trajectory.prompt_tokens_size(), trajectory.response_tokens_size());
  if (trajectory.logprobs_size() != trajectory.response_tokens_size())
    return fail(Code::kInvalid, kOperation, "trajectory {} has {} log-probabilities for {} response tokens",
                trajectory.id(), trajectory.logprobs_size(), trajectory.response_tokens_size());
  if (trajectory.loss_mask_size() != 0 && trajectory.loss_mask_size() != trajectory.response_tokens_size())
    return fail(Code::kInvalid, kOperation, "trajectory {} has a loss mask of {} entries for {} response tokens",
                trajectory.id(), trajectory.loss_mask_size(), trajectory.response_tokens_size());
  const std::int64_t tokens = std::int64_t{trajectory.prompt_tokens_size()} + trajectory.response_tokens_size();
  if (tokens > shape.positions_max)
    return fail(Code::kInvalid, kOperation, "trajectory {} has {} tokens, the model has positions for {}",
                trajectory.id(), tokens, shape.positions_max);
  const std::int64_t largest_token =
      std::max(*std::max_element(trajectory.prompt_tokens().begin(), trajectory.prompt_tokens().end()),
               *std::max_element(trajectory.response_tokens().begin(), trajectory.response_tokens().end()));
  if (largest_token >= shape.vocab_size)
    return fail(Code::kInvalid, kOperation, "trajectory {} has token {}, the vocabulary ends at {}: another tokenizer?",
                trajectory.id(), largest_token, shape.vocab_size - 1);
  if (trajectory.routed_experts().empty() || shape.family == model::Family::kCarried) return ok();
  ECHO_ASSIGN(const data_plane::RoutedExperts experts,
              data_plane::unpack_experts(trajectory.routed_experts(), static_cast<std::size_t>(tokens)));
  const std::int64_t layers = shape.mixture_layers(), per_token = shape.experts ? shape.experts->per_token : 0,
                     count = shape.experts ? shape.experts->count : 0;
  if (experts.layers != layers || experts.per_token != per_token)
    return fail(Code::kInvalid, kOperation,
                "trajectory {} has experts of {} layers, {} per token; the model has {} layers with {} per token",
                trajectory.id(), experts.layers, experts.per_token, layers, per_token);
  if (const auto largest = *std::max_element(experts.values.begin(), experts.values.end()); largest >= count)
    return fail(Code::kInvalid, kOperation, "trajectory {} has expert {}, the model has {}", trajectory.id(), largest,
                count);
  return ok();
}

nlohmann::json batch_figures(const std::vector<schema::Trajectory>& batch) {
  double reward_sum = 0, correct = 0, truncated = 0, several_policies = 0, response_tokens = 0, longest_tokens = 0;
  std::int64_t trained_tokens = 0;
  std::map<std::uint64_t, std::pair<double, double>> reward_ranges;  // least and greatest reward, by group
  for (const schema::Trajectory& trajectory : batch) {
    reward_sum += trajectory.reward();
    correct += trajectory.correct() ? 1 : 0;
    truncated += trajectory.finished() ? 0 : 1;
    several_policies += trajectory.spans_size() > 1 ? 1 : 0;  // a span has the tokens of one policy
    response_tokens += trajectory.response_tokens_size();
    longest_tokens = std::max<double>(longest_tokens, trajectory.response_tokens_size());
    const auto& mask = trajectory.loss_mask();
    trained_tokens += mask.empty() ? trajectory.response_tokens_size()
                                   : std::count_if(mask.begin(), mask.end(), [](float weight) { return weight > 0; });
    auto& [least, greatest] =
        reward_ranges.try_emplace(trajectory.group(), trajectory.reward(), trajectory.reward()).first->second;
    least = std::min<double>(least, trajectory.reward());
    greatest = std::max<double>(greatest, trajectory.reward());
  }
  const auto responses = static_cast<double>(batch.size());
  // Groups with different rewards. In the others every advantage is 0, so they teach nothing.
  const auto informative_groups =
      std::count_if(reward_ranges.begin(), reward_ranges.end(), [](const auto& group_and_range) {
        const auto& [least, greatest] = group_and_range.second;
        return least < greatest;
      });
  return {{"reward_mean", reward_sum / responses},
          {"accuracy", correct / responses},
          {"truncated_fraction", truncated / responses},
          {"mixed_fraction", several_policies / responses},
          {"response_tokens_mean", response_tokens / responses},
          {"response_tokens_max", longest_tokens},
          {"informative_groups", informative_groups},
          {"zero_advantage_fraction",
           1 - static_cast<double>(informative_groups) / static_cast<double>(reward_ranges.size())},
          {"response_tokens", trained_tokens}};
}

}  // namespace echoline::learner
