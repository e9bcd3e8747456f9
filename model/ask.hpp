// Loads a model from its folder and generates or scores with it. This header does not need libtorch.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "model/generation.hpp"
#include "model/questions.hpp"

namespace echoline::model {

// Generates one response on a device, whose name device_named() knows. Errors of load_model(), device_named() and
// generate().
Result<Generation> ask(const std::filesystem::path& folder, const std::string& device, const std::vector<Token>& prompt,
                       const Sampling& sampling);

// Generates for all questions, with bf16 weights. Errors of load_model() and device_named(), and those that `on_answer`
// returns.
Status ask_all(const std::filesystem::path& folder, const Questions& questions);

// Log-probability of each token of `continuation` after `prompt`, in nats, as ask() reports it for generated tokens.
Result<std::vector<float>> score(const std::filesystem::path& folder, const std::string& device,
                                 const std::vector<Token>& prompt, const std::vector<Token>& continuation,
                                 double temperature = 1.0);

}  // namespace echoline::model
