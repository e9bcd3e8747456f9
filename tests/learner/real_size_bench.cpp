// A published shape with random weights on this machine: loads, generates, makes a GRPO step, and what the delta
// between the policies before and after it costs; with seconds and the most memory, beside what `echoline model info
// --train` says.
//
//   echoline model init --preset qwen3-0.6b -o DIR
//   real_size_bench --model DIR [--bf16] [--int8] [--recompute] [--responses 8] [--prompt 384] [--response 128]
//                   [--microbatch-tokens 512] [--threads 2] [--rate 3e-6]
//
// Without --model: --preset NAME (a tiny one unless given, so that it cannot rot) with fresh weights and, if wanted,
// --layers N instead of its own.
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "base/clock.hpp"
#include "base/random.hpp"
#include "delta/patch.hpp"
#include "learner/training/trainer.hpp"
#include "model/generate.hpp"
#include "model/runtime.hpp"
#include "model/training_memory.hpp"
#include "model/weights.hpp"
#include "tests/learner/tensor_count.hpp"

namespace echoline {
namespace {

template <class T>
T must(Result<T> result) {
  if (!result) {
    fmt::print(stderr, "real_size_bench: {}\n", result.error().message());
    std::exit(exit_code(result.error().code));
  }
  return std::move(result).value();
}

double status_gb(const char* key) {  // of a line like "VmHWM:   2144 kB"
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(key)) return std::stod(line.substr(std::strlen(key))) * 1024 / 1e9;
  return 0;
}

// Prints seconds and memory of one part of the work after the other.
class Stopwatch {
 public:
  explicit Stopwatch(TensorCount& tensors) : tensors_(tensors) {
    fmt::print("{:<22}{:>10}{:>12}{:>10}{:>13}{:>10}{:>10}\n", "GB", "seconds", "most here", "tensors", "afterwards",
               "tensors", "malloc");
  }
  // Ends a part; returns its peak memory in GB.
  double end_part(const char* name) {
    const TimePoint now = clock_.now();
    const double peak_gb = status_gb("VmHWM:");
    const struct mallinfo2 heap = ::mallinfo2();
    fmt::print("{:<22}{:>10.2f}{:>12.2f}{:>10.2f}{:>13.2f}{:>10.2f}{:>10.2f}\n", name, seconds(now - began_at_),
               peak_gb, tensors_.most() / 1e9, status_gb("VmRSS:"), tensors_.now() / 1e9,
               static_cast<double>(heap.uordblks + heap.hblkhd) / 1e9);
    std::fflush(stdout);
    std::ofstream("/proc/self/clear_refs") << "5";  // resets the process's peak memory
    tensors_.forget_most();
    began_at_ = clock_.now();
    return peak_gb;
  }

 private:
  TensorCount& tensors_;
  SystemClock clock_;
  TimePoint began_at_ = clock_.now();  // of the present part
};

}  // namespace
}  // namespace echoline

