// The functions of built_in.hpp in a build without libtorch: there is no trainer and no engine, and every function that
// would run a model fails with the advice to build with libtorch.
#include "cli/built_in.hpp"

namespace echoline::cli {
namespace {

Error needs_torch() {
  return fail(Code::kInvalid, "load model",
              "this echoline was built without libtorch and cannot run models; build it with "
              "-DECHOLINE_TORCH=ON (the default)");
}

}  // namespace

learner::BuiltIn built_in_trainer() { return {}; }
Result<BuiltInEngine> built_in_engine() { return BuiltInEngine(); }
Result<std::optional<std::filesystem::path>> open_built_in() { return std::optional<std::filesystem::path>(); }

Result<model::Generation> generate_response(const std::filesystem::path&, const std::string&,
                                            const std::vector<model::Token>&, const model::Sampling&) {
  return needs_torch();
}

Status answer_questions(const std::filesystem::path&, const model::Questions&) { return needs_torch(); }

Result<std::vector<float>> score_continuation(const std::filesystem::path&, const std::string&,
                                              const std::vector<model::Token>&, const std::vector<model::Token>&,
                                              double) {
  return needs_torch();
}

learner::Check check_torch() {
  return {"libtorch", learner::Verdict::kWarning,
          "this echoline was built without it (ECHOLINE_TORCH=OFF) and has neither the built-in trainer nor the "
          "built-in engine"};
}

}  // namespace echoline::cli
