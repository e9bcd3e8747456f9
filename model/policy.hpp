// A policy of a given shape, without libtorch: its tensors as Hugging Face names them, fresh values, directories of it.
#pragma once
#include <filesystem>

#include "base/units.hpp"
#include "delta/tensor.hpp"
#include "model/model_files.hpp"

namespace echoline::model {

// Names, types (bf16) and shapes of the policy of `config`, canonical; the views hold no bytes.
Result<delta::StateView> policy_layout(const ModelConfig& config);

// A fresh policy: every matrix normal(0, initializer_range), every norm 1, every bias 0, rounded to bf16; the same
// numbers for the same seed on every machine. kInvalid for an impossible shape.
Result<delta::OwnedState> init_policy(const ModelConfig& config, std::uint64_t seed);

// Whether the folder holds weights (bf16 or fp32) of this shape: names, shapes and types of every shard, without
// reading the values. kNotFound or kInvalid name the file or tensor.
Status check_weights(const std::filesystem::path& folder, const ModelConfig& config);

// The policy in a state of this shape, bf16 or fp32 (rounded to the nearest, ties to even). A lm_head.weight that
// repeats a tied embedding is left out. kInvalid as above; kExhausted.
Result<delta::OwnedState> policy_of(const delta::StateView& state, const ModelConfig& config);

// Writes a directory that load_model(), transformers and vLLM read: the policy in bf16, in shards of at most
// `shard_bytes_max`.
Status save_model(const std::filesystem::path& folder, const ModelFiles& files, const delta::StateView& policy,
                  Bytes shard_bytes_max = {5'000'000'000});

}  // namespace echoline::model
