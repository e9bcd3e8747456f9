// echoline sim soak: many random fleets in random trouble, each checked for what must always hold.
#pragma once
#include "cli/verb.hpp"

namespace echoline::cli {

// Adds the verb to `sim`; its callback leaves the exit code in `exit`.
void add_sim_soak(Verb& sim, int& exit);

}  // namespace echoline::cli
