// echoline sim soak: simulates many random fleets with random faults and checks the invariants of each.
#pragma once
#include "cli/verb.hpp"

namespace echoline::cli {

void add_sim_soak(Verb& sim, int& exit_code);

}  // namespace echoline::cli
