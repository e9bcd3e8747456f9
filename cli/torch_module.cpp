// The functions of the libtorch module. with_torch.cpp loads it.
#include "cli/torch_module.hpp"

#include "delta/cuda/device.hpp"
#include "learner/training/built_in.hpp"
#include "model/ask.hpp"
#include "model/runtime.hpp"

namespace echoline::cli {
namespace {

learner::Check check() {
  const model::Runtime runtime = model::runtime();
  std::string devices = "no CUDA device (the CPU is used)";
  if (runtime.cuda_devices > 0) {
    const Status kernels = delta::cuda::device_available();
    devices = fmt::format("{} CUDA devices; {}", runtime.cuda_devices,
                          kernels ? "only changes of weights are copied to and from them"
                                  : "all weights are copied to and from them: " + kernels.error().message());
  }
  return {"libtorch", learner::Verdict::kOk,
          fmt::format("{}, {} threads, kernels for {}, {}", runtime.torch_version, runtime.threads, runtime.kernels,
                      devices)};
}

constexpr TorchModule kModule{.version = ECHOLINE_VERSION,
                              .built_in = learner::built_in,
                              .make_engine = worker::make_builtin_engine,
                              .ask = model::ask,
                              .ask_all = model::ask_all,
                              .score = model::score,
                              .check = check};

}  // namespace
}  // namespace echoline::cli

extern "C" const echoline::cli::TorchModule* echoline_torch_module() { return &echoline::cli::kModule; }
