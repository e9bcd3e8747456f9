// The built-in trainer as a source of policies, for those who know no tensor.
#pragma once
#include <memory>

#include "learner/policy_source.hpp"

namespace echoline::learner {

// A SourceMaker.
Result<std::unique_ptr<PolicySource>> load_built_in(const SourceHost& host, bool resume);

}  // namespace echoline::learner
