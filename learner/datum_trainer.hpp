// Training on a client's own examples: the interface between the loop of a Tinker run, which uses no tensors, and the
// built-in trainer.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "base/result.hpp"

namespace echoline::learner {

// With p the policy in training, q the policy that sampled, A the advantage and r = p/q, per token:
//   cross_entropy        -w·log p
//   importance_sampling  -r·A
//   ppo                  -min(r·A, clip(r)·A)
//   cispo                -clip(r)·A·log p, without a gradient through clip(r)
// Losses are sums over all tokens of a request, as Tinker defines them.
enum class DatumLoss { kCrossEntropy, kImportanceSampling, kPpo, kCispo };

// One example. The policy reads `input`, and predicts targets[i] after input[0 .. i].
struct Datum {
  std::vector<std::int64_t> input;
  std::vector<std::int64_t> targets;  // as many as `input`, as are the values below
  std::vector<float> weights;         // w; only for cross_entropy
  std::vector<float> logprobs;        // log q; these two only for the other losses
  std::vector<float> advantages;
};

struct DatumBatch {
  DatumLoss loss = DatumLoss::kCrossEntropy;
  double ratio_min = 0.8, ratio_max = 1.2;  // bounds of clip()
  bool forward_only = false;                // computes the loss without a gradient
  std::vector<Datum> data;
};

struct DatumResult {
  std::vector<std::vector<float>> logprobs;  // log p of each target, by example
  double loss_sum = 0;
};

// Settings of one Adam update.
struct AdamSettings {
  double learning_rate = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-12;
  double weight_decay = 0;
  double gradient_norm_max = 0;  // 0: gradients are not clipped
};

struct AdamReport {
  double gradient_norm = 0;  // before clipping
  bool applied = false;      // false: a gradient was not finite, and nothing changed
};

// One thread, the service's. A change of weights that is no update still counts as a learner step, because every
// version has weights of its own.
class DatumTrainer {
 public:
  virtual ~DatumTrainer() = default;
  // Adds the gradient of the batch to that of earlier batches. kInvalid: an example is longer than the model's
  // positions, or a token is outside the vocabulary.
  virtual Result<DatumResult> forward_backward(const DatumBatch& batch) = 0;
  // One update with the gradients since the last one. This is the next learner step, unless it was not applied.
  virtual Result<AdamReport> optim_step(const AdamSettings& settings) = 0;
  // Starts again from an untrained adapter. `seed`: of its numbers; absent: the run's.
  virtual Status begin_adapter(std::optional<std::uint64_t> seed) = 0;
  // Writes weights and optimizer to `folder`, which then holds nothing else.
  virtual Status save_state(const std::filesystem::path& folder) = 0;
  // Loads what save_state() wrote; without `optimizer`, its moments start at zero.
  virtual Status load_state(const std::filesystem::path& folder, bool optimizer) = 0;
};

}  // namespace echoline::learner
