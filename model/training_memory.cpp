// Implements the estimate of the memory for training. It adds up the tensors that training_ops.cpp, device_ops.cpp and
// transformer.cpp create, so it must change with them.
#include "model/training_memory.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::model {
namespace {

constexpr std::int64_t kLogitsAtOnce = std::int64_t{1} << 25;  // kLogitsMax of training_ops.cpp
constexpr double kLogitBytesAtOnce = 1 << 29;                  // kLogitBytes of device_ops.cpp
constexpr double kProgramBytes = 250e6;                        // of the program with its libraries, measured
constexpr double kUpdateValues = 1 << 20;                      // values that the optimiser updates at a time

Bytes bytes(double count) { return Bytes{static_cast<std::uint64_t>(count)}; }

}  // namespace

TrainingMemory training_memory(const ModelConfig& config, const TrainingShape& shape) {
  // With an adapter, only its weights are trained. The others have no gradients, masters and moments.
  const auto adapter = static_cast<double>(config.adapter_parameters());
  const auto weights = static_cast<double>(config.parameters()) + adapter;
  const double trained = config.adapter ? adapter : weights;
  const double element_bytes = shape.bf16 ? 2 : 4;
  // Sequences are packed, up to microbatch_tokens, or one sequence that is longer. The last token is not an input.
  const auto tokens =
      static_cast<double>(std::max(shape.microbatch_tokens, std::max<std::int64_t>(2, shape.sequence_tokens) - 1));
  const auto hidden = static_cast<double>(config.hidden_size), inner = static_cast<double>(config.intermediate_size);
  const bool has_mlp = config.mixture_layers() < config.layers;
  const auto q = static_cast<double>(config.heads * config.head_dim),
             kv = static_cast<double>(config.kv_heads * config.head_dim);
  const auto layers = static_cast<double>(config.layers), vocabulary = static_cast<double>(config.vocab_size);

  // Bytes per layer and token that are kept for the gradient. In fp32 on a CPU, the hand-written gradients need the
  // inputs and outputs of two norms, queries, keys and values before and after the rotation, the result of attention,
  // gate, up and their product. In bf16 on a CPU, libtorch also keeps fp32 copies in norms, and silu(gate). On a GPU,
  // our own kernels keep as little as in fp32 on a CPU, and in bf16 the backward pass rotates the heads again.
  // The GPU's kernels do not compute Gemma 3, nor its attention or that of windows; libtorch does.
  const bool uses_gpu_kernels = shape.on_device && !config.has_output_norms();
  const bool keeps_little = !shape.bf16 || uses_gpu_kernels,
             rotates_again = shape.bf16 && uses_gpu_kernels && !config.sliding_window;
  const double norm_value_bytes = (keeps_little ? 0 : 4) + 2 * element_bytes;  // per value of a norm's input
  // The result of an output's norm is added to x, but not kept.
  const double output_norm_bytes = config.has_output_norms() ? 2 * hidden * (norm_value_bytes - element_bytes) : 0;
  const double norm_bytes = 2 * hidden * norm_value_bytes + output_norm_bytes;
  const double rotated_bytes = keeps_little       ? (q + 2 * kv) * element_bytes
                               : config.qk_norm() ? (q + kv) * norm_value_bytes
                                                  : 0;
  // On a GPU in fp32, libtorch's attention keeps keys and values once per query head. For responses to a shared prompt,
  // it also keeps those visible to each block of 256 queries: with n blocks, (n + 1) / 2 further copies.
  const double key_copies = 1.5 + static_cast<double>(shape.sequence_tokens) / 512;
  const double kept_values = rotates_again ? q : shape.on_device ? 2 * q + 2 * kv + 2 * key_copies * q : 2 * q + 2 * kv;
  const double log_sum_bytes = static_cast<double>(config.heads) * 4;  // of the softmax's denominators, in fp32
  const double attention_bytes = kept_values * element_bytes + log_sum_bytes;
  const double kept_inner = keeps_little ? 3 : 4;
  const double dense_mlp_bytes = kept_inner * inner * element_bytes;
  double mlp_bytes = dense_mlp_bytes;
  if (config.experts) {
    // For every expert of a token: its input and output, and what an MLP keeps. The router's scores are in fp32.
    const auto expert_inner = static_cast<double>(config.experts->intermediate_size);
    const double mixture_bytes =
        static_cast<double>(config.experts->per_token) * (2 * hidden + kept_inner * expert_inner) * element_bytes +
        4 * static_cast<double>(config.experts->count);
    const double mixture_share = static_cast<double>(config.mixture_layers()) / layers;
    mlp_bytes = mixture_share * mixture_bytes + (1 - mixture_share) * dense_mlp_bytes;
  }
  const double low_rank_bytes =
      config.adapter ? static_cast<double>(config.adapter->rank * std::ssize(config.adapter->targets)) * element_bytes
                     : 0;
  const double layer_bytes = tokens * (norm_bytes + rotated_bytes + attention_bytes + mlp_bytes + low_rank_bytes);
  const double hidden_bytes = tokens * hidden * element_bytes;

  // The head (lm_head) needs the logits of a part of the rows, which on a CPU are in bf16 and again in fp32. It also
  // needs its weight's gradient, which is an fp32 sum if there are several parts.
  const double part_rows = shape.on_device
                               ? std::max(256.0, std::floor(kLogitBytesAtOnce / (element_bytes * vocabulary)))
                               : std::max(1.0, std::floor(static_cast<double>(kLogitsAtOnce) / vocabulary));
  const bool has_several_parts = tokens > part_rows;
  const double logits_at_once = std::min(tokens, part_rows) * vocabulary;
  const double embedding_values = vocabulary * hidden;
  const double trained_embedding_values = config.adapter ? 0 : embedding_values;
  const double logit_bytes = logits_at_once * (shape.on_device ? element_bytes : shape.bf16 ? 6 : 4);
  // At the end, an fp32 sum is also there in bf16: 6 bytes.
  const double logit_and_gradient_bytes =
      has_several_parts
          ? std::max(logit_bytes + 4 * trained_embedding_values, trained_embedding_values * (shape.bf16 ? 6 : 4))
          : std::max(logit_bytes, (logits_at_once + trained_embedding_values) * element_bytes);
  const double head_bytes = 3 * hidden_bytes + logit_and_gradient_bytes;
  // Responses are scored before the step, in fp32 on a CPU. The update processes a part of a tensor at a time.
  const double scoring_bytes =
      shape.on_device ? logit_bytes : 4 * logits_at_once + (shape.bf16 ? 4 * embedding_values : 0);
  const double largest_trained_values = config.adapter
                                            ? static_cast<double>(config.adapter->rank) * std::max(inner, hidden)
                                            : std::max(embedding_values, (has_mlp ? inner : 0) * hidden);
  // 38 or 14: bytes of temporary tensors per value.
  const double update_bytes =
      shape.on_device ? 0 : std::min(kUpdateValues, largest_trained_values) * (shape.int8_moments ? 38 : 14);
  // At the end of the backward pass: the embedding's gradient, with the head's if both are one tensor, and all bf16
  // gradients, which are not summed yet.
  const double last_bytes =
      (config.tie_embeddings ? 2 : 1) * trained_embedding_values * element_bytes + (shape.bf16 ? 2 * trained : 0);
  // While the backward pass is in the first layers: the bf16 gradients of the layers, and the head's gradient, which
  // waits for the embedding's if both are one tensor. Below, one layer's activations stand for its gradients in
  // computation.
  const double waiting_bytes = config.tie_embeddings ? trained_embedding_values * element_bytes : 0;
  const double layer_gradient_bytes = (shape.bf16 ? 2 * (trained - trained_embedding_values) : 0) + waiting_bytes;

  TrainingMemory memory;
  memory.weights = bytes(weights * element_bytes * (shape.reference ? 2 : 1));
  memory.gradients = bytes(4 * trained);
  // The fp32 master and two moments: in fp32, or in bytes with an fp32 scale for every 256.
  memory.optimizer = bytes(trained * (4 + (shape.int8_moments ? 2 * (1 + 4.0 / 256) : 8)));
  if (shape.recompute) {
    memory.activations = bytes(layers * hidden_bytes);
    memory.transient = bytes(std::max({head_bytes, last_bytes, layer_gradient_bytes + 1.25 * layer_bytes,
                                       scoring_bytes - layers * hidden_bytes, update_bytes - layers * hidden_bytes}));
  } else {
    // These tensors exist while there are few or no activations, so they need memory only beyond that.
    const double other_bytes = std::max({last_bytes, layer_gradient_bytes + layer_bytes, scoring_bytes, update_bytes});
    memory.activations = bytes(layers * layer_bytes);
    memory.transient = bytes(std::max(head_bytes, other_bytes - layers * layer_bytes));
  }
  memory.program = bytes(kProgramBytes);
  return memory;
}

}  // namespace echoline::model
