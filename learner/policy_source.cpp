// Chooses the trainer by the run file, for the service.
#include "learner/policy_source.hpp"

#include "learner/external/source.hpp"

namespace echoline::learner {

Result<SourceMaker> source_maker(const RunConfig& config, const BuiltIn& built_in) {
  if (config.learner.trainer == TrainerKind::kExternal) return SourceMaker(load_external);
  if (!built_in.load)
    return fail(Code::kInvalid, "learner",
                "the run wants the built-in trainer, and this echoline was built without libtorch: build it with "
                "-DECHOLINE_TORCH=ON (the default), or set `learner.trainer: external`");
  return built_in.load;
}

}  // namespace echoline::learner
