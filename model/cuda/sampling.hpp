// Samples tokens from logits: device code as in block.hpp. Internal to this folder.
#pragma once
#include "model/cuda/block.hpp"

namespace echoline::model::cuda {

inline constexpr unsigned kSampleThreads = 256;
inline constexpr unsigned kSampleWarps = kSampleThreads / kWarpThreads;
inline constexpr unsigned kTokensPerSampleThread = 16;
inline constexpr unsigned kTokensPerSampleWarp = kWarpThreads * kTokensPerSampleThread;
// The largest number of warps per row. Each warp processes one share of the vocabulary: kTokensPerSampleWarp
// consecutive tokens.
inline constexpr unsigned kSampleWarpsMax = 2048;

// Samples a token for each row, with its log-probability: the first token, in the order of the vocabulary, at which the
// cumulative probability of softmax(logits / temperature) exceeds the uniform number. With temperature 0: the first of
// the most likely tokens, with its log-probability at temperature 1. Logits that are not finite give a log-probability
// that is not finite.
struct SampleJob {
  const Bf16* logits;        // [rows, stride]
  const float* temperature;  // [rows]
  const double* uniform;     // [rows]
  float* max_logits;         // [rows, shares]: the largest logit of each share
  float* sums;               // [rows, shares]: the sum of exp(logit - max_logit)
  unsigned* arrived;         // [rows]: number of blocks that have written their shares; 0 before and after a launch
  std::int32_t* tokens;      // [rows]
  float* logprobs;           // [rows]
  std::uint32_t rows, vocab, stride;
};
// The number of blocks per row.
inline unsigned sample_blocks(unsigned vocab) {
  return (vocab + kTokensPerSampleWarp * kSampleWarps - 1) / (kTokensPerSampleWarp * kSampleWarps);
}

// Shared memory of the last block of a row. A token's weight is exp(logit - max_logit).
struct SampleShared {
  double weights[kSampleWarpsMax];    // total weight of each share
  double lane_weights[kWarpThreads];  // total weight of the shares or tokens of each thread of the first warp
  float max_logits[kSampleWarpsMax];  // largest logit of each share
  float warp_max_logits[kSampleWarps];
  double weight_left;          // uniform number times total weight, minus the weights before `share`
  float max_logit, log_total;  // largest logit of the row; logarithm of the total weight
  // At first, the share that has the sampled token. Later the group of kTokensPerSampleThread tokens that has it.
  unsigned share;
};

// Returns the first index at which the cumulative weight exceeds `weight_left`, and subtracts the weights before it
// from `weight_left`. If, by rounding, all `count` weights together do not exceed it, returns the index of the last
// weight above 0 and sets `weight_left` to infinity.
template <class Weight>
ECHO_DEVICE unsigned subtract_until_found(unsigned count, double& weight_left, const Weight& weight) {
  constexpr unsigned kBatch = 8;  // weights that are loaded before the first is used, so that loads overlap
  unsigned last_positive = 0;
  for (unsigned first = 0; first < count; first += kBatch) {
    double batch[kBatch];
    ECHO_UNROLL
    for (unsigned i = 0; i < kBatch; ++i) batch[i] = first + i < count ? static_cast<double>(weight(first + i)) : 0;
    ECHO_UNROLL
    for (unsigned i = 0; i < kBatch; ++i) {
      if (!(batch[i] > 0)) continue;
      last_positive = first + i;
      if (weight_left < batch[i]) return last_positive;
      weight_left -= batch[i];
    }
  }
  weight_left = INFINITY;
  return last_positive;
}

// The work of block `index` of sample_blocks(): each warp processes one share of the tokens. The last block of a row to
// finish then samples the token.
template <class Block>
ECHO_DEVICE void sample_block(Block& block, const SampleJob& job, unsigned row, unsigned index) {
  struct ThreadValues {
    float x[kTokensPerSampleThread], max_logit, sum;
  };
  typename Block::template Local<ThreadValues> locals;
  const Bf16* const logits = job.logits + static_cast<std::size_t>(row) * job.stride;
  const bool is_greedy = job.temperature[row] == 0;
  const float temperature = is_greedy ? 1 : job.temperature[row];
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
  const auto max_logit_of = [&](unsigned thread) -> float& { return locals[thread].max_logit; };
  const auto sum_of = [&](unsigned thread) -> float& { return locals[thread].sum; };
  block.wait_for_inputs();

  // Computes the largest logit and the total weight of each share.
  block.on_each_thread([&](unsigned thread) {
    ThreadValues& self = locals[thread];
    load(index * kSampleWarps * kTokensPerSampleWarp + thread * kTokensPerSampleThread, self.x);
    self.max_logit = -INFINITY;
    ECHO_UNROLL
    for (unsigned i = 0; i < kTokensPerSampleThread; ++i) self.max_logit = larger(self.x[i], self.max_logit);
  });
  block.template largest<kWarpThreads>(max_logit_of);
  block.on_each_thread([&](unsigned thread) {
    ThreadValues& self = locals[thread];
    self.sum = 0;
    ECHO_UNROLL
    for (unsigned i = 0; i < kTokensPerSampleThread; ++i)  // if all are -INFINITY, x - max_logit is NaN
      self.sum += self.x[i] == -INFINITY ? 0 : std::exp(self.x[i] - self.max_logit);
  });
  block.template sum<kWarpThreads>(sum_of);
  block.on_each_thread([&](unsigned thread) {
    if (thread % kWarpThreads != 0) return;
    const std::size_t share = static_cast<std::size_t>(row) * shares + index * kSampleWarps + thread / kWarpThreads;
    job.max_logits[share] = locals[thread].max_logit, job.sums[share] = locals[thread].sum;
  });
  if (!block.is_last_to_arrive(job.arrived + row, blocks)) return;

  // The last block of the row: makes the shares' weights relative to the row's largest logit.
  SampleShared& shared = *block.template shared<SampleShared>();
  block.on_each_thread([&](unsigned thread) {
    float& max_logit = locals[thread].max_logit = -INFINITY;
    for (unsigned i = thread; i < shares; i += kSampleThreads) {
      shared.max_logits[i] = load_shared_result(job.max_logits + static_cast<std::size_t>(row) * shares + i);
      shared.weights[i] =
          static_cast<double>(load_shared_result(job.sums + static_cast<std::size_t>(row) * shares + i));
      max_logit = larger(shared.max_logits[i], max_logit);
    }
  });
  block.template largest<kWarpThreads>(max_logit_of);
  block.on_each_thread_and_wait([&](unsigned thread) {
    if (thread % kWarpThreads == 0) shared.warp_max_logits[thread / kWarpThreads] = locals[thread].max_logit;
  });
  block.on_each_thread_and_wait([&](unsigned thread) {
    float max_logit = shared.warp_max_logits[0];
    ECHO_UNROLL
    for (unsigned i = 1; i < kSampleWarps; ++i) max_logit = larger(shared.warp_max_logits[i], max_logit);
    for (unsigned i = thread; i < shares; i += kSampleThreads) {
      if (is_greedy && shared.max_logits[i] == max_logit)
        shared.max_logits[i] = INFINITY;  // marks the share with the largest logit
      // So far, the weight is relative to the share's own largest logit.
      if (shared.weights[i] > 0 && shared.max_logits[i] != INFINITY)
        shared.weights[i] *= static_cast<double>(std::exp(shared.max_logits[i] - max_logit));
    }
    if (thread == 0) shared.max_logit = max_logit;
  });
  // Finds the share that has the sampled token, first among the 32 ranges of shares that the lanes sum up.
  const unsigned shares_per_lane = (shares + kWarpThreads - 1) / kWarpThreads;
  block.on_each_thread_and_wait([&](unsigned thread) {
    if (thread >= kWarpThreads) return;
    double sum = 0;
    for (unsigned i = thread * shares_per_lane; i < min_of((thread + 1) * shares_per_lane, shares); ++i)
      sum += shared.weights[i];
    shared.lane_weights[thread] = sum;
  });
  block.on_each_thread_and_wait([&](unsigned thread) {
    if (thread != 0) return;
    double total = 0;
    ECHO_UNROLL
    for (unsigned i = 0; i < kWarpThreads; ++i) total += shared.lane_weights[i];
    shared.log_total = static_cast<float>(std::log(total));
    if (is_greedy) {
      shared.weight_left = 0;
      shared.share = subtract_until_found(shares, shared.weight_left,
                                          [&](unsigned i) { return shared.max_logits[i] == INFINITY ? 1 : 0; });
      return;
    }
    double weight_left = job.uniform[row] * total;
    const unsigned first =
        subtract_until_found(kWarpThreads, weight_left, [&](unsigned i) { return shared.lane_weights[i]; }) *
        shares_per_lane;
    shared.share = first + subtract_until_found(min_of(shares_per_lane, shares - min_of(first, shares)), weight_left,
                                                [&](unsigned i) { return shared.weights[first + i]; });
    shared.weight_left = weight_left;
  });
  // Finds the thread of that share that has the sampled token, and then the token.
  const auto weight_of = [&](float x) {
    return is_greedy ? (x == shared.max_logit ? 1.0f : 0.0f) : std::exp(x - shared.max_logit);
  };
  block.on_each_thread_and_wait([&](unsigned thread) {
    if (thread >= kWarpThreads) return;
    ThreadValues& self = locals[thread];
    load(shared.share * kTokensPerSampleWarp + thread * kTokensPerSampleThread, self.x);
    float sum = 0;
    ECHO_UNROLL
    for (unsigned i = 0; i < kTokensPerSampleThread; ++i) sum += weight_of(self.x[i]);
    shared.lane_weights[thread] = static_cast<double>(sum);
  });
  block.on_each_thread_and_wait([&](unsigned thread) {
    if (thread != 0) return;
    double weight_left = shared.weight_left;
    shared.share = shared.share * kWarpThreads +
                   subtract_until_found(kWarpThreads, weight_left, [&](unsigned i) { return shared.lane_weights[i]; });
    shared.weight_left = weight_left;
  });
  block.on_each_thread([&](unsigned thread) {
    if (thread != shared.share % kWarpThreads) return;
    ThreadValues& self = locals[thread];
    double weight_left = shared.weight_left;
    unsigned token = 0;
    float x = self.x[0];
    ECHO_UNROLL
    for (unsigned i = 0; i < kTokensPerSampleThread; ++i) {
      const double weight = static_cast<double>(weight_of(self.x[i]));
      if (!(weight > 0) || weight_left < 0) continue;
      token = i, x = self.x[i];
      weight_left = weight_left < weight ? -1 : weight_left - weight;  // negative after the sampled token was found
    }
    const unsigned first = shared.share * kTokensPerSampleThread;  // `share` is a group of tokens now
    job.tokens[row] = static_cast<std::int32_t>(min_of(first + token, job.vocab - 1));
    job.logprobs[row] = (x - shared.max_logit) - shared.log_total;
  });
}

}  // namespace echoline::model::cuda
