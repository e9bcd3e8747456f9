// Gradients of models in which some parameters may have none.
#pragma once
#include <string>

#include "model/torch.hpp"

namespace echoline::model {

// A copy of the gradient; zeros if there is none, as of an expert that no token used.
inline torch::Tensor gradient_of(const torch::Tensor& parameter) {
  return parameter.grad().defined() ? parameter.grad().clone() : torch::zeros_like(parameter);
}
inline bool may_be_unused(const std::string& name) { return name.find(".experts.") != std::string::npos; }

}  // namespace echoline::model
