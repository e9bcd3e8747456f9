// echoline sim run: simulates a whole training run.
#pragma once
#include "cli/verb.hpp"

namespace echoline::cli {

void add_sim_run(Verb& sim, int& exit_code);

}  // namespace echoline::cli
