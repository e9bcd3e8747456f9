// The built-in trainer as a policy source, for code without libtorch.
#pragma once
#include <memory>

#include "learner/policy_source.hpp"

namespace echoline::learner {

// The built-in trainer's functions for a run.
BuiltIn built_in();

}  // namespace echoline::learner
