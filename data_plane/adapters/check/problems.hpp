// Checks that a task's problems are well-formed and repeatable. Private to data_plane/.
#pragma once
#include <vector>

#include "data_plane/adapters/check/findings.hpp"

namespace echoline::data_plane {

// Checks the first training problems and asks for them a second time. If `again`, a second instance with the same seed,
// is not null, asks it too.
std::vector<Problem> check_problems(Findings& found, const CheckOptions& options, const Adapter& adapter,
                                    const Adapter* again);
void check_held_out(Findings& found, const CheckOptions& options, const Clock& clock, const Adapter& adapter,
                    const Adapter* again);

}  // namespace echoline::data_plane
