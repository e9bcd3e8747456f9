#include "model/training_memory.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::model {
namespace {

constexpr std::int64_t kLogits = std::int64_t{1} << 25;  // in memory at a time in training_ops.cpp
constexpr double kLogitBytes = 1 << 29;                  // in memory at a time in device_ops.cpp
constexpr double kProgram = 250e6;                       // with its libraries, measured
constexpr double kUpdated = 1 << 20;                     // values that the optimiser updates at a time

Bytes bytes(double count) { return Bytes{static_cast<std::uint64_t>(count)}; }

}  // namespace

TrainingMemory training_memory(const ModelConfig& c, const TrainingShape& s) {
  const auto parameters = static_cast<double>(c.parameters());
  const double element = s.bf16 ? 2 : 4;
  // Sequences are packed: the allowed number of tokens, or one longer sequence.
  const auto tokens =
      static_cast<double>(std::max(s.microbatch_tokens, std::max<std::int64_t>(2, s.sequence_tokens) - 1));
  const auto hidden = static_cast<double>(c.hidden_size), inner = static_cast<double>(c.intermediate_size);
  const auto q = static_cast<double>(c.heads * c.head_dim), kv = static_cast<double>(c.kv_heads * c.head_dim);
  const auto layers = static_cast<double>(c.layers), vocabulary = static_cast<double>(c.vocab_size);

  // Per layer and token. In fp32 on a CPU, the hand-written gradients need the inputs and outputs of two norms,
  // queries, keys and values before and after the rotation, the result of attention, gate, up and their product.
  // Otherwise libtorch also keeps fp32 copies in norms, and silu(gate). On a device our own kernels keep as little, and
  // in bf16 the heads are rotated again for the gradient.
  const bool lean = !s.bf16 || s.on_device, again = s.bf16 && s.on_device;
  const double norms = 2 * hidden * (lean ? 2 * element : 4 + 2 * element);
  const double rotated = lean ? (q + 2 * kv) * element : (q + kv) * (c.qk_norm() ? 8 : 0);
  // libtorch's fp32 attention keeps keys and values once per query head, and those after a shared prompt once per 256
  // queries.
  const double seen = 1.5 + static_cast<double>(s.sequence_tokens) / 512;
  const double kept = again ? q : s.on_device ? 2 * q + 2 * kv + 2 * seen * q : 2 * q + 2 * kv;
  const double attended = kept * element + static_cast<double>(c.heads) * 4;
  const double mlp = (lean ? 3 : 4) * inner * element;
  const double in_layer = tokens * (norms + rotated + attended + mlp);
  const double between = tokens * hidden * element;

  // The head: the logits of a part of the rows, on a CPU in bf16 a second time in fp32; and its weight's gradient, an
  // fp32 sum if there are several parts.
  const double part = s.on_device ? std::max(256.0, std::floor(kLogitBytes / (element * vocabulary)))
                                  : std::max(1.0, std::floor(static_cast<double>(kLogits) / vocabulary));
  const bool several = tokens > part;
  const double logits = std::min(tokens, part) * vocabulary;
  const double table = vocabulary * hidden;
  const double shown = logits * (s.on_device ? element : s.bf16 ? 6 : 4);
  const double head = 3 * between + (several ? std::max(shown + 4 * table, table * (s.bf16 ? 6 : 4))
                                             : std::max(shown, (logits + table) * element));
  // Scoring responses before the step, in fp32 on a CPU; and an update, a part of the largest tensor at a time.
  const double look = s.on_device ? shown : 4 * logits + (s.bf16 ? 4 * table : 0);
  const double update =
      s.on_device ? 0 : std::min(kUpdated, std::max(table, inner * hidden)) * (s.int8_moments ? 38 : 14);
  // The last moment: the embedding's gradient, plus the head's if both are one tensor; bf16 gradients are not summed
  // yet.
  const double last = (c.tie_embeddings ? 2 : 1) * table * element + (s.bf16 ? 2 * parameters : 0);
  // The gradients of the first layers: one layer's activations, and its gradients in transit.
  const double waiting = c.tie_embeddings ? table * element : 0;
  const double of_layers = (s.bf16 ? 2 * (parameters - table) : 0) + waiting;

  TrainingMemory m;
  m.weights = bytes(parameters * element * (s.reference ? 2 : 1));
  m.gradients = bytes(4 * parameters);
  m.optimizer = bytes(parameters * (4 + (s.int8_moments ? 2 * (1 + 4.0 / 256) : 8)));
  if (s.recompute) {
    m.activations = bytes(layers * between);
    m.transient =
        bytes(std::max({head, last, of_layers + 1.25 * in_layer, look - layers * between, update - layers * between}));
  } else {
    m.activations = bytes(layers * in_layer);
    m.transient = bytes(head);
    const double kept_at_last = std::max({last, of_layers + in_layer, look, update});
    if (kept_at_last > layers * in_layer + head) m.transient = bytes(kept_at_last - layers * in_layer);
  }
  m.program = bytes(kProgram);
  return m;
}

}  // namespace echoline::model
