// The feed-forward part of a mixture layer: a router chooses experts for each token, and the token's output is the
// weighted sum of their outputs. By libtorch's operations, with gradients, on any device. model/cpu_pass has the same
// arithmetic without gradients. Private to model/.
#pragma once
#include "model/layer.hpp"

namespace echoline::model {

// Returns the output of a mixture layer [rows, hidden] for x [rows, hidden]. `given` is int64 [rows, experts per token]
// with the experts to use, ascending; a row of -1 lets the router choose, and so does an undefined `given`. `used`
// receives the experts used, ascending, in the same shape.
//
// The weights of the experts come from the router's scores in any case, so that the router is trained also with given
// experts.
torch::Tensor mix_experts(const ExpertsConfig& config, const Transformer::Layer& layer, const torch::Tensor& x,
                          const torch::Tensor& given, torch::Tensor& used);

// Chooses the experts with the highest of `scores`, which has a value for each expert, and writes them to `chosen` in
// ascending order. If scores are equal, the lower expert is chosen.
void choose_experts(std::span<const float> scores, std::span<std::int64_t> chosen);

}  // namespace echoline::model
