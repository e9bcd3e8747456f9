// What a run file says of its task, or of several. Private to learner/.
#pragma once
#include "base/config.hpp"
#include "learner/run_config.hpp"

namespace echoline::learner {

// The sections `task` and `tasks` of the file.
void read_tasks(ConfigSection root, TaskSection& task);

}  // namespace echoline::learner
