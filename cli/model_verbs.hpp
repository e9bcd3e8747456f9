// The subverbs of `echoline model` that use a model; model.cpp has the others. Private to cli/.
#pragma once
#include "cli/verb.hpp"

namespace echoline::cli {

void add_model_use(Verb& verb, int& exit);

}  // namespace echoline::cli
