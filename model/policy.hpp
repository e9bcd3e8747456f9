// Lays out, initialises, checks and saves policies of a given shape, with Hugging Face's tensor names and directories.
// Without libtorch.
#pragma once
#include <filesystem>
#include <memory>

#include "base/units.hpp"
#include "delta/tensor.hpp"
#include "model/model_files.hpp"

namespace echoline::model {

// The tensors of the policy of `config` and of its adapter: names, shapes and the type bf16, in canonical order,
// without bytes. kInvalid for a model that this program only carries, because its policies may have any tensors, and
// for an adapter with a target outside of the decoder's layers.
Result<delta::StateView> policy_layout(const ModelConfig& config);

// kInvalid, with the target and the remedy, for an adapter on a router or an expert. This program does not compute such
// an adapter, but can carry it.
Status check_adapter_computable(const ModelConfig& config);

// An initial policy in bf16: every matrix is drawn from normal(0, initializer_range), every norm is 1 and every bias 0;
// the adapter is that of init_adapter(). Equal seeds give equal numbers on every machine. kInvalid for an impossible
// shape.
Result<delta::OwnedState> init_policy(const ModelConfig& config, std::uint64_t seed);

// Checks names, shapes and types (bf16 or fp32) of the folder's weights in all shards, without reading the values. The
// weights of a carried model only need to be complete files. kNotFound or kInvalid name the file or tensor.
Status check_weights(const std::filesystem::path& folder, const ModelConfig& config);

// Converts a state of this shape, bf16 or fp32, to a policy in bf16 (rounded to nearest, ties to even). Leaves out a
// lm_head.weight that repeats a tied embedding. Copies a carried state as it is, or shares its memory if `owner` keeps
// that alive and unchanged. `allocate`: makes the memory of a copy. kInvalid as check_weights(), or if a value is not
// finite; kExhausted if memory does not suffice.
Result<delta::OwnedState> policy_of(const delta::StateView& state, const ModelConfig& config,
                                    const delta::OwnedState::Allocate& allocate = nullptr,
                                    std::shared_ptr<const void> owner = nullptr);

inline constexpr Bytes kShardBytesMax{5'000'000'000};

// Writes a directory that load_model(), transformers and vLLM can load: the policy in bf16, in shards of at most
// `shard_bytes_max`. An adapter is written to adapter_model.safetensors and adapter_config.json, for PEFT. If an
// earlier directory with the same base is named, the base's files are links to it, where the file system has them.
Status save_model(const std::filesystem::path& folder, const ModelFiles& files, const delta::StateView& policy,
                  Bytes shard_bytes_max = kShardBytesMax, const std::optional<std::filesystem::path>& same_base = {});

}  // namespace echoline::model
