// Tests a policy by running it on a short text. This header does not need libtorch.
#pragma once
#include <vector>

#include "base/result.hpp"
#include "delta/tensor.hpp"
#include "model/config.hpp"

namespace echoline::model {

// Runs the policy (bf16, policy_layout()) on probe_text(). Returns the log-probabilities (nats, temperature 1) of all
// its tokens but the first. kInvalid if a log-probability at `temperature` is not finite, kExhausted if memory runs
// out. Uses most weights in place, copies those of queries, keys and values, and widens one layer at a time to fp32.
Result<std::vector<double>> probe_policy(const delta::StateView& policy, const ModelConfig& config, double temperature,
                                         int threads);

}  // namespace echoline::model
