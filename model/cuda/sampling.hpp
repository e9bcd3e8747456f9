// Samples tokens from logits: device code as in block.hpp. Internal to this folder.
#pragma once
#include "model/cuda/block.hpp"

namespace echoline::model::cuda {

inline constexpr unsigned kSampleThreads = 256;
inline constexpr unsigned kSampleWarps = kSampleThreads / kWarpThreads;
inline constexpr unsigned kTokensPerSampleThread = 16;
inline constexpr unsigned kTokensPerSampleWarp = kWarpThreads * kTokensPerSampleThread;
inline constexpr unsigned kSampleWarpsMax = 2048;  // per row; each warp processes one share of the vocabulary

// Samples the token at which the cumulative probability of softmax(logits / temperature), in the order of the
// vocabulary, exceeds the uniform number, with its log-probability. Temperature 0: the first of the most likely tokens,
// with its log-probability at temperature 1. Logits that are not finite give a log-probability that is not finite.
struct SampleJob {
  const Bf16* logits;        // [rows, stride]
  const float* temperature;  // [rows]
  const double* uniform;     // [rows]
  float* tops;               // [rows, shares]: the largest logit of each share
  float* sums;               // [rows, shares]: the sum of exp(logit - top)
  unsigned* arrived;         // [rows], initially 0: blocks that have written their shares
  std::int32_t* tokens;      // [rows]
  float* logprobs;           // [rows]
  std::uint32_t rows, vocab, stride;
};
inline unsigned sample_blocks(unsigned vocab) {
  return (vocab + kTokensPerSampleWarp * kSampleWarps - 1) / (kTokensPerSampleWarp * kSampleWarps);
}

struct SampleShared {
  double weights[kSampleWarpsMax];
  double by_lane[kWarpThreads];
  float tops[kSampleWarpsMax];
  float by_warp[kSampleWarps];
  double left;  // of the random part of the total weight, before `share`
  float top, log_total;
  unsigned share;  // first the share that holds the sampled token, then the thread of all shares
};

// Returns the index of the weight with which the sum of the first weights exceeds `left`, and subtracts the weights
// before it from `left`. If rounding keeps all `count` weights below `left`, returns the last one above 0 and sets
// `left` to infinity.
template <class Weight>
ECHO_DEVICE unsigned pick(unsigned count, double& left, const Weight& weight) {
  constexpr unsigned kBatch = 8;
  unsigned last_positive = 0;
  for (unsigned first = 0; first < count; first += kBatch) {
    double batch[kBatch];
    ECHO_UNROLL
    for (unsigned i = 0; i < kBatch; ++i) batch[i] = first + i < count ? static_cast<double>(weight(first + i)) : 0;
    ECHO_UNROLL
    for (unsigned i = 0; i < kBatch; ++i) {
      if (!(batch[i] > 0)) continue;
      last_positive = first + i;
      if (left < batch[i]) return last_positive;
      left -= batch[i];
    }
  }
  left = INFINITY;
  return last_positive;
}

// Block `index` of sample_blocks(): each warp processes one share of the tokens. The last block of a row samples.
template <class Block>
ECHO_DEVICE void sample_block(Block& block, const SampleJob& job, unsigned row, unsigned index) {
  struct Own {
    float x[kTokensPerSampleThread], top, sum;
  };
  typename Block::template Local<Own> locals;
  const Bf16* const logits = job.logits + static_cast<std::size_t>(row) * job.stride;
  const bool greedy = job.temperature[row] == 0;
  const float temperature = greedy ? 1 : job.temperature[row];
  const unsigned blocks = (job.vocab + kTokensPerSampleWarp * kSampleWarps - 1) / (kTokensPerSampleWarp * kSampleWarps);
  const unsigned shares = blocks * kSampleWarps;
  // Loads the tokens from `first` on; tokens beyond the vocabulary count as impossible.
  const auto load = [&](unsigned first, float* x) {
    ECHO_UNROLL
    for (unsigned i = 0; i < kTokensPerSampleThread; i += kVectorCount) {
      const Vector v = first + i < job.stride ? load_vector(logits + first + i) : Vector{};
      ECHO_UNROLL
      for (unsigned k = 0; k < kVectorCount; ++k) {
        const float value = k % 2 == 0 ? first_of(v.words[k / 2]) : second_of(v.words[k / 2]);
        x[i + k] = first + i + k < job.vocab ? value / temperature : -INFINITY;
      }
    }
  };
  const auto top_of = [&](unsigned thread) -> float& { return locals[thread].top; };
  const auto sum_of = [&](unsigned thread) -> float& { return locals[thread].sum; };
  block.wait_for_inputs();

  block.own([&](unsigned thread) {
    Own& self = locals[thread];
    load(index * kSampleWarps * kTokensPerSampleWarp + thread * kTokensPerSampleThread, self.x);
    self.top = -INFINITY;
    ECHO_UNROLL
    for (unsigned i = 0; i < kTokensPerSampleThread; ++i) self.top = larger(self.x[i], self.top);
  });
  block.template largest<kWarpThreads>(top_of);
  block.own([&](unsigned thread) {
    Own& self = locals[thread];
    self.sum = 0;
    ECHO_UNROLL
    for (unsigned i = 0; i < kTokensPerSampleThread; ++i)
      self.sum += self.x[i] == -INFINITY ? 0 : std::exp(self.x[i] - self.top);
  });
  block.template sum<kWarpThreads>(sum_of);
  block.own([&](unsigned thread) {
    if (thread % kWarpThreads != 0) return;
    const std::size_t at = static_cast<std::size_t>(row) * shares + index * kSampleWarps + thread / kWarpThreads;
    job.tops[at] = locals[thread].top, job.sums[at] = locals[thread].sum;
  });
  if (!block.arrive(job.arrived + row, blocks)) return;

  SampleShared& shared = *block.template shared<SampleShared>();
  block.own([&](unsigned thread) {
    float& top = locals[thread].top = -INFINITY;
    for (unsigned i = thread; i < shares; i += kSampleThreads) {
      shared.tops[i] = load_shared_result(job.tops + static_cast<std::size_t>(row) * shares + i);
      shared.weights[i] =
          static_cast<double>(load_shared_result(job.sums + static_cast<std::size_t>(row) * shares + i));
      top = larger(shared.tops[i], top);
    }
  });
  block.template largest<kWarpThreads>(top_of);
  block.each([&](unsigned thread) {
    if (thread % kWarpThreads == 0) shared.by_warp[thread / kWarpThreads] = locals[thread].top;
  });
  block.each([&](unsigned thread) {
    float top = shared.by_warp[0];
    ECHO_UNROLL
    for (unsigned i = 1; i < kSampleWarps; ++i) top = larger(shared.by_warp[i], top);
    for (unsigned i = thread; i < shares; i += kSampleThreads) {
      if (greedy && shared.tops[i] == top) shared.tops[i] = INFINITY;  // marks the share with the largest logit
      if (shared.weights[i] > 0 && shared.tops[i] != INFINITY)
        shared.weights[i] *= static_cast<double>(std::exp(shared.tops[i] - top));
    }
    if (thread == 0) shared.top = top;
  });
  const unsigned per_lane = (shares + kWarpThreads - 1) / kWarpThreads;
  block.each([&](unsigned thread) {
    if (thread >= kWarpThreads) return;
    double sum = 0;
    for (unsigned i = thread * per_lane; i < least((thread + 1) * per_lane, shares); ++i) sum += shared.weights[i];
    shared.by_lane[thread] = sum;
  });
  block.each([&](unsigned thread) {
    if (thread != 0) return;
    double total = 0;
    ECHO_UNROLL
    for (unsigned i = 0; i < kWarpThreads; ++i) total += shared.by_lane[i];
    shared.log_total = static_cast<float>(std::log(total));
    if (greedy) {
      shared.left = 0;
      shared.share = pick(shares, shared.left, [&](unsigned i) { return shared.tops[i] == INFINITY ? 1 : 0; });
      return;
    }
    double left = job.uniform[row] * total;
    const unsigned first = pick(kWarpThreads, left, [&](unsigned i) { return shared.by_lane[i]; }) * per_lane;
    shared.share = first + pick(least(per_lane, shares - least(first, shares)), left,
                                [&](unsigned i) { return shared.weights[first + i]; });
    shared.left = left;
  });
  const auto p = [&](float x) { return greedy ? (x == shared.top ? 1.0f : 0.0f) : std::exp(x - shared.top); };
  block.each([&](unsigned thread) {
    if (thread >= kWarpThreads) return;
    Own& self = locals[thread];
    load(shared.share * kTokensPerSampleWarp + thread * kTokensPerSampleThread, self.x);
    float sum = 0;
    ECHO_UNROLL
    for (unsigned i = 0; i < kTokensPerSampleThread; ++i) sum += p(self.x[i]);
    shared.by_lane[thread] = static_cast<double>(sum);
  });
  block.each([&](unsigned thread) {
    if (thread != 0) return;
    double left = shared.left;
    shared.share =
        shared.share * kWarpThreads + pick(kWarpThreads, left, [&](unsigned i) { return shared.by_lane[i]; });
    shared.left = left;
  });
  block.own([&](unsigned thread) {
    if (thread != shared.share % kWarpThreads) return;
    Own& self = locals[thread];
    double left = shared.left;
    unsigned token = 0;
    float x = self.x[0];
    ECHO_UNROLL
    for (unsigned i = 0; i < kTokensPerSampleThread; ++i) {
      const double w = static_cast<double>(p(self.x[i]));
      if (!(w > 0) || left < 0) continue;
      token = i, x = self.x[i];
      left = left < w ? -1 : left - w;  // below 0: found
    }
    const unsigned first = shared.share * kTokensPerSampleThread;
    job.tokens[row] = static_cast<std::int32_t>(least(first + token, job.vocab - 1));
    job.logprobs[row] = (x - shared.top) - shared.log_total;
  });
}

}  // namespace echoline::model::cuda
