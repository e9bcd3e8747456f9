// Samples the next tokens for RunningBatch and, for rows with top_k, top_p or min_p, for the CUDA decoder.
#include "model/sampler.hpp"

#include <algorithm>
#include <cmath>

#include "model/kernels.hpp"
#include "model/parallel.hpp"

namespace echoline::model {
namespace {

using torch::Tensor;

constexpr std::int64_t kSumBlock = 512;              // probabilities per partial sum; only one block is searched
constexpr std::int64_t kProbabilitiesMin = 1 << 14;  // probabilities that justify another thread

// Whether top_p, top_k or min_p can exclude tokens.
bool excludes_tokens(const Sampling& sampling) {
  return sampling.temperature > 0 && (sampling.top_p < 1 || sampling.top_k > 0 || sampling.min_p > 0);
}

// The first index at which the cumulative sum of p exceeds `share` times the total.
std::int64_t index_at_share(const float* p, std::int64_t count, double share) {
  std::vector<double> sums(static_cast<std::size_t>((count + kSumBlock - 1) / kSumBlock));
  double total = 0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const std::int64_t begin = static_cast<std::int64_t>(i) * kSumBlock;
    sums[i] = kernels().sum(p + begin, std::min(kSumBlock, count - begin));
    total += sums[i];
  }
  double probability_left = share * total;
  std::size_t block = 0;
  while (block + 1 < sums.size() && probability_left >= sums[block]) probability_left -= sums[block++];
  std::int64_t last_positive = static_cast<std::int64_t>(block) * kSumBlock;
  for (std::int64_t i = last_positive, end = std::min(count, i + kSumBlock); i < end; ++i) {
    if (!(p[i] > 0)) continue;
    last_positive = i;  // the result if, by rounding, the sum never exceeds the share
    probability_left -= double(p[i]);
    if (probability_left < 0) break;
  }
  return last_positive;
}

// Sets `order` to the tokens that top_k, top_p and min_p keep, most likely first, and `p` to their probabilities.
void keep_likely_tokens(const float* log_p, std::int64_t vocab, const Sampling& sampling,
                        std::vector<std::int32_t>& order, std::vector<float>& p) {
  // The least log-probability that min_p allows: minus infinity if min_p is 0.
  const float log_p_min = *std::max_element(log_p, log_p + vocab) + static_cast<float>(std::log(sampling.min_p));
  const auto is_likelier = [&](std::int32_t a, std::int32_t b) {
    return log_p[a] != log_p[b] ? log_p[a] > log_p[b] : a < b;
  };
  order.clear();
  p.clear();
  double total = 1, kept_probability = 0;  // total: of the tokens to which top_p applies, at first all
  for (std::int64_t i = 0; i < vocab; ++i)
    if (sampling.top_k > 0 || log_p[i] >= log_p_min) order.push_back(static_cast<std::int32_t>(i));
  if (sampling.top_k > 0) {
    const std::int64_t count = std::min(sampling.top_k, vocab);
    std::nth_element(order.begin(), order.begin() + count - 1, order.end(), is_likelier);
    order.resize(static_cast<std::size_t>(count));
    total = 0;
    for (const std::int32_t token : order) total += double(std::exp(log_p[token]));
  }
  // A few tokens usually have most of the probability, so tokens are sorted in parts of growing size until enough are
  // kept.
  constexpr std::size_t kFirstSorted = 64, kGrowth = 8;
  for (std::size_t sorted = 0, sort_end = kFirstSorted; sorted < order.size(); sorted = sort_end, sort_end *= kGrowth) {
    sort_end = std::min(sort_end, order.size());
    const auto begin = order.begin() + static_cast<std::ptrdiff_t>(sorted);
    const auto end = order.begin() + static_cast<std::ptrdiff_t>(sort_end);
    if (sort_end < order.size()) std::nth_element(begin, end, order.end(), is_likelier);
    std::sort(begin, end, is_likelier);
    for (std::size_t i = sorted; i < sort_end; ++i) {
      const bool reached_top_p = i > 0 && sampling.top_p < 1 && kept_probability >= sampling.top_p * total;
      if (reached_top_p || log_p[order[i]] < log_p_min) return order.resize(i);
      p.push_back(std::exp(log_p[order[i]]));
      kept_probability += double(p.back());
    }
  }
}

// Samples all rows at once, on any device, by the same rules as the row-wise code of sample_tokens(). `by_sorting` is
// needed for rows that exclude tokens, and for greedy ones (temperature 0), which keep only the most likely token.
Tensor sample_batched(const Tensor& log_p, std::span<const SampleRequest> requests, bool by_sorting) {
  const auto column = [&](auto&& value_of) {  // [rows, 1]
    std::vector<double> values;
    for (const SampleRequest& request : requests) values.push_back(value_of(request));
    return torch::tensor(values, torch::kDouble).unsqueeze(1).to(log_p.device());
  };
  const Tensor uniform = column([](const SampleRequest& request) { return request.uniform; });
  // The tokens at which the cumulative probability does not exceed the share are counted; their number is the index of
  // the first one at which it does.
  if (!by_sorting) {
    const Tensor cumulative = log_p.exp().cumsum(-1, torch::kDouble);
    return (cumulative <= uniform * cumulative.narrow(1, log_p.size(1) - 1, 1)).sum(-1).clamp_max(log_p.size(1) - 1);
  }
  const Tensor top_k = column([&](const SampleRequest& request) {
    return request.sampling->temperature == 0 ? 1.0
           : request.sampling->top_k > 0      ? double(request.sampling->top_k)
                                              : double(log_p.size(1));
  });
  const Tensor top_p = column([](const SampleRequest& request) { return request.sampling->top_p; });
  const Tensor min_p = column([](const SampleRequest& request) { return std::log(request.sampling->min_p); });
  const auto [sorted, order] = log_p.sort(/*stable=*/true, -1, /*descending=*/true);
  const Tensor rank = torch::arange(log_p.size(1), log_p.options().dtype(torch::kLong)).unsqueeze(0);
  Tensor p = sorted.to(torch::kDouble).exp().masked_fill(rank >= top_k, 0);
  Tensor cumulative = p.cumsum(-1);
  const auto total = [&] { return cumulative.narrow(1, log_p.size(1) - 1, 1); };
  // rank > 0: the most likely token is never excluded.
  p = p.masked_fill(((cumulative - p) >= top_p * total()).logical_and(rank > 0).logical_and(top_p < 1), 0);
  p = p.masked_fill(sorted < sorted.narrow(1, 0, 1) + min_p, 0);
  cumulative = p.cumsum(-1);
  const Tensor chosen_rank = (cumulative <= uniform * total()).sum(-1, /*keepdim=*/true).clamp_max(log_p.size(1) - 1);
  return order.gather(1, chosen_rank).squeeze(1);
}

}  // namespace

