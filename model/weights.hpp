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

// The weights rounded to bf16 (nearest, ties to even), in canonical order and sealed (delta::OwnedState).
Result<delta::OwnedState> export_policy(const Transformer& model);
// As above, into an existing state of policy_layout(), whose tensors are sealed again afterwards.
Status export_policy(const Transformer& model, delta::OwnedState& target);

// For a model whose base is frozen (Transformer::freeze_base()): the base's tensors of its policies, made once. Weights
// in bf16 on a CPU are not copied.
Result<delta::SharedState> export_base(std::shared_ptr<const Transformer> model);
// As export_policy(), for such a model: only the adapter's tensors are new, the others are the memory of `base`.
Result<delta::OwnedState> export_policy(const Transformer& model, const delta::SharedState& base);

// Sets the adapter's weights to the values of init_adapter() in model/adapter.
Status init_adapter(Transformer& model, std::uint64_t seed);

// Copies a state (bf16 or fp32) into the weights in place, all or nothing: kInvalid names a tensor that is missing,
// unknown, or of another shape or type, and the model is then unchanged. fp32 weights hold bf16 values exactly. A tied
// model accepts a lm_head.weight that repeats the embedding.
Status load_policy(Transformer& model, const delta::StateView& state);

// As above, for a model that holds the state before the delta from which `written` comes (delta::IncomingDelta). Copies
// only the changes, and needs 10 bytes per changed element of one part at a time.
Status load_changes(Transformer& model, const delta::StateView& state, std::span<const delta::TensorWrite> written);

// With the values of init_policy().
Result<std::shared_ptr<Transformer>> init(const ModelConfig& config, std::uint64_t seed,
                                          torch::Device device = torch::kCPU,
                                          std::optional<torch::ScalarType> dtype = std::nullopt);

// The content of a Hugging Face directory.
struct LoadedModel {
  std::shared_ptr<Transformer> transformer;
  ModelFiles files;
};

// Reads ModelFiles and model.safetensors or its shards. kNotFound or kInvalid name the file, tensor or field.
// The weights' type is compute_dtype(device) unless given.
Result<LoadedModel> load_model(const std::filesystem::path& folder, torch::Device device = torch::kCPU,
                               std::optional<torch::ScalarType> dtype = std::nullopt);

}  // namespace echoline::model
