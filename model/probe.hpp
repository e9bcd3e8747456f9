// Whether a policy can be generated with, found out by running it. Free of libtorch.
#pragma once
#include "delta/tensor.hpp"
#include "model/config.hpp"

namespace echoline::model {

// Runs the policy (bf16, policy_layout()) on a few tokens of the vocabulary. kInvalid if a log-probability at
// `temperature` is not finite, kExhausted if memory ends. Most weights are used where they are; those of queries, keys
// and values are copied, and one layer is widened to fp32 at a time.
Status probe_policy(const delta::StateView& policy, const ModelConfig& config, double temperature, int threads);

}  // namespace echoline::model
