#include "learner/policy_source.hpp"

namespace echoline::learner {

Result<SourceMaker> source_maker(const RunConfig&, const SourceMaker& built_in) {
  if (!built_in)
    return fail(Code::kInvalid, "learner",
                "the run wants the built-in trainer, and this echoline was built without libtorch: build it with "
                "-DECHOLINE_TORCH=ON (the default)");
  return built_in;
}

}  // namespace echoline::learner
