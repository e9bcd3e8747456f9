// Subcommands of `echoline model` that run a model; model.cpp has the others. Private to cli/.
#pragma once
#include "cli/verb.hpp"

namespace echoline::cli {

void add_model_use(Verb& verb, int& exit_code);

}  // namespace echoline::cli
