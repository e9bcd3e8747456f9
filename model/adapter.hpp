// Low-rank adapters (LoRA) of a policy, with the tensor names and the adapter_config.json of PEFT. Without libtorch.
//
// An adapter adds two matrices to each target weight W [out, in]: A [rank, in] and B [out, rank]. The layer then
// computes W x + alpha / rank * B (A x). A policy with an adapter is one list of tensors: the base's under their usual
// names, and the adapter's, whose names all begin with kAdapterPrefix:
//
//   model.layers.0.self_attn.q_proj.weight                           [out, in]
//   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, in]
//   base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, rank]
// Source: Hu et al. 2021, arXiv:2106.09685.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "delta/tensor.hpp"

namespace echoline::model {

inline constexpr std::string_view kAdapterPrefix = "base_model.model.";
inline constexpr const char* kAdapterConfigFile = "adapter_config.json";
inline constexpr std::int64_t kAdapterRankMax = 4096;

// The shape of an adapter, and the settings of the run file's section `learner.adapter`.
struct AdapterConfig {
  std::int64_t rank = 0;  // 0: no adapter
  double alpha = 0;
  // The adapted layers, sorted: the last parts of their names, such as q_proj or self_attn.q_proj.
  std::vector<std::string> targets = {"down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"};
  std::string base_model;  // PEFT's base_model_name_or_path: a directory of the base, or empty

  // The factor of B (A x).
  double scale() const { return alpha / static_cast<double>(rank); }
  // Whether both have the same rank, alpha and targets.
  bool computes_as(const AdapterConfig& other) const {
    return rank == other.rank && alpha == other.alpha && targets == other.targets;
  }
  friend bool operator==(const AdapterConfig&, const AdapterConfig&) = default;

  // Parses PEFT's adapter_config.json. kInvalid names the field: a missing or invalid rank, alpha or list of targets,
  // or one of PEFT's features that is not implemented.
  static Result<AdapterConfig> from_json(std::string_view text);
  // The text of an adapter_config.json for PEFT and vLLM.
  std::string to_json() const;
  // kInvalid if a rank, an alpha or a target is out of range.
  Status validate() const;
};

inline bool is_adapter_tensor(std::string_view name) { return name.starts_with(kAdapterPrefix); }

// Names and shapes of the adapter's tensors for this base, sorted by name, in bf16, without bytes. A target adapts
// every matrix of the base that is called X.TARGET.weight. kInvalid names a target without a matrix, and lists possible
// ones.
Result<delta::StateView> adapter_layout(const delta::StateView& base, const AdapterConfig& adapter);

// An initial adapter, as PEFT makes it: A uniform in ±1/√in, and B zero, so that the policy's outputs do not change
// yet. Equal seeds give equal numbers on every machine. Errors of adapter_layout(), and kExhausted if memory is short.
Result<delta::OwnedState> init_adapter(const delta::StateView& base, const AdapterConfig& adapter, std::uint64_t seed);

// The two parts of a policy, each in the policy's order. Their bytes are views of the policy's memory.
struct SplitPolicy {
  delta::StateView base, adapter;
};
SplitPolicy split_adapter(const delta::StateView& state);

// The policy that consists of both parts, sorted by delta::canonical(). kInvalid if the names or shapes of the
// adapter's tensors differ from adapter_layout(), or the base itself has adapter tensors.
Result<delta::StateView> join_adapter(const delta::StateView& base, const delta::StateView& adapter,
                                      const AdapterConfig& config);

// The base with each adapted weight W replaced by W + alpha / rank * B A, computed in fp32 and rounded to the
// weight's type (bf16 or fp32; kInvalid for another). Because of the rounding, the merged model's outputs differ
// slightly from the policy's. kExhausted if memory is short.
Result<delta::OwnedState> merge_adapter(const delta::StateView& policy, const AdapterConfig& config);

}  // namespace echoline::model
