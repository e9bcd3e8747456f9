// Joins adapters (LoRA) that a trainer publishes with the run's base, which the trainer does not send again.
#pragma once
#include <string_view>

#include "base/result.hpp"
#include "delta/tensor.hpp"
#include "model/adapter.hpp"

namespace echoline::learner {

// kInvalid if PEFT's adapter_config.json describes another adapter than the run's, or one of PEFT's features that is
// not implemented.
Status check_adapter_config(std::string_view peft_json, const model::AdapterConfig& run_adapter);

// The policy of `base` and a published adapter, in bf16; it shares the memory of `base`. `published`: the adapter's
// tensors, bf16 or fp32, under PEFT's names with or without ".default", or the whole policy of the trainer. kInvalid
// names a tensor that is missing or unknown, has another shape or type or a value that is not finite, or differs from
// that of `base`.
Result<delta::OwnedState> join_published(const delta::SharedState& base, delta::StateView published,
                                         const model::AdapterConfig& run_adapter);

}  // namespace echoline::learner
