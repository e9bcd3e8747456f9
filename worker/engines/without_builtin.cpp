#include "worker/engines/builtin.hpp"

namespace echoline::worker {

Status builtin_engine_is_there() {
  return fail(Code::kInvalid, "engine",
              "this echoline was built without libtorch, and so without the built-in engine: use --engine sglang or vllm, or build "
              "it with -DECHOLINE_TORCH=ON (the default)");
}

Result<std::unique_ptr<Engine>> make_builtin_engine(const BuiltinOptions&) { return builtin_engine_is_there().error(); }

}  // namespace echoline::worker
