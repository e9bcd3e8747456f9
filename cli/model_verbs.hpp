// The subverbs of `echoline model` that use a model; model.cpp has the others. Private to cli/.
#pragma once
#include <CLI/CLI.hpp>

namespace echoline::cli {

void add_model_use(CLI::App& verb, int& exit);

}  // namespace echoline::cli
