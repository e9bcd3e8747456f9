// What training a model takes of memory, counted from what the transformer keeps for its gradients. Free of libtorch.
#pragma once
#include <cstdint>

#include "base/units.hpp"
#include "model/config.hpp"

namespace echoline::model {

struct TrainingShape {
  bool bf16 = false;          // weights and activations; otherwise fp32
  bool int8_moments = false;  // of AdamW
  bool reference = false;     // a second, frozen policy
  bool recompute = false;     // layers
  std::int64_t microbatch_tokens = 8192;
  std::int64_t sequence_tokens = 1024;  // of the longest prompt and response together
  // Where it is; the sizes are the same.
  bool on_device = false, optimizer_on_host = false;
};

struct TrainingMemory {
  Bytes weights;      // and those of a reference policy
  Bytes gradients;    // summed over micro-batches
  Bytes optimizer;    // masters and moments
  Bytes activations;  // kept for the gradient, of one micro-batch
  Bytes passing;      // logits, gradients on their way: what else is there at the worst moment
  Bytes program;      // this program and its libraries, and what the allocator keeps between tensors
  Bytes tensors() const { return weights + gradients + optimizer + activations + passing; }
  Bytes total() const { return tensors() + program; }
};

// The most at any moment of a learner step of several micro-batches.
TrainingMemory training_memory(const ModelConfig& config, const TrainingShape& shape);

}  // namespace echoline::model
