// echoline sim run: a whole training run, simulated.
#pragma once
#include "cli/verb.hpp"

namespace echoline::cli {

void add_sim_run(Verb& sim, int& exit);

}  // namespace echoline::cli
