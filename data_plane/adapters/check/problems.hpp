// Checks that a task's problems are well-formed and repeatable. Private to data_plane/.
#pragma once
#include <vector>

#include "data_plane/adapters/check/findings.hpp"

namespace echoline::data_plane {

// Checks the first training problems, asks for them a second time, and returns them. Also asks the second instance,
// which has the same seed, unless it is null.
std::vector<Problem> check_problems(Findings& findings, const CheckOptions& options, const Adapter& adapter,
                                    const Adapter* second_instance);
// Checks the held-out problems in the same way, and that no training problem is one of them.
void check_held_out(Findings& findings, const CheckOptions& options, const Clock& clock, const Adapter& adapter,
                    const Adapter* second_instance);

}  // namespace echoline::data_plane
