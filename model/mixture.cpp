// Implements mixtures of experts by libtorch's operations.
#include "model/mixture.hpp"

#include <algorithm>
#include <numeric>

#include "model/cpu_pass.hpp"
#include "model/training_ops.hpp"

namespace echoline::model {

using torch::Tensor;

namespace {

// The experts of the highest scores [rows, experts], ascending, int64 [rows, count].
Tensor chosen_by_router(const Tensor& scores, std::int64_t count) {
  return std::get<0>(std::get<1>(scores.topk(count, /*dim=*/1)).sort(/*dim=*/1));
}

}  // namespace

void choose_experts(std::span<const float> scores, std::span<std::int64_t> chosen) {
  std::vector<std::int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto is_better = [&](std::int64_t a, std::int64_t b) {
    const float score_a = scores[static_cast<std::size_t>(a)], score_b = scores[static_cast<std::size_t>(b)];
    return score_a != score_b ? score_a > score_b : a < b;
  };
  const auto end = order.begin() + static_cast<std::ptrdiff_t>(chosen.size());
  std::partial_sort(order.begin(), end, order.end(), is_better);
  std::copy(order.begin(), end, chosen.begin());
  std::sort(chosen.begin(), chosen.end());
}

Tensor mix_experts(const ExpertsConfig& config, const Transformer::Layer& layer, const Tensor& x, const Tensor& given,
                   Tensor& used) {
  const std::int64_t rows = x.size(0), hidden = x.size(1), per_token = config.per_token;
  const Tensor scores = linear_product(x, layer.router).to(torch::kFloat).softmax(1);
  Tensor permutation, inverse, counts;  // of the choices, ordered by expert
  {
    torch::NoGradGuard no_gradient;
    used = chosen_by_router(scores, per_token);
    if (given.defined()) used = torch::where(given < 0, used, given);
    const Tensor flat = used.flatten();
    permutation = flat.argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
    inverse = torch::empty_like(permutation);
    inverse.index_copy_(0, permutation, torch::arange(rows * per_token, permutation.options()));
    counts = torch::bincount(flat, {}, config.count).to(torch::kCPU);
  }
  Tensor weights = scores.gather(1, used);
  if (config.weights_sum_to_1) weights = weights / weights.sum(1, /*keepdim=*/true);
  // Each token once per choice. Both index_select() are permutations, so that their gradients are copies, which have
  // one order of additions on every device.
  const Tensor by_expert =
      x.unsqueeze(1).expand({rows, per_token, hidden}).reshape({rows * per_token, hidden}).index_select(0, permutation);
  std::vector<Tensor> outputs;
  std::int64_t begin = 0;
  for (std::size_t e = 0; e < layer.experts.size(); ++e) {
    const std::int64_t count = counts.data_ptr<std::int64_t>()[e];
    if (count == 0) continue;
    const Transformer::Layer::Expert& expert = layer.experts[e];
    const Tensor input = by_expert.narrow(0, begin, count);
    outputs.push_back(
        linear_product(gated(linear_product(input, expert.gate), linear_product(input, expert.up)), expert.down));
    begin += count;
  }
  const Tensor by_token = torch::cat(outputs).index_select(0, inverse).view({rows, per_token, hidden});
  return (by_token * weights.to(x.scalar_type()).unsqueeze(2)).sum(1);
}

}  // namespace echoline::model
