// Loads the libtorch module at the first call that needs it, and forwards the calls of built_in.hpp to it.
#include <dlfcn.h>

#include "base/program_module.hpp"
#include "cli/built_in.hpp"
#include "cli/torch_module.hpp"
#include "cli/verbs.hpp"

namespace echoline::cli {
namespace {

constexpr std::string_view kOperation = "open built-in engine";

struct OpenedModule {
  std::filesystem::path file;
  const TorchModule* functions = nullptr;
};

Result<std::filesystem::path> module_file() {
  const std::filesystem::path program = own_program();
  if (auto file = find_module(program, kTorchModule)) return *std::move(file);
  std::string places;
  for (const auto& place : module_paths(program, kTorchModule)) places += (places.empty() ? "" : ", ") + place.string();
  return fail(Code::kInvalid, kOperation,
              "the file with the built-in trainer and engine is missing; expected one of: {}. Build or install the "
              "whole program, or make the bundle without --without-engine. External trainers and the engines sglang "
              "and vllm do not need this file",
              places);
}

Result<OpenedModule> open_module() {
  ECHO_ASSIGN(const std::filesystem::path file, module_file());
  // RTLD_LAZY is for libtorch's many libraries. The module itself is linked with -z now: a symbol that the program
  // lacks is an error here, not a crash later.
  void* const handle = ::dlopen(file.c_str(), RTLD_LAZY | RTLD_GLOBAL);
  if (handle == nullptr) return fail(Code::kInvalid, kOperation, "cannot open {}: {}", file.string(), ::dlerror());
  using Entry = const TorchModule*();
  auto* const module_entry = reinterpret_cast<Entry*>(::dlsym(handle, kTorchModuleEntry));
  if (module_entry == nullptr)
    return fail(Code::kInvalid, kOperation, "{} is not a module of echoline: {}", file.string(), ::dlerror());
  if (const TorchModule& module = *module_entry(); std::string_view(module.version) != ECHOLINE_VERSION)
    return fail(Code::kInvalid, kOperation,
                "{} belongs to echoline {}, but the program is echoline {}: install both from one build", file.string(),
                module.version, ECHOLINE_VERSION);
  return OpenedModule{.file = file, .functions = module_entry()};
}

// Opens the module at the first call.
const Result<OpenedModule>& torch_module() {
  static const Result<OpenedModule> opened = open_module();
  return opened;
}

}  // namespace

Result<std::optional<std::filesystem::path>> open_built_in() {
  ECHO_ASSIGN(const OpenedModule& opened, torch_module());
  return std::optional(opened.file);
}

learner::BuiltIn built_in_trainer() {
  const auto load_trainer = [](const learner::SourceHost& host,
                               bool resume) -> Result<std::unique_ptr<learner::PolicySource>> {
    ECHO_ASSIGN(const OpenedModule& opened, torch_module());
    return opened.functions->built_in().load(host, resume);
  };
  const auto can_compute_on = [](const std::string& device) -> Status {
    ECHO_TRY(module_file());
    if (device == "cpu") return ok();
    ECHO_ASSIGN(const OpenedModule& opened, torch_module());
    return opened.functions->built_in().can_compute_on(device);
  };
  const auto settings_digest = [](const learner::RunConfig& config, const model::ModelConfig& model) {
    const auto& opened = torch_module();
    // "" equals no checkpoint's digest, so the run is not resumed. A new run ends with the error of load_trainer().
    return opened ? opened->functions->built_in().settings_digest(config, model) : "";
  };
  // Without the module, a learner publishes the policies of an external trainer without running them first.
  learner::PolicyProbe probe;
  if (module_file())
    probe = [](const delta::StateView& policy, const model::ModelConfig& config, double temperature,
               int threads) -> Result<std::vector<double>> {
      ECHO_ASSIGN(const OpenedModule& opened, torch_module());
      return opened.functions->built_in().probe(policy, config, temperature, threads);
    };
  const auto device_memory = [](const std::string& device) -> std::optional<Bytes> {
    const auto& opened = torch_module();
    return opened ? opened->functions->built_in().device_memory(device) : std::nullopt;
  };
  const auto has_cuda = [] {
    const auto& opened = torch_module();
    return opened && opened->functions->built_in().has_cuda();
  };
  return {.load = load_trainer,
          .can_compute_on = can_compute_on,
          .settings_digest = settings_digest,
          .probe = probe,
          .device_memory = device_memory,
          .has_cuda = has_cuda};
}

Result<BuiltInEngine> built_in_engine() {
  ECHO_ASSIGN(const OpenedModule& opened, torch_module());
  return BuiltInEngine(opened.functions->make_engine);
}

Result<model::Generation> generate_response(const std::filesystem::path& folder, const std::string& device,
                                            const std::vector<model::Token>& prompt, const model::Sampling& sampling) {
  ECHO_ASSIGN(const OpenedModule& opened, torch_module());
  return opened.functions->ask(folder, device, prompt, sampling);
}

Status answer_questions(const std::filesystem::path& folder, const model::Questions& questions) {
  ECHO_ASSIGN(const OpenedModule& opened, torch_module());
  return opened.functions->ask_all(folder, questions);
}

Result<std::vector<float>> score_continuation(const std::filesystem::path& folder, const std::string& device,
                                              const std::vector<model::Token>& prompt,
                                              const std::vector<model::Token>& continuation, double temperature) {
  ECHO_ASSIGN(const OpenedModule& opened, torch_module());
  return opened.functions->score(folder, device, prompt, continuation, temperature);
}

learner::Check check_torch() {
  const auto& opened = torch_module();
  if (!opened) return {"libtorch", learner::Verdict::kWarning, opened.error().message()};
  return opened->functions->check();
}

}  // namespace echoline::cli
