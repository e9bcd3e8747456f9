// echoline sim: fleets that no one can rent, simulated with the protocol cores that run in production.
#include <cstdio>

#include "cli/verbs.hpp"

namespace echoline::cli {
void add_sim(CLI::App&, int&) {}
}
