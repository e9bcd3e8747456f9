#include "model/packed.hpp"

#include <algorithm>

namespace echoline::model {
namespace {

// The number of tokens up to the last scored one; `prompt` if none is scored.
std::size_t tokens_used(const ScoredSequence& s) {
  std::size_t end = s.tokens.size();
  while (!s.mask.empty() && end > s.prompt && !(s.mask[end - s.prompt - 1] > 0)) --end;
  return end;
}

}  // namespace

torch::Tensor upload(const torch::Tensor& t, const torch::Device& device) {
  if (!device.is_cuda() || !t.is_cpu() || t.numel() == 0) return t.to(device);
  return t.pin_memory().to(device, /*non_blocking=*/true);
}

PackedSize packed_size(const ScoredSequence& sequence) {
  const auto used = static_cast<std::int64_t>(tokens_used(sequence)),
             prompt = static_cast<std::int64_t>(sequence.prompt);
  return {used - 1, used - prompt};
}

bool same_prompt(const ScoredSequence& a, const ScoredSequence& b) {
  return a.prompt == b.prompt &&
         std::equal(a.tokens.begin(), a.tokens.begin() + static_cast<std::ptrdiff_t>(a.prompt), b.tokens.begin());
}

// The last token of a shared prompt is not in the prefix, but the first of every response's segment. So every score has
// its own token, and gradients are summed in the same order on every device.
PackedTokens pack(const std::vector<ScoredSequence>& sequences, const torch::Device& device) {
  std::vector<std::int64_t> ids, positions, segments, scored, targets;
  std::int64_t segment_count = 0;
  const auto add = [&](const ScoredSequence& s, std::size_t begin, std::size_t end, std::int64_t prefix) {
    const std::int64_t at = std::ssize(ids);
    ids.insert(ids.end(), s.tokens.begin() + static_cast<std::ptrdiff_t>(begin),
               s.tokens.begin() + static_cast<std::ptrdiff_t>(end));
    for (std::size_t t = begin; t < end; ++t) positions.push_back(static_cast<std::int64_t>(t));
    segments.insert(segments.end(), {at, static_cast<std::int64_t>(end - begin), prefix});
    for (std::size_t t = std::max(begin + 1, s.prompt); t <= end && t < s.tokens.size(); ++t) {
      if (!s.mask.empty() && !(s.mask[t - s.prompt] > 0)) continue;
      scored.push_back(at + static_cast<std::int64_t>(t - begin) - 1);
      targets.push_back(s.tokens[t]);
    }
    return segment_count++;
  };
  for (std::size_t i = 0; i < sequences.size();) {
    std::size_t last = i + 1;
    while (last < sequences.size() && same_prompt(sequences[i], sequences[last])) ++last;
    const std::size_t prompt = sequences[i].prompt;
    TORCH_CHECK(prompt >= 1, "a sequence to score has no prompt");
    const bool shared = last > i + 1 && prompt > 1;
    std::int64_t prefix = -1;
    if (shared) prefix = add({sequences[i].tokens.first(prompt), prompt, {}}, 0, prompt - 1, -1);
    for (; i < last; ++i) {
      const std::size_t used = tokens_used(sequences[i]);
      if (used > prompt) add(sequences[i], shared ? prompt - 1 : 0, used - 1, prefix);
    }
  }
  const auto tensor = [](const std::vector<std::int64_t>& values) { return torch::tensor(values, torch::kLong); };
  const auto there = [&](const std::vector<std::int64_t>& values) { return upload(tensor(values), device); };
  return {there(ids), tensor(positions), tensor(segments).view({-1, 3}), there(scored), there(targets)};
}

torch::Tensor uniform_segments(std::int64_t batch, std::int64_t tokens) {
  const torch::Tensor segments = torch::empty({batch, 3}, torch::kLong);
  auto* at = segments.data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < batch; ++row) {
    *at++ = row * tokens;
    *at++ = tokens;
    *at++ = -1;
  }
  return segments;
}

}  // namespace echoline::model