int main(int argc, char** argv) {
  using namespace echoline;
  std::string folder, preset = "tiny-64";
  std::int64_t layers = 0;
  bool bf16 = false, int8 = false, recompute = false;
  std::int64_t responses = 8, prompt_tokens = 24, response_tokens = 8, microbatch_tokens = 64, threads = 1;
  double rate = 3e-6;
  CLI::App app("A learner step at a real size");
  app.add_option("--model", folder);
  app.add_option("--preset", preset);
  app.add_option("--layers", layers);
  app.add_flag("--bf16", bf16);
  app.add_flag("--int8", int8);
  app.add_flag("--recompute", recompute);
  app.add_option("--responses", responses);
  app.add_option("--prompt", prompt_tokens);
  app.add_option("--response", response_tokens);
  app.add_option("--microbatch-tokens", microbatch_tokens);
  app.add_option("--threads", threads);
  app.add_option("--rate", rate);
  CLI11_PARSE(app, argc, argv);

  model::use_threads(static_cast<int>(threads));
  model::keep_freed_memory();
  const auto tensors = std::make_shared<TensorCount>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, tensors);
  Stopwatch watch(*tensors);
  const auto type = bf16 ? torch::kBFloat16 : torch::kFloat;
  model::ModelConfig shape = must(model::preset(preset));
  if (layers > 0) shape.layers = layers;
  const std::shared_ptr<model::Transformer> policy =
      folder.empty() ? must(model::init(shape, 1, torch::kCPU, type))
                     : must(model::load_model(folder, torch::kCPU, type)).transformer;
  const model::ModelConfig config = policy->config();
  watch.end_part("load");

  Random random(1);
  std::vector<model::Token> prompt;
  for (std::int64_t i = 0; i < prompt_tokens; ++i)
    prompt.push_back(static_cast<model::Token>(random.below(static_cast<std::uint64_t>(config.vocab_size))));
  model::Sampling sampling;
  sampling.tokens_max = response_tokens;
  sampling.seed = 1;
  const auto generations =
      must(model::generate(*policy, std::vector(static_cast<std::size_t>(responses), prompt), sampling));
  watch.end_part("generate");

  learner::TrainerConfig settings;
  settings.loss = *learner::loss_named("grpo");
  settings.optimizer.learning_rate = rate;
  settings.optimizer.moments = int8 ? learner::Moments::kInt8 : learner::Moments::kFp32;
  settings.microbatch_tokens = microbatch_tokens;
  policy->recompute_layers(recompute);
  const auto trainer = must(learner::Trainer::create(policy, settings));
  std::vector<schema::Trajectory> batch;
  for (std::size_t i = 0; i < generations.size(); ++i) {
    schema::Trajectory trajectory;
    trajectory.set_group(1);
    trajectory.set_reward(i % 2 == 0 ? 1 : 0);
    trajectory.set_finished(true);
    trajectory.mutable_prompt_tokens()->Add(prompt.begin(), prompt.end());
    trajectory.mutable_response_tokens()->Add(generations[i].tokens.begin(), generations[i].tokens.end());
    trajectory.mutable_logprobs()->Add(generations[i].logprobs.begin(), generations[i].logprobs.end());
    batch.push_back(std::move(trajectory));
  }
  watch.end_part("masters and moments");
  const auto report = must(trainer->step(batch));
  const double measured_gb = watch.end_part("GRPO step");
  const auto predicted = model::training_memory(config, {.bf16 = bf16,
                                                         .int8_moments = int8,
                                                         .reference = false,
                                                         .recompute = recompute,
                                                         .microbatch_tokens = microbatch_tokens,
                                                         .sequence_tokens = prompt_tokens + response_tokens});
  fmt::print("memory of a step: predicted {:.2f} GB, {:.2f} of them tensors; the process took {:.2f} GB\n",
             static_cast<double>(predicted.total().count) / 1e9, static_cast<double>(predicted.tensors().count) / 1e9,
             measured_gb);
  fmt::print("gradient norm {:.3g}, ratio {:.5f}, behaviour KL {:.2g}, entropy {:.3f}\n", report.gradient_norm,
             report.ratio_mean, report.behaviour_kl, report.entropy);

  auto before = must(trainer->policy());
  watch.end_part("export");
  must(trainer->step(batch));
  watch.end_part("GRPO step again");
  auto after = must(trainer->policy());
  watch.end_part("export");
  std::vector<std::byte> patch;
  const auto stats = must(delta::write_delta(before.view(), after.view(), [&](std::span<const std::byte> bytes) {
    patch.insert(patch.end(), bytes.begin(), bytes.end());
    return ok();
  }));
  watch.end_part("encode the delta");
  fmt::print("delta                        {:.2f} MB of {:.0f} MB, {:.2f} % of the values changed\n",
             static_cast<double>(patch.size()) / 1e6, static_cast<double>(stats.state_bytes) / 1e6,
             100 * stats.density());
  if (const Status applied = delta::apply_delta(patch, before); !applied)
    return fmt::print(stderr, "{}\n", applied.error().message()), 1;
  watch.end_part("apply it, digest proven");
  if (before.digest() != after.digest()) return fmt::print(stderr, "the digests differ\n"), 1;
}
