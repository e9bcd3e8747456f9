// A model's folder, loaded to hear what it says; for those who know no tensor.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "model/generation.hpp"
#include "model/questions.hpp"

namespace echoline::model {

// On the device of that name (device_named()). Errors of load_model(), device_named() and generate().
Result<Generation> ask(const std::filesystem::path& folder, const std::string& device, const std::vector<Token>& prompt,
                       const Sampling& sampling);

// Asks them all. Errors of load_model() and device_named(), and what `hear` says.
Status ask_all(const std::filesystem::path& folder, const Questions& questions);

// Log-probability of each token of `continuation` after `prompt`, as ask() gives it for tokens it has drawn; nats.
Result<std::vector<float>> score(const std::filesystem::path& folder, const std::string& device,
                                 const std::vector<Token>& prompt, const std::vector<Token>& continuation,
                                 double temperature = 1.0);

}  // namespace echoline::model
