// Pairs of policy versions like those of a training run, made from a seed: weights of the measured spread, and the
// AdamW update that separates two of them.
//
// Weights are normal with a log-normal scale per row, which gives |w| a median of 0.0115, a mean of 0.0146 and 5th and
// 95th percentiles of 0.0010 and 0.0385. An update is lr·m̂/(√v̂+ε) with the moments of AdamW (β = 0.9, 0.99) after
// `updates` gradients, normal and independent; after ten, update/lr is nearly normal with σ = 0.33.
#pragma once
#include <cstdint>
#include <string>

#include "delta/tensor.hpp"

namespace echoline::bench {

enum class Regime {
  kPureBf16,  // the weights are bf16: what an update adds is rounded away unless it reaches half a spacing
  kMaster,    // fp32 masters, anywhere between two bf16 values; the policy is their rounding
};

struct PairOptions {
  std::uint64_t elements = 64ull << 20;  // about
  std::uint64_t seed = 1;
  Regime regime = Regime::kPureBf16;
  double density = 0.0144;            // share of elements that change; the learning rate for it is searched
  int updates = 10;                   // gradients the moments have seen, >= 1
  double row_spread = 0.0;            // σ of a log-normal factor on each row's updates
  double untouched_rows = 0;          // share of the embedding's rows that never had a gradient
  std::uint64_t tensor_elements = 0;  // unless 0, rows of tensors are divided among tensors of about so many: experts
  unsigned threads = 2;               // the pair does not depend on it
};

struct Pair {
  std::string name;
  delta::OwnedState prev, cur;  // sealed
  double learning_rate = 0;     // 0: not known
};

// A Qwen3-like policy: embedding, three layers, norms; all bf16. kInvalid when the density cannot be reached.
Result<Pair> make_pair(const PairOptions& options);

// prev.safetensors and cur.safetensors in a folder, or two paths (files or checkpoint folders) with a comma between.
Result<Pair> read_pair(const std::string& where);

// Lines of text about the bf16 tensors: percentiles of |w|, density by exponent of the old value, share of changes by
// one step.
std::string describe(const Pair& pair);

}  // namespace echoline::bench
