#include "learner/policy_source.hpp"

#include "learner/training/built_in.hpp"

namespace echoline::learner {

Result<std::unique_ptr<PolicySource>> make_policy_source(const SourceHost& host, bool resume) {
  return load_built_in(host, resume);
}

}  // namespace echoline::learner
