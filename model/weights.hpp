// Copies weights into and out of a Transformer: policy states for broadcast, and Hugging Face model directories.
#pragma once
#include <filesystem>
#include <memory>

#include "delta/patch.hpp"
#include "delta/tensor.hpp"
#include "model/model_files.hpp"
#include "model/policy.hpp"
#include "model/transformer.hpp"

namespace echoline::model {

// A copy of the weights, rounded to bf16 (nearest, ties to even), in canonical order and sealed (delta::OwnedState).
Result<delta::OwnedState> export_policy(const Transformer& model);
// Copies the weights into an existing state of policy_layout(), and seals it again.
Status export_policy(const Transformer& model, delta::OwnedState& target);

// The base's tensors of a model whose base is frozen (Transformer::freeze_base()), which all its policies share. bf16
// weights on a CPU are not copied: the result refers to the model's memory.
Result<delta::SharedState> export_base(std::shared_ptr<const Transformer> model);
// A policy of such a model: the adapter's tensors are copied, the others refer to the memory of `base`.
Result<delta::OwnedState> export_policy(const Transformer& model, const delta::SharedState& base);

// Sets the adapter's weights to the values of init_adapter() in model/adapter.
Status init_adapter(Transformer& model, std::uint64_t seed);

// Copies a state (bf16 or fp32) into the weights in place. kInvalid names a tensor that is missing, unknown, or of
// another shape or type; the model is then unchanged. fp32 weights hold bf16 values exactly. A model with tied
// embeddings accepts a lm_head.weight that repeats the embedding.
Status load_policy(Transformer& model, const delta::StateView& state);

// Copies only the changes of a delta: `written` (from delta::IncomingDelta). `state` is the state after the delta; the
// model must hold the state before it. Needs memory of 10 bytes (index and value) per changed element, for one part of
// the changes at a time.
Status load_changes(Transformer& model, const delta::StateView& state, std::span<const delta::TensorWrite> written);

// A new model with the initial values of init_policy().
Result<std::shared_ptr<Transformer>> init(const ModelConfig& config, std::uint64_t seed,
                                          torch::Device device = torch::kCPU,
                                          std::optional<torch::ScalarType> dtype = std::nullopt);

// The content of a Hugging Face directory.
struct LoadedModel {
  std::shared_ptr<Transformer> transformer;
  ModelFiles files;
};

// Reads ModelFiles and model.safetensors or its shards. kNotFound or kInvalid name the file, tensor or field.
// The weights' type is default_weight_dtype(device) unless given.
Result<LoadedModel> load_model(const std::filesystem::path& folder, torch::Device device = torch::kCPU,
                               std::optional<torch::ScalarType> dtype = std::nullopt);

}  // namespace echoline::model
