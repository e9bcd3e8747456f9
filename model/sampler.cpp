#include "model/sampler.hpp"

#include <algorithm>
#include <cmath>

#include "model/kernels.hpp"
#include "model/parallel.hpp"

namespace echoline::model {
namespace {

using torch::Tensor;

constexpr std::int64_t kBlock = 512;
constexpr std::int64_t kProbabilitiesMin = 1 << 14;  // probabilities that justify another thread

bool restricted(const Sampling& s) { return s.temperature > 0 && (s.top_p < 1 || s.top_k > 0 || s.min_p > 0); }

// The index at which the cumulative sum of p exceeds `share` of its total.
std::int64_t pass(const float* p, std::int64_t count, double share) {
  std::vector<double> sums(static_cast<std::size_t>((count + kBlock - 1) / kBlock));
  double total = 0;
  for (std::size_t b = 0; b < sums.size(); ++b) {
    const std::int64_t begin = static_cast<std::int64_t>(b) * kBlock;
    total += sums[b] = kernels().sum(p + begin, std::min(kBlock, count - begin));
  }
  double left = share * total;
  std::size_t b = 0;
  while (b + 1 < sums.size() && left >= sums[b]) left -= sums[b++];
  std::int64_t last = static_cast<std::int64_t>(b) * kBlock;
  for (std::int64_t i = last, end = std::min(count, i + kBlock); i < end; ++i) {
    if (!(p[i] > 0)) continue;
    last = i;  // rounding may let no index exceed it
    if ((left -= double(p[i])) < 0) break;
  }
  return last;
}

// The tokens that top_k, top_p and min_p keep, most likely first, with their probabilities.
void keep(const float* log_p, std::int64_t vocab, const Sampling& sampling, std::vector<std::int32_t>& order,
          std::vector<float>& p) {
  const float least = *std::max_element(log_p, log_p + vocab) + static_cast<float>(std::log(sampling.min_p));
  const auto before = [&](std::int32_t a, std::int32_t b) {
    return log_p[a] != log_p[b] ? log_p[a] > log_p[b] : a < b;
  };
  order.clear();
  p.clear();
  double total = 1, held = 0;
  for (std::int64_t i = 0; i < vocab; ++i)
    if (sampling.top_k > 0 || log_p[i] >= least) order.push_back(static_cast<std::int32_t>(i));
  if (sampling.top_k > 0) {
    const std::int64_t count = std::min(sampling.top_k, vocab);
    std::nth_element(order.begin(), order.begin() + count - 1, order.end(), before);
    order.resize(static_cast<std::size_t>(count));
    total = 0;
    for (const std::int32_t token : order) total += double(std::exp(log_p[token]));
  }
  // A few tokens have most of the probability, so only as many as needed are sorted.
  for (std::size_t sorted = 0, next = 64; sorted < order.size(); sorted = next, next *= 8) {
    next = std::min(next, order.size());
    const auto begin = order.begin() + static_cast<std::ptrdiff_t>(sorted);
    const auto end = order.begin() + static_cast<std::ptrdiff_t>(next);
    if (next < order.size()) std::nth_element(begin, end, order.end(), before);
    std::sort(begin, end, before);
    for (std::size_t i = sorted; i < next; ++i) {
      const bool enough = i > 0 && sampling.top_p < 1 && held >= sampling.top_p * total;
      if (enough || log_p[order[i]] < least) return order.resize(i);
      p.push_back(std::exp(log_p[order[i]]));
      held += double(p.back());
    }
  }
}

// As the row-wise code, on any device for all rows at once. Greedy rows keep one token.
Tensor draw_batched(const Tensor& log_p, std::span<const Draw> draws, bool sorting) {
  const auto column = [&](auto&& of) {
    std::vector<double> values;
    for (const Draw& d : draws) values.push_back(of(d));
    return torch::tensor(values, torch::kDouble).unsqueeze(1).to(log_p.device());
  };
  const Tensor uniform = column([](const Draw& d) { return d.uniform; });
  if (!sorting) {
    const Tensor cumulative = log_p.exp().cumsum(-1, torch::kDouble);
    return (cumulative <= uniform * cumulative.narrow(1, log_p.size(1) - 1, 1)).sum(-1).clamp_max(log_p.size(1) - 1);
  }
  const Tensor top_k = column([&](const Draw& d) {
    return d.sampling->temperature == 0 ? 1.0
           : d.sampling->top_k > 0      ? double(d.sampling->top_k)
                                        : double(log_p.size(1));
  });
  const Tensor top_p = column([](const Draw& d) { return d.sampling->top_p; });
  const Tensor min_p = column([](const Draw& d) { return std::log(d.sampling->min_p); });
  const auto [sorted, order] = log_p.sort(/*stable=*/true, -1, /*descending=*/true);
  const Tensor rank = torch::arange(log_p.size(1), log_p.options().dtype(torch::kLong)).unsqueeze(0);
  Tensor p = sorted.to(torch::kDouble).exp().masked_fill(rank >= top_k, 0);
  Tensor cumulative = p.cumsum(-1);
  const auto total = [&] { return cumulative.narrow(1, log_p.size(1) - 1, 1); };
  p = p.masked_fill(((cumulative - p) >= top_p * total()).logical_and(rank > 0).logical_and(top_p < 1), 0);
  p = p.masked_fill(sorted < sorted.narrow(1, 0, 1) + min_p, 0);
  cumulative = p.cumsum(-1);
  const Tensor at = (cumulative <= uniform * total()).sum(-1, true).clamp_max(log_p.size(1) - 1);
  return order.gather(1, at).squeeze(1);
}

}  // namespace

Drawn draw(const Tensor& logits, std::span<const Draw> draws, bool batched) {
  const std::int64_t vocab = logits.size(1);
  const auto any = [&](auto&& is) {
    return std::any_of(draws.begin(), draws.end(), [&](const Draw& d) { return is(*d.sampling); });
  };
  Tensor scaled = logits.contiguous();
  if (any([](const Sampling& s) { return s.temperature != 0 && s.temperature != 1; })) {
    std::vector<float> temperatures;
    for (const Draw& d : draws)
      temperatures.push_back(d.sampling->temperature == 0 ? 1 : float(d.sampling->temperature));
    scaled = logits / torch::tensor(temperatures, torch::kFloat).unsqueeze(1).to(logits.device());
  }
  Drawn out;
  if (batched || !scaled.is_cpu()) {
    const Tensor log_p = scaled.log_softmax(-1);
    std::vector<std::int64_t> apart[2];  // rows that need no sorting, and the others
    for (std::size_t row = 0; row < draws.size(); ++row) {
      const Sampling& s = *draws[row].sampling;
      apart[restricted(s) || s.temperature == 0].push_back(static_cast<std::int64_t>(row));
    }
    Tensor tokens = torch::empty({std::ssize(draws)}, log_p.options().dtype(torch::kLong));
    for (const bool sorting : {false, true}) {
      if (apart[sorting].empty()) continue;
      std::vector<Draw> some;
      for (const std::int64_t row : apart[sorting]) some.push_back(draws[static_cast<std::size_t>(row)]);
      const Tensor rows = torch::tensor(apart[sorting], torch::kLong).to(log_p.device());
      tokens.index_copy_(0, rows, draw_batched(log_p.index_select(0, rows), some, sorting));
    }
    const Tensor logprobs = log_p.gather(1, tokens.unsqueeze(1)).squeeze(1).cpu();
    tokens = tokens.cpu();
    for (std::size_t row = 0; row < draws.size(); ++row) {
      out.tokens.push_back(static_cast<Token>(tokens.data_ptr<std::int64_t>()[row]));
      out.logprobs.push_back(logprobs.data_ptr<float>()[row]);
    }
    return out;
  }
  // Row by row, because libtorch's log_softmax() rounds differently with another number of threads.
  const Tensor log_p = torch::empty_like(scaled);
  const std::int64_t grain = std::max<std::int64_t>(1, kProbabilitiesMin / vocab);
  parallel_for(std::ssize(draws), grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row)
      kernels().log_softmax(scaled.data_ptr<float>() + row * vocab, vocab, log_p.data_ptr<float>() + row * vocab);
  });
  const bool whole = any([](const Sampling& s) { return s.temperature > 0 && !restricted(s); });
  const Tensor p = whole ? log_p.exp() : Tensor();
  out.tokens.resize(draws.size());
  out.logprobs.resize(draws.size());
  parallel_for(std::ssize(draws), grain, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::int32_t> order;
    std::vector<float> kept;
    for (std::int64_t row = begin; row < end; ++row) {
      const Draw& draw = draws[static_cast<std::size_t>(row)];
      const Sampling& sampling = *draw.sampling;
      const float* const of = log_p.data_ptr<float>() + row * vocab;
      std::int64_t token = 0;
      if (!std::isfinite(*std::max_element(of, of + vocab))) {
        // Keeps the first token; its log-probability is not finite.
      } else if (sampling.temperature == 0) {
        token = std::max_element(of, of + vocab) - of;
      } else if (restricted(sampling)) {
        keep(of, vocab, sampling, order, kept);
        token = order[static_cast<std::size_t>(pass(kept.data(), std::ssize(kept), draw.uniform))];
      } else {
        token = pass(p.data_ptr<float>() + row * vocab, vocab, draw.uniform);
      }
      out.tokens[static_cast<std::size_t>(row)] = static_cast<Token>(token);
      out.logprobs[static_cast<std::size_t>(row)] = of[token];
    }
  });
  return out;
}

}  // namespace echoline::model
