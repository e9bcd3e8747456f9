// The built-in trainer as a source of policies, for those who know no tensor.
#pragma once
#include <memory>

#include "learner/policy_source.hpp"

namespace echoline::learner {

// What a run asks of the built-in trainer.
BuiltIn built_in();

}  // namespace echoline::learner
