// Implements the packing of sequences, and copies of tensors to a device.
#include "model/packed.hpp"

#include <algorithm>

namespace echoline::model {
namespace {

// The number of tokens up to the last scored one, with the prompt; only the prompt's if none is scored.
std::size_t tokens_used(const ScoredSequence& sequence) {
  std::size_t end = sequence.tokens.size();
  while (!sequence.mask.empty() && end > sequence.prompt && !(sequence.mask[end - sequence.prompt - 1] > 0)) --end;
  return end;
}

}  // namespace

torch::Tensor upload(const torch::Tensor& tensor, const torch::Device& device) {
  if (!device.is_cuda() || !tensor.is_cpu() || tensor.numel() == 0) return tensor.to(device);
  return tensor.pin_memory().to(device, /*non_blocking=*/true);
}

PackedSize packed_size(const ScoredSequence& sequence) {
  const auto all_tokens = static_cast<std::int64_t>(tokens_used(sequence)),
             prompt_tokens = static_cast<std::int64_t>(sequence.prompt);
  // The last token scores no successor, so it is left out. A shared prompt is not repeated, except for its last token.
  return {.with_prompt = all_tokens - 1, .without_prompt = all_tokens - prompt_tokens};
}

bool same_prompt(const ScoredSequence& a, const ScoredSequence& b) {
  return a.prompt == b.prompt &&
         std::equal(a.tokens.begin(), a.tokens.begin() + static_cast<std::ptrdiff_t>(a.prompt), b.tokens.begin());
}

// The last token of a shared prompt is not in the prefix segment. It begins every response's segment instead, because
// its output scores the first token of that response. So every score has a token of its own, and gradients are summed
// in the same order on every device.
PackedTokens pack(const std::vector<ScoredSequence>& sequences, const torch::Device& device,
                  std::int64_t expert_choices) {
  std::vector<std::int64_t> ids, positions, segments, scored, targets, experts;
  const auto choices = static_cast<std::size_t>(expert_choices);
  const bool have_experts = choices > 0 && std::any_of(sequences.begin(), sequences.end(),
                                                       [](const auto& sequence) { return !sequence.experts.empty(); });
  std::int64_t segment_count = 0;
  // Adds tokens [begin, end) of the sequence as a segment, and their scores. Returns the segment's index.
  const auto add_segment = [&](const ScoredSequence& sequence, std::size_t begin, std::size_t end,
                               std::int64_t prefix) {
    const std::int64_t first_token = std::ssize(ids);
    ids.insert(ids.end(), sequence.tokens.begin() + static_cast<std::ptrdiff_t>(begin),
               sequence.tokens.begin() + static_cast<std::ptrdiff_t>(end));
    for (std::size_t token = begin; token < end; ++token) positions.push_back(static_cast<std::int64_t>(token));
    if (have_experts) {
      const std::size_t end_with_experts = std::clamp(sequence.experts.size() / choices, begin, end);
      for (std::size_t i = begin * choices; i < end_with_experts * choices; ++i) experts.push_back(sequence.experts[i]);
      experts.insert(experts.end(), (end - end_with_experts) * choices, -1);
    }
    segments.insert(segments.end(), {first_token, static_cast<std::int64_t>(end - begin), prefix});
    for (std::size_t token = std::max(begin + 1, sequence.prompt); token <= end && token < sequence.tokens.size();
         ++token) {
      if (!sequence.mask.empty() && !(sequence.mask[token - sequence.prompt] > 0)) continue;
      scored.push_back(first_token + static_cast<std::int64_t>(token - begin) - 1);
      targets.push_back(sequence.tokens[token]);
    }
    return segment_count++;
  };
  for (std::size_t i = 0; i < sequences.size();) {
    std::size_t group_end = i + 1;
    while (group_end < sequences.size() && same_prompt(sequences[i], sequences[group_end])) ++group_end;
    const std::size_t prompt = sequences[i].prompt;
    TORCH_CHECK(prompt >= 1, "a sequence to score has no prompt");
    const bool shares_prefix = group_end > i + 1 && prompt > 1;
    std::int64_t prefix = -1;
    if (shares_prefix)
      prefix = add_segment(
          {.tokens = sequences[i].tokens.first(prompt), .prompt = prompt, .mask = {}, .experts = sequences[i].experts},
          /*begin=*/0, /*end=*/prompt - 1, /*prefix=*/-1);
    for (; i < group_end; ++i) {
      const std::size_t used = tokens_used(sequences[i]);
      if (used > prompt) add_segment(sequences[i], shares_prefix ? prompt - 1 : 0, used - 1, prefix);
    }
  }
  const auto tensor = [](const std::vector<std::int64_t>& values) { return torch::tensor(values, torch::kLong); };
  const auto on_device = [&](const std::vector<std::int64_t>& values) { return upload(tensor(values), device); };
  return {.ids = on_device(ids),
          .positions = tensor(positions),
          .segments = tensor(segments).view({-1, 3}),
          .scored = on_device(scored),
          .targets = on_device(targets),
          .experts = have_experts ? on_device(experts).view({-1, expert_choices}) : torch::Tensor()};
}

torch::Tensor uniform_segments(std::int64_t batch, std::int64_t tokens) {
  const torch::Tensor segments = torch::empty({batch, 3}, torch::kLong);
  auto* field = segments.data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < batch; ++row) {
    *field++ = row * tokens;  // begin
    *field++ = tokens;        // count
    *field++ = -1;            // no prefix
  }
  return segments;
}

}  // namespace echoline::model
