// What of the program needs libtorch. with_torch.cpp has it, without_torch.cpp is there in its place with ECHOLINE_TORCH=OFF.
// Private to cli/.
#pragma once
#include <filesystem>
#include <vector>

#include "learner/policy_source.hpp"
#include "learner/preflight.hpp"
#include "model/generation.hpp"
#include "model/questions.hpp"
#include "worker/engines/make.hpp"

namespace echoline::cli {

// Empty in a program without them.
learner::BuiltIn built_in_trainer();
decltype(worker::EngineOptions::builtin) built_in_engine();

// Of a model's folder; kInvalid in a program without libtorch.
Result<model::Generation> ask(const std::filesystem::path& folder, const std::vector<model::Token>& prompt,
                              const model::Sampling& sampling);
Status ask_all(const std::filesystem::path& folder, const model::Questions& questions);
Result<std::vector<float>> score(const std::filesystem::path& folder, const std::vector<model::Token>& prompt,
                                 const std::vector<model::Token>& continuation, double temperature);

// What `doctor` says of it.
learner::Check check_torch();

}  // namespace echoline::cli
