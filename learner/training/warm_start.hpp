// Supervised warm start of a small model on an adapter's demonstrations, until its responses differ enough within a
// group for RL. Uses training problems only, never the evaluation set.
#pragma once
#include <cstdint>
#include <functional>

#include "base/result.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "learner/training/optimizer.hpp"
#include "model/phrasing.hpp"
#include "model/transformer.hpp"

namespace echoline::learner {

struct WarmStartConfig {
  OptimizerConfig optimizer;
  std::int64_t steps_max = 2000;
  std::int64_t batch_problems = 256;  // demonstrations per step
  double target_accuracy = 0.4;       // greedy, on the probe; reaching it ends the warm start
  std::int64_t probe_every = 20;      // steps from one evaluation on the probe to the next
  std::int64_t probe_problems = 256;  // the probe: that many training problems, the first ones
  std::int64_t response_tokens_max = 64;
  std::int64_t microbatch_tokens = 8192;  // in one forward and backward pass; bounds memory
};

// kInvalid with the name and the value of the first setting out of range.
Status validate(const WarmStartConfig& config);

struct WarmStartProgress {
  std::int64_t steps = 0;
  double loss = 0;      // mean cross-entropy of the last step, nats per response token
  double accuracy = 0;  // greedy, on the probe
};

struct WarmStartReport {
  std::int64_t steps = 0;
  double accuracy = 0;  // at the last probe
  bool reached_target = false;
};

// Trains `model` in place by cross-entropy on the response and its ending token. Afterwards the model holds bf16
// values, as after every learner step. The probe is training problems 0 .. probe_problems - 1; the demonstrations are
// the next ones. `progress` (may be empty) is called after every probe; if it returns false, the warm start ends with
// kCancelled. kInvalid for settings out of range, or an adapter without demonstrations.
Result<WarmStartReport> warm_start(model::Transformer& model, const model::Phrasing& phrasing,
                                   const data_plane::Adapter& adapter, const WarmStartConfig& config,
                                   const std::function<bool(const WarmStartProgress&)>& progress = {});

}  // namespace echoline::learner
