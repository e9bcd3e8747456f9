// AdamW on fp32 master weights behind a bf16 policy.
//
// The model's parameters always hold bf16 values (stored as fp32 if the device computes in fp32), and gradients are
// taken at these values. Masters and moments are fp32, so updates far below a bf16 step add up until the policy's value
// changes.
//
//   g ← g · min(1, c/‖g‖)             clipping by the global norm; c = gradient_norm_max
//   m ← β1·m + (1−β1)·g,  v ← β2·v + (1−β2)·g²
//
//   W ← W − η_n·( m/(1−β1ⁿ) / (√(v/(1−β2ⁿ)) + ε) + λ·W )
//   parameter ← round_bf16(W)         to nearest, ties to even
//
// W is the master of a parameter, and n the number of the update. The weight decay λ applies only to matrices (two or
// more dimensions). The learning rate η_n rises linearly during the warm-up. Then it is constant, or decays linearly or
// along a cosine to the configured fraction of its peak.
// Source: Loshchilov and Hutter 2019.
//
// Moments may be kept in 8 bits, in blocks of 256 values (after Dettmers et al. 2022, arXiv:2110.02861). With s the
// largest magnitude of the block, m is stored as √(|m|/s) in 127 steps with its sign, and v as (v/s)^¼ in 255. The
// rounding threshold changes with every update, so that changes below one code step still take effect on average.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "learner/training_config.hpp"
#include "model/cuda/training_device.hpp"
#include "model/torch.hpp"

namespace echoline::learner {

using NamedParameters = std::vector<std::pair<std::string, torch::Tensor>>;

struct UpdateReport {
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  bool applied = false;  // false if a gradient was not finite: the gradients were cleared, and nothing else changed
};

// One thread. Shares the parameter tensors with the model.
class AdamW {
 public:
  struct Slot {
    std::string name;
    torch::Tensor parameter;         // the model's; bf16 values
    torch::Tensor master;            // fp32, same shape
    torch::Tensor moment1, moment2;  // fp32, same shape; or int8 and uint8 codes
    torch::Tensor scale1, scale2;    // fp32, of each block of codes; undefined for fp32 moments

    // fp32 sum of the gradients taken by gather_gradients(). It is kept between steps: allocating it at every step
    // would fragment the device's memory. Undefined for fp32 parameters, which add up gradients themselves.
    torch::Tensor gradient;
    bool has_gathered = false;  // whether `gradient` has counted a gradient since the last update
  };

  // Masters start as the parameters' values; the parameters are then rounded to bf16.
  AdamW(const NamedParameters& parameters, const OptimizerConfig& config);

  // Moves the gradients of bf16 parameters into fp32 sums. Call it after the backward pass of every micro-batch: such a
  // parameter adds up its gradient in bf16, where the hundredth addend no longer counts. fp32 parameters are
  // unaffected.
  void gather_gradients();
  // One update from all gathered gradients and those that parameters hold; clears both. A parameter without a gradient
  // counts as zero.
  UpdateReport step();
  void clear_gradients();

  // For checkpoints: the slots in a fixed order. After writing masters, call round_parameters().
  std::vector<Slot>& slots() { return slots_; }
  const std::vector<Slot>& slots() const { return slots_; }
  void round_parameters();  // sets the parameters to the masters' values, rounded to bf16
  // Starts another phase of training: masters take the parameters' current values, and the moments start at zero.
  void reset(const OptimizerConfig& config);

  // Other rates and limits from the next update on. The storage of moments must stay.
  void set_config(const OptimizerConfig& config) { config_ = config; }

  std::int64_t updates() const { return updates_; }
  void set_updates(std::int64_t updates) { updates_ = updates; }
  const OptimizerConfig& config() const { return config_; }

 private:
  double learning_rate() const;  // of the next update
  // Whether an update is one kernel (model/cuda/training_device): masters are on a GPU, and this program has the
  // kernel.
  bool is_fused() const;
  std::vector<model::training::TensorUpdate> fused_updates(const std::vector<torch::Tensor>& gradients) const;
  double gradient_norm(const std::vector<torch::Tensor>& gradients) const;
  void update(Slot& slot, const torch::Tensor& gradient, double clip_factor, double rate);
  void update_fused(const std::vector<torch::Tensor>& gradients, double clip_factor, double rate);
  OptimizerConfig config_;
  std::vector<Slot> slots_;
  std::int64_t updates_ = 0;
};

}  // namespace echoline::learner
