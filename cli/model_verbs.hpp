// Parts of `echoline model` outside of model.cpp. Private to cli/.
#pragma once
#include <filesystem>

#include "cli/verb.hpp"
#include "model/config.hpp"

namespace echoline::cli {

// The subcommands that run a model.
void add_model_use(Verb& verb, int& exit_code);

// Prints what a directory of Family::kCarried holds, and why this program cannot compute it. Returns the exit code.
int print_carried_model(const model::ModelConfig& config, const std::filesystem::path& folder, bool as_json);

}  // namespace echoline::cli
