// Weights in and out of a Transformer: policy states for broadcast, and Hugging Face model directories.
#pragma once
#include <filesystem>
#include <memory>

#include "delta/tensor.hpp"
#include "model/model_files.hpp"
#include "model/transformer.hpp"

namespace echoline::model {

// Names, types (bf16) and shapes of the policy of `config`, canonical; the views hold no bytes.
Result<delta::StateView> policy_layout(const ModelConfig& config);

// The weights rounded to bf16 (nearest, ties to even), canonical and sealed.
Result<delta::OwnedState> export_policy(const Transformer& model);
// The same into a state of policy_layout() that already exists; its tensors are sealed again afterwards.
Status export_policy(const Transformer& model, delta::OwnedState& into);

// Copies a state (bf16 or fp32) into the weights in place. All or nothing: kInvalid names a tensor that is missing,
// unknown, or of another shape or type, and then the model is unchanged. fp32 weights take bf16 values exactly.
// A tied model accepts a lm_head.weight that repeats the embedding.
Status load_policy(Transformer& model, const delta::StateView& state);

// What a Hugging Face directory holds.
struct LoadedModel {
  std::shared_ptr<Transformer> transformer;
  ModelFiles files;
};

// Reads ModelFiles and model.safetensors or its shards. kNotFound or kInvalid name the file, tensor or field.
Result<LoadedModel> load_model(const std::filesystem::path& folder, torch::Device device = torch::kCPU);

// Writes a directory that load_model(), transformers and vLLM read: the policy in bf16, in shards of at most
// `shard_bytes_max`.
Status save_model(const std::filesystem::path& folder, const ModelFiles& files, const delta::StateView& policy,
                  Bytes shard_bytes_max = {5'000'000'000});

}  // namespace echoline::model
