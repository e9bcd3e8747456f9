// The table of functions that the program loads from its libtorch module, behind one C symbol. Private to cli/.
#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "learner/policy_source.hpp"
#include "learner/preflight.hpp"
#include "model/generation.hpp"
#include "model/questions.hpp"
#include "worker/engines/builtin.hpp"

namespace echoline::cli {

// The module is linked without the program's libraries. It uses the classes and functions of the program that loads it,
// so both must come from one build.
struct TorchModule {
  const char* version;
  learner::BuiltIn (*built_in)();
  Result<std::unique_ptr<worker::Engine>> (*make_engine)(const worker::BuiltinOptions& options);
  Result<model::Generation> (*ask)(const std::filesystem::path& folder, const std::string& device,
                                   const std::vector<model::Token>& prompt, const model::Sampling& sampling);
  Status (*ask_all)(const std::filesystem::path& folder, const model::Questions& questions);
  Result<std::vector<float>> (*score)(const std::filesystem::path& folder, const std::string& device,
                                      const std::vector<model::Token>& prompt,
                                      const std::vector<model::Token>& continuation, double temperature);
  learner::Check (*check)();
};

// Name of the C function that returns the table: const TorchModule* echoline_torch_module().
inline constexpr const char* kTorchModuleEntry = "echoline_torch_module";

}  // namespace echoline::cli
