#include "cli/built_in.hpp"
#include "delta/cuda/device.hpp"
#include "learner/training/built_in.hpp"
#include "model/ask.hpp"
#include "model/runtime.hpp"

namespace echoline::cli {

learner::BuiltIn built_in_trainer() { return learner::built_in(); }
decltype(worker::EngineOptions::builtin) built_in_engine() { return worker::make_builtin_engine; }

Result<model::Generation> ask(const std::filesystem::path& folder, const std::vector<model::Token>& prompt,
                              const model::Sampling& sampling) {
  return model::ask(folder, prompt, sampling);
}

Status ask_all(const std::filesystem::path& folder, const model::Questions& questions) { return model::ask_all(folder, questions); }

Result<std::vector<float>> score(const std::filesystem::path& folder, const std::vector<model::Token>& prompt,
                                 const std::vector<model::Token>& continuation, double temperature) {
  return model::score(folder, prompt, continuation, temperature);
}

learner::Check check_torch() {
  const model::Runtime runtime = model::runtime();
  std::string devices = "no CUDA device (the CPU is used)";
  if (runtime.cuda_devices > 0) {
    const Status kernels = delta::cuda::device_available();
    devices = fmt::format("{} CUDA devices; {}", runtime.cuda_devices,
                          kernels ? "only changes of weights cross to them and back"
                                  : "weights cross to them and back as a whole: " + kernels.error().message());
  }
  return {"libtorch", learner::Verdict::kOk, fmt::format("{}, {} threads, {}", runtime.torch_version, runtime.threads, devices)};
}

}  // namespace echoline::cli
