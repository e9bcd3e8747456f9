// Whether a task's problems are what they have to be. Private to data_plane/.
#pragma once
#include <vector>

#include "data_plane/adapters/check/findings.hpp"

namespace echoline::data_plane {

// The first training problems, looked at, and asked for again: of `again` as well, a second start with the same seed,
// where there is one.
std::vector<Problem> check_problems(Findings& found, const CheckOptions& options, const Adapter& adapter,
                                    const Adapter* again);
void check_held_out(Findings& found, const CheckOptions& options, const Clock& clock, const Adapter& adapter,
                    const Adapter* again);

}  // namespace echoline::data_plane
