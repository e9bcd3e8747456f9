// Checks the options of engines and makes the chosen engine.
#include "worker/engines/make.hpp"

#include "base/parallel.hpp"
#include "worker/engines/remote.hpp"
#include "worker/groups.hpp"

namespace echoline::worker {
namespace {

Result<std::unique_ptr<Engine>> make_builtin(const EngineOptions& options, const Task& task, const EngineHost& host) {
  if (const Status computable = task.model.check_computable(); !computable)
    return fail(Code::kInvalid, "engine", "the built-in engine cannot generate with this model: {}",
                computable.error().detail);
  BuiltinOptions builtin_options;
  builtin_options.model = task.model;
  builtin_options.sampling.temperature = task.spec.temperature();
  builtin_options.sampling.top_p = task.spec.top_p();
  builtin_options.sampling.top_k = task.spec.top_k();
  builtin_options.sampling.min_p = task.spec.min_p();
  builtin_options.sampling.eos = task.phrasing->eos();
  if (!task.phrasing->stop().empty())
    builtin_options.ends = [phrasing = *task.phrasing](std::span<const model::Token> response) {
      // Called after each token, so only the newest one is unchecked.
      return phrasing.response_end(response, response.size() - 1).has_value();
    };
  builtin_options.device = options.device;
  builtin_options.threads = static_cast<int>(threads_of(options));
  builtin_options.rows_max = options.rollouts_at_once;
  builtin_options.cache_max = options.cache_max.value_or(builtin_options.cache_max);
  builtin_options.records_experts = task.spec.records_experts();
  builtin_options.policy_waits = host.policy_waits;
  return options.builtin_maker(builtin_options);
}

}  // namespace

unsigned threads_of(const EngineOptions& options) {
  const bool on_cpu = options.kind == EngineKind::kBuiltin && options.device == "cpu";
  if (!options.threads && on_cpu) return 1;  // the workers of one machine share its processors
  return thread_count(options.threads.value_or(0));
}

Result<EngineMaker> engine_maker(EngineOptions options) {
  constexpr std::string_view kOperation = "engine";
  const bool is_server = options.kind != EngineKind::kBuiltin;
  if (!is_server && (!options.command.empty() || !options.url.empty() || !options.folder.empty()))
    return fail(Code::kInvalid, kOperation,
                "a command, an address or a folder needs a server as engine: use --engine sglang or vllm");
  if (is_server && options.device != "cpu")  // the user has chosen a device: "cpu" is the default
    return fail(Code::kInvalid, kOperation,
                "a device is only for the built-in engine: a server's own command chooses its device");
  if (!is_server && !options.builtin_maker)
    return fail(
        Code::kInvalid, kOperation,
        "this echoline was built without libtorch, and so without the built-in engine: use --engine sglang or vllm, or "
        "build it with -DECHOLINE_TORCH=ON (the default)");
  if (is_server && options.command.empty() == options.url.empty())  // neither, or both
    return fail(Code::kInvalid, kOperation,
                "expected either a command that starts a server or the address of a running one");
  const bool sets_numbers = options.engines || options.gpus_per_engine != 1;  // 1 is the default
  if (options.command.empty() && sets_numbers)
    return fail(Code::kInvalid, kOperation,
                "a number of engines, or of GPUs per engine, is for servers that the worker starts by a command");
  const auto command_has = [&](std::string_view text) { return options.command.find(text) != std::string::npos; };
  // " --tp" is also the beginning of --tp-size; " -tp " needs its blanks, because "-tp" occurs inside other options.
  const bool uses_several_gpus = command_has("--tensor-parallel-size") || command_has(" --tp") || command_has(" -tp ");
  // Without --engines, one engine is started for each GPU, and sees no other GPU.
  const bool gets_one_gpu = options.gpus_per_engine == 1 && !options.engines;
  if (uses_several_gpus && gets_one_gpu && !command_has("{gpus}"))
    return fail(Code::kInvalid, kOperation,
                "the command starts an engine on several GPUs, but --gpus-per-engine is 1: set --gpus-per-engine to "
                "the number of GPUs of one engine, and write {{gpus}} instead of that number in the command");
  if (options.engines == 0 || options.gpus_per_engine == 0)
    return fail(Code::kInvalid, kOperation, "expected at least one engine with at least one GPU");
  if (!options.command.empty())
    for (const char* placeholder : {"{model}", "{port}"})
      if (!command_has(placeholder))
        return fail(Code::kInvalid, kOperation,
                    "expected a command with {{model}}, the folder to load, and {{port}}, the port to listen on; {} "
                    "is missing in '{}'",
                    placeholder, options.command);
  if (!options.url.empty() && options.url.find("://") == std::string::npos)
    return fail(Code::kInvalid, kOperation, "expected an address like http://127.0.0.1:30000, found '{}'", options.url);
  options.threads = threads_of(options);
  return EngineMaker([options = std::move(options)](const Task& task, const EngineHost& host) {
    return options.kind == EngineKind::kBuiltin ? make_builtin(options, task, host)
                                                : make_remote_engine(options, task, host);
  });
}

}  // namespace echoline::worker
