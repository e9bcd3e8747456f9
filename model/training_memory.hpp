// Estimates the memory for training a model, from the tensors that a learner step keeps. This header does not need
// libtorch.
#pragma once
#include <cstdint>

#include "base/units.hpp"
#include "model/config.hpp"

namespace echoline::model {

struct TrainingShape {
  bool bf16 = false;          // weights and activations; otherwise fp32
  bool int8_moments = false;  // AdamW's moments have 8 bits
  bool reference = false;     // a second, frozen policy is in memory
  bool recompute = false;     // the backward pass computes each layer again
  std::int64_t microbatch_tokens = 8192;
  std::int64_t sequence_tokens = 1024;  // longest prompt and response together
  bool on_device = false;               // trains on a GPU; otherwise on a CPU
  bool optimizer_on_host = false;       // masters and moments are in the host's memory; their sizes are the same
};

struct TrainingMemory {
  Bytes weights;      // including a reference policy's
  Bytes gradients;    // summed over micro-batches
  Bytes optimizer;    // masters and moments
  Bytes activations;  // of one micro-batch, kept for the gradient
  Bytes transient;    // logits, and gradients before they are summed: the most at any moment
  Bytes program;      // this program with its libraries and the allocator's cache
  Bytes tensors() const { return weights + gradients + optimizer + activations + transient; }
  Bytes total() const { return tensors() + program; }
};

// The most memory at any moment of a learner step with several micro-batches.
TrainingMemory training_memory(const ModelConfig& config, const TrainingShape& shape);

}  // namespace echoline::model
