// Reads the experts that an inference server tells in its answers. Private to worker/engines/.
#pragma once
#include <string_view>

#include "base/result.hpp"
#include "data_plane/routed_experts.hpp"
#include "model/config.hpp"

namespace echoline::worker {

// Parses an array of numpy, a file of format .npy in base64: [tokens, layers, experts per token], of type uint8,
// uint16, int16 or int32. If a token's experts in a layer are not all different and at least 0, all of them become -1
// (unknown): vLLM sends equal numbers for layers without experts, and -1 for tokens that it did not compute. kCorrupt
// for any other text.
Result<data_plane::RoutedExperts> parse_expert_rows(std::string_view base64);

// Leaves only the mixture layers of a model that this program can compute, if the server tells experts of all layers.
// No experts remain if their shape is not the model's.
void keep_mixture_layers(const model::ModelConfig& model, data_plane::RoutedExperts& experts);

}  // namespace echoline::worker
