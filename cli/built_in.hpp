// The parts of the program that need libtorch: the built-in trainer and engine. with_torch.cpp loads the module that
// contains them (torch_module.hpp) at the first call. A build with ECHOLINE_TORCH=OFF uses without_torch.cpp instead.
// Private to cli/.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "learner/policy_source.hpp"
#include "learner/preflight.hpp"
#include "model/generation.hpp"
#include "model/questions.hpp"
#include "worker/engines/make.hpp"

namespace echoline::cli {

using BuiltInEngine = decltype(worker::EngineOptions::builtin_maker);

// Both are empty with ECHOLINE_TORCH=OFF. The trainer's functions load the module at their first call and fail with
// kInvalid if that fails; built_in_engine() loads it at once.
learner::BuiltIn built_in_trainer();
Result<BuiltInEngine> built_in_engine();

// Loads the module and returns its file; absent with ECHOLINE_TORCH=OFF.
Result<std::optional<std::filesystem::path>> open_built_in();

// These three load the model of a folder onto "cpu", "cuda" or "cuda:N". kInvalid without libtorch. `questions` has the
// callbacks that take the answers. score_continuation() returns the log-probability of each token of `continuation`.
Result<model::Generation> generate_response(const std::filesystem::path& folder, const std::string& device,
                                            const std::vector<model::Token>& prompt, const model::Sampling& sampling);
Status answer_questions(const std::filesystem::path& folder, const model::Questions& questions);
Result<std::vector<float>> score_continuation(const std::filesystem::path& folder, const std::string& device,
                                              const std::vector<model::Token>& prompt,
                                              const std::vector<model::Token>& continuation, double temperature);

// The check that `doctor` prints.
learner::Check check_torch();

}  // namespace echoline::cli
