#include "model/training_memory.hpp"

#include <algorithm>

namespace echoline::model {
namespace {

constexpr std::int64_t kLogits = std::int64_t{1} << 25;  // that transformer.cpp holds at a time

Bytes bytes(double count) { return Bytes{static_cast<std::uint64_t>(count)}; }

}  // namespace

TrainingMemory training_memory(const ModelConfig& c, const TrainingShape& s) {
  const auto parameters = static_cast<double>(c.parameters());
  const double element = s.bf16 ? 2 : 4;
  const double sequence = static_cast<double>(std::max<std::int64_t>(2, s.sequence_tokens) - 1);
  const double rows = std::max(1.0, static_cast<double>(s.microbatch_tokens / std::max<std::int64_t>(2, s.sequence_tokens)));
  const double tokens = rows * sequence;
  const auto hidden = static_cast<double>(c.hidden_size), inner = static_cast<double>(c.intermediate_size);
  const auto q = static_cast<double>(c.heads * c.head_dim), kv = static_cast<double>(c.kv_heads * c.head_dim);
  const auto layers = static_cast<double>(c.layers), vocabulary = static_cast<double>(c.vocab_size);

  // Of one layer, for one token: two norms (input in fp32, normed, and scaled), queries and keys in fp32 as they are, squared
  // and normed, then what attention reads and gives, its probabilities, and gate, silu, up and their product.
  const double norms = 2 * hidden * (s.bf16 ? 4 + 2 * element : 3 * element);
  const double rotated = (q + kv) * (c.qk_norm() ? 12 : 0) + (s.bf16 ? 0 : kv * element);
  const double attended = (2 * q + 2 * kv) * element + static_cast<double>(c.heads) * sequence * element;
  const double mlp = 4 * inner * element;
  const double in_layer = tokens * (norms + rotated + attended + mlp) + (q + 2 * kv) * hidden * element;
  const double between = tokens * hidden * element;

  // The head: twice the logits of a part of the rows, and its weight's gradient.
  const double logits = std::min(tokens, std::max(1.0, static_cast<double>(kLogits) / vocabulary)) * vocabulary;
  const double table = vocabulary * hidden;
  const double head = logits * 4 * (s.bf16 ? 2.5 : 2) + table * (s.bf16 ? 6 : 4) + 3 * between;
  // The last moment: the embedding's gradient, beside the head's where they are one tensor; bf16 gradients are not summed yet.
  const double last = (c.tie_embeddings ? 2 : 1) * table * element + (s.bf16 ? 2 * parameters : 0);
  // The first layers' gradients: one layer's activations, and gradients of it on their way.
  const double waiting = c.tie_embeddings ? table * element : 0;
  const double of_layers = (s.bf16 ? 2 * (parameters - table) : 0) + waiting;

  TrainingMemory m;
  m.weights = bytes(parameters * element * (s.reference ? 2 : 1));
  m.gradients = bytes(4 * parameters);
  m.optimizer = bytes(parameters * (4 + (s.int8_moments ? 2 * (1 + 4.0 / 256) : 8)));
  if (s.recompute) {
    m.activations = bytes(layers * between);
    m.passing = bytes(std::max({head, last, of_layers + 1.25 * in_layer}));
  } else {
    m.activations = bytes(layers * in_layer);
    m.passing = bytes(head);
    const double kept_at_last = std::max(last, of_layers + in_layer);
    if (kept_at_last > layers * in_layer + head) m.passing = bytes(kept_at_last - layers * in_layer);
  }
  return m;
}

}  // namespace echoline::model
