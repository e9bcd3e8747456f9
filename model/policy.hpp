// Lays out, initialises, checks and saves policies of a given shape, with Hugging Face's tensor names and directories.
// Without libtorch.
#pragma once
#include <filesystem>

#include "base/units.hpp"
#include "delta/tensor.hpp"
#include "model/model_files.hpp"

namespace echoline::model {

// Names, types (bf16) and shapes of the policy of `config`, with its adapter's, canonical; the views have no bytes.
// kInvalid for a model that this program only carries, because its policies may have any tensors, and for an adapter of
// other layers than the decoder's.
Result<delta::StateView> policy_layout(const ModelConfig& config);

// An initial policy: every matrix normal(0, initializer_range), every norm 1, every bias 0, rounded to bf16;
// the adapter as init_adapter(). Equal seeds give equal numbers on every machine. kInvalid for an impossible shape.
Result<delta::OwnedState> init_policy(const ModelConfig& config, std::uint64_t seed);

// Checks that the folder has weights (bf16 or fp32) of this shape: names, shapes and types of every shard, without
// reading the values. Carried weights only need to be complete files. kNotFound or kInvalid name the file or tensor.
Status check_weights(const std::filesystem::path& folder, const ModelConfig& config);

// Converts a state of this shape, bf16 or fp32, to a policy in bf16 (rounded to nearest, ties to even). Leaves out a
// lm_head.weight that repeats a tied embedding. Copies a carried state as it is. kInvalid as check_weights(), or if a
// value is not finite; kExhausted if memory does not suffice.
Result<delta::OwnedState> policy_of(const delta::StateView& state, const ModelConfig& config);

// Writes a directory for load_model(), transformers and vLLM: the policy in bf16, in shards of at most
// `shard_bytes_max`. An adapter is in adapter_model.safetensors and adapter_config.json, for PEFT.
Status save_model(const std::filesystem::path& folder, const ModelFiles& files, const delta::StateView& policy,
                  Bytes shard_bytes_max = {5'000'000'000});

}  // namespace echoline::model