SampledTokens sample_tokens(const Tensor& logits, std::span<const SampleRequest> requests, bool batched) {
  const std::int64_t vocab = logits.size(1);
  const auto any_row = [&](auto&& matches) {
    return std::any_of(requests.begin(), requests.end(),
                       [&](const SampleRequest& request) { return matches(*request.sampling); });
  };
  Tensor scaled = logits.contiguous();
  if (any_row([](const Sampling& sampling) { return sampling.temperature != 0 && sampling.temperature != 1; })) {
    std::vector<float> temperatures;
    for (const SampleRequest& request : requests)
      temperatures.push_back(request.sampling->temperature == 0 ? 1 : float(request.sampling->temperature));
    scaled = logits / torch::tensor(temperatures, torch::kFloat).unsqueeze(1).to(logits.device());
  }
  SampledTokens out;
  if (batched || !scaled.is_cpu()) {
    const Tensor log_p = scaled.log_softmax(-1);
    std::vector<std::int64_t> rows_by_sorting[2];  // rows that need no sorting, and the others
    for (std::size_t row = 0; row < requests.size(); ++row) {
      const Sampling& sampling = *requests[row].sampling;
      rows_by_sorting[excludes_tokens(sampling) || sampling.temperature == 0].push_back(static_cast<std::int64_t>(row));
    }
    Tensor tokens = torch::empty({std::ssize(requests)}, log_p.options().dtype(torch::kLong));
    for (const bool by_sorting : {false, true}) {
      if (rows_by_sorting[by_sorting].empty()) continue;
      std::vector<SampleRequest> row_requests;
      for (const std::int64_t row : rows_by_sorting[by_sorting])
        row_requests.push_back(requests[static_cast<std::size_t>(row)]);
      const Tensor rows = torch::tensor(rows_by_sorting[by_sorting], torch::kLong).to(log_p.device());
      tokens.index_copy_(0, rows, sample_batched(log_p.index_select(0, rows), row_requests, by_sorting));
    }
    const Tensor logprobs = log_p.gather(1, tokens.unsqueeze(1)).squeeze(1).cpu();
    tokens = tokens.cpu();
    for (std::size_t row = 0; row < requests.size(); ++row) {
      out.tokens.push_back(static_cast<Token>(tokens.data_ptr<std::int64_t>()[row]));
      out.logprobs.push_back(logprobs.data_ptr<float>()[row]);
    }
    return out;
  }
  // Row by row, because the rounding of libtorch's log_softmax() depends on the number of threads.
  const Tensor log_p = torch::empty_like(scaled);
  const std::int64_t grain = std::max<std::int64_t>(1, kProbabilitiesMin / vocab);
  parallel_for(std::ssize(requests), grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row)
      kernels().log_softmax(scaled.data_ptr<float>() + row * vocab, vocab, log_p.data_ptr<float>() + row * vocab);
  });
  const bool any_from_all_tokens =
      any_row([](const Sampling& sampling) { return sampling.temperature > 0 && !excludes_tokens(sampling); });
  const Tensor p = any_from_all_tokens ? log_p.exp() : Tensor();
  out.tokens.resize(requests.size());
  out.logprobs.resize(requests.size());
  parallel_for(std::ssize(requests), grain, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::int32_t> order;
    std::vector<float> kept_p;
    for (std::int64_t row = begin; row < end; ++row) {
      const SampleRequest& request = requests[static_cast<std::size_t>(row)];
      const Sampling& sampling = *request.sampling;
      const float* const row_log_p = log_p.data_ptr<float>() + row * vocab;
      std::int64_t token = 0;
      if (!std::isfinite(*std::max_element(row_log_p, row_log_p + vocab))) {
        // The result is token 0, whose log-probability is not finite either; the caller reports that.
      } else if (sampling.temperature == 0) {
        token = std::max_element(row_log_p, row_log_p + vocab) - row_log_p;
      } else if (excludes_tokens(sampling)) {
        keep_likely_tokens(row_log_p, vocab, sampling, order, kept_p);
        token = order[static_cast<std::size_t>(index_at_share(kept_p.data(), std::ssize(kept_p), request.uniform))];
      } else {
        token = index_at_share(p.data_ptr<float>() + row * vocab, vocab, request.uniform);
      }
      out.tokens[static_cast<std::size_t>(row)] = static_cast<Token>(token);
      out.logprobs[static_cast<std::size_t>(row)] = row_log_p[token];
    }
  });
  return out;
}

}  // namespace echoline::model
