#include "tests/bench/train_on_device.hpp"

#include <fmt/format.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <array>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/random.hpp"
#include "delta/safetensors.hpp"
#include "learner/training/trainer.hpp"
#include "model/cuda/training_device.hpp"
#include "model/weights.hpp"
#include "tests/bench/measure.hpp"

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11)
#define ECHOLINE_KERNEL_NAMES 1
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#endif

namespace echoline::bench {
namespace {

using nlohmann::json;
using torch::Tensor;

void wait_for(const torch::Device& device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

// Weights made on the device: a normal distribution, and ones in norms.
std::shared_ptr<model::Transformer> random_model(const model::ModelConfig& config, const torch::Device& device,
                                                 std::optional<torch::ScalarType> type) {
  torch::manual_seed(1);
  auto model = must(model::create(config, device, type));
  torch::NoGradGuard no_gradient;
  for (const Tensor& p : model->parameters())
    if (p.dim() >= 2)
      p.normal_(0, config.initializer_range);
    else
      p.fill_(1);
  return model;
}

std::vector<schema::Trajectory> rollouts(const OnDevice& run, std::int64_t vocabulary) {
  Random random(3);
  const auto token = [&] { return static_cast<std::uint32_t>(random.below(static_cast<std::uint64_t>(vocabulary))); };
  std::vector<schema::Trajectory> batch;
  for (std::int64_t g = 0; g < run.groups; ++g) {
    std::vector<std::uint32_t> prompt;
    for (std::int64_t t = 0; t < run.prompt; ++t) prompt.push_back(token());
    for (std::int64_t m = 0; m < run.members; ++m) {
      schema::Trajectory& t = batch.emplace_back();
      t.set_id(fmt::format("{}-{}", g, m));
      t.set_group(static_cast<std::uint64_t>(g));
      t.set_reward(static_cast<double>(m % 2));
      t.set_finished(true);
      t.mutable_prompt_tokens()->Add(prompt.begin(), prompt.end());
      for (std::int64_t k = 0; k < run.response; ++k) {
        t.add_response_tokens(token());
        t.add_logprobs(static_cast<float>(-std::log(static_cast<double>(vocabulary))));
      }
    }
  }
  return batch;
}

// TFLOP/s of a product of n^3 in the type of the policy.
double product_rate(const torch::Device& device, torch::ScalarType type) {
  const std::int64_t n = device.is_cuda() ? 8192 : 256;
  const auto options = torch::TensorOptions().device(device).dtype(type);
  const Tensor a = torch::randn({n, n}, options), b = torch::randn({n, n}, options);
  Tensor c = torch::mm(a, b);
  std::vector<double> seconds;
  for (int i = 0; i < 10; ++i) {
    wait_for(device);
    seconds.push_back(seconds_of([&] {
      for (int k = 0; k < 4; ++k) torch::mm_out(c, a, b);
      wait_for(device);
    }));
  }
  return 4 * 2 * static_cast<double>(n * n * n) / median(seconds) / 1e12;
}

#ifdef ECHOLINE_KERNEL_NAMES
// The part of a step that a kernel belongs to, by its name.
const char* part_of(const std::string& name) {
  const auto has = [&](std::initializer_list<const char*> words) {
    return std::any_of(words.begin(), words.end(),
                       [&](const char* word) { return name.find(word) != std::string::npos; });
  };
  if (name.starts_with("Memcpy") || name.starts_with("Memset")) return "copies and fills";
  if (has({"flash", "fmha", "attention"})) return "attention";
  if (has({"gemm", "nvjet", "cutlass", "cublas", "splitK"})) return "products";
  if (has({"score_", "softmax", "SoftMax"})) return "softmax over the vocabulary";
  if (has({"update_", "squares_"})) return "update";
  if (has({"norm_", "rotate_", "gate_", "spread_rows", "gather_rows", "column_sums"})) return "norms, rotations, gates";
  return "other kernels";
}

// The peak of tensor bytes on the device so far.
double bytes_at_most(const torch::Device& device) {
  if (!device.is_cuda()) return 0;
  return static_cast<double>(c10::getDeviceAllocator(device.type())->getDeviceStats(0).allocated_bytes[0].peak);
}
void give_back(const torch::Device& device) {
  if (device.is_cuda()) c10::getDeviceAllocator(device.type())->emptyCache();
}

template <class F>
void name_kernels(const torch::Device& device, const F& step) {
  namespace profiler = torch::autograd::profiler;
  const std::set<torch::profiler::impl::ActivityType> activities{torch::profiler::impl::ActivityType::CPU,
                                                                 torch::profiler::impl::ActivityType::CUDA};
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  wait_for(device);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  const double whole = seconds_of([&] {
    step();
    wait_for(device);
  });
  const auto result = profiler::disableProfiler();
  struct Sum {
    double ms = 0;
    std::int64_t count = 0;
  };
  std::map<std::string, Sum> parts, kernels;
  Sum all;
  std::int64_t waits = 0;  // of the host
  for (const profiler::KinetoEvent& event : result->events()) {
    if (event.deviceType() != c10::DeviceType::CUDA) {
      waits += event.name().find("Synchronize") != std::string::npos ? 1 : 0;
      continue;
    }
    const double ms = static_cast<double>(event.durationNs()) / 1e6;
    std::string name = event.name();
    for (Sum* sum : {&parts[part_of(name)], &kernels[name.substr(0, 90)], &all}) sum->ms += ms, ++sum->count;
  }
  fmt::print(
      "\none step with its kernels named ({:.0f} ms): {} kernels and copies, {:.0f} ms; the host waits {} times\n",
      1e3 * whole, all.count, all.ms, waits);
  const auto by_time = [](const std::map<std::string, Sum>& from) {
    std::vector<std::pair<std::string, Sum>> list(from.begin(), from.end());
    std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.second.ms > b.second.ms; });
    return list;
  };
  for (const auto& [name, sum] : by_time(parts)) fmt::print("  {:<30}{:>8.1f} ms{:>8}\n", name, sum.ms, sum.count);
  fmt::print("  the dearest\n");
  const auto list = by_time(kernels);
  for (std::size_t i = 0; i < std::min<std::size_t>(28, list.size()); ++i)
    fmt::print("  {:>8.1f} ms{:>7}  {}\n", list[i].second.ms, list[i].second.count, list[i].first);
}
#else
double bytes_at_most(const torch::Device&) { return 0; }
void give_back(const torch::Device&) {}
template <class F>
void name_kernels(const torch::Device&, const F&) {
  fmt::print("libtorch {} cannot name kernels here\n", TORCH_VERSION);
}
#endif

json answer_of(const std::string& command) {
  std::FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) stop("no second process");
  std::string text;
  std::array<char, 4096> buffer;
  while (const std::size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe)) text.append(buffer.data(), n);
  if (::pclose(pipe) != 0) return nullptr;
  const std::size_t end = text.find_last_not_of('\n'), begin = text.rfind('\n', end);
  return json::parse(text.substr(begin == std::string::npos ? 0 : begin + 1), nullptr, /*allow_exceptions=*/false);
}

// Weights, rows and gradients of a mean log-probability, for another program.
void write_gradients(const OnDevice& run, const model::ModelConfig& config, const torch::Device& device,
                     const std::filesystem::path& folder) {
  constexpr std::int64_t kRows = 4, kTokens = 257, kPrompt = 100;
  must(make_folders(folder));
  must(write_file_atomic(folder / "config.json", config.to_json()));
  Random random(5);
  std::vector<std::vector<std::int64_t>> rows(kRows);
  for (std::size_t r = 0; r < rows.size(); ++r)
    for (std::int64_t t = 0; t < kTokens; ++t)  // the last three share a prompt
      rows[r].push_back(r > 1 && t < kPrompt ? rows[1][static_cast<std::size_t>(t)]
                                             : static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(
                                                   std::min<std::int64_t>(config.vocab_size, 5000)))));
  must(write_file_atomic(folder / "rows.json", json(rows).dump()));
  bool first = true;
  for (const auto type : {torch::kBFloat16, torch::kFloat}) {
    const auto model = random_model(config, device, torch::kBFloat16);
    if (std::exchange(first, false))
      must(delta::write_safetensors(folder / "model.safetensors", must(model::export_policy(*model)).view()));
    const auto typed = type == torch::kBFloat16 ? model : must(model::create(config, device, type));
    {
      torch::NoGradGuard no_gradient;
      const auto from = model->parameters(), to = typed->parameters();
      for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    }
    typed->recompute_layers(run.recompute);
    // Scores every token behind the first, in rows without a shared prefix, and then again packed.
    for (const bool packed : {false, true}) {
      typed->zero_grad();
      if (packed) {
        // The prompt's scores come from a pass of their own, so that the sum is the same.
        std::vector<model::ScoredSequence> whole, heads;
        for (const auto& row : rows) whole.push_back({row, static_cast<std::size_t>(kPrompt), {}});
        for (const auto& row : rows) heads.push_back({std::span(row).first(static_cast<std::size_t>(kPrompt)), 1, {}});
        const double count = static_cast<double>(kRows * (kTokens - 1));
        (typed->packed_logprobs(model::pack(whole, device)).logprobs.sum() / count).backward();
        (typed->packed_logprobs(model::pack(heads, device)).logprobs.sum() / count).backward();
      } else {
        std::vector<std::int64_t> flat;
        for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
        typed->token_logprobs(torch::tensor(flat, torch::kLong).view({kRows, kTokens}).to(device))
            .logprobs.mean()
            .backward();
      }
      std::vector<std::pair<std::string, Tensor>> kept;
      for (const char* name : {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
                               "model.layers.0.self_attn.k_norm.weight", "model.layers.0.self_attn.v_proj.weight",
                               "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"}) {
        const auto parameters = typed->named_parameters();
        const Tensor* p = parameters.find(name);
        if (p && p->grad().defined()) kept.emplace_back(name, p->grad().to(torch::kCPU, torch::kFloat).contiguous());
      }
      // A safetensors file of fp32.
      json header;
      std::string bytes;
      for (const auto& [name, tensor] : kept) {
        const std::size_t begin = bytes.size();
        bytes.append(static_cast<const char*>(tensor.data_ptr()), tensor.nbytes());
        header[name] = {{"dtype", "F32"},
                        {"shape", std::vector<std::int64_t>(tensor.sizes().begin(), tensor.sizes().end())},
                        {"data_offsets", {begin, bytes.size()}}};
      }
      const std::string head = header.dump();
      const std::uint64_t size = head.size();
      must(write_file_atomic(folder / fmt::format("gradients-{}-{}.safetensors",
                                                  type == torch::kFloat ? "fp32" : "bf16", packed ? "packed" : "rows"),
                             std::string(reinterpret_cast<const char*>(&size), 8) + head + bytes));
    }
  }
}

void compare_gradients(const OnDevice& run, const model::ModelConfig& config, const torch::Device& device,
                       const std::filesystem::path& folder) {
  write_gradients(run, config, device, folder);
  const json found =
      answer_of(fmt::format("{} {} --gradients {} 2>&1", run.python, ECHOLINE_TRANSFORMERS_TRAINER, folder.string()));
  if (!found.is_object()) {
    fmt::print("\nno gradients of transformers: {} needs torch, transformers and safetensors\n", run.python);
    return;
  }
  fmt::print("\nrelative error of gradients against transformers in fp32\n");
  for (const auto& [who, errors] : found.items()) {
    fmt::print("  {:<22}", who);
    for (const auto& [name, error] : errors.items()) {
      const std::string text = name;
      const std::size_t end = text.rfind('.'), begin = text.rfind('.', end - 1) + 1;
      fmt::print(" {} {:.2g}", text.substr(begin, end - begin), error.get<double>());
    }
    fmt::print("\n");
  }
}

}  // namespace

void train_on_device(const OnDevice& run, const std::filesystem::path& folder) {
  const torch::Device device = must(model::device_named(run.device));
  const model::ModelConfig config = must(model::preset(run.preset));
  const torch::ScalarType type = run.bf16 ? torch::kBFloat16 : torch::kFloat;
  const auto sequences = run.groups * run.members, tokens = sequences * (run.prompt + run.response);
  fmt::print("{}, {}, {} x ({} + {}) tokens, {} in a micro-batch\n", run.preset, run.bf16 ? "bf16" : "fp32", sequences,
             run.prompt, run.response, run.microbatch);
  model::training::use_kernels(run.fused);
  const double ceiling = product_rate(device, type);
  fmt::print("a product of its type: {:.0f} TFLOP/s\n", ceiling);
  std::fflush(stdout);
  {
    const auto policy = random_model(config, device, type);
    policy->recompute_layers(run.recompute);
    learner::TrainerConfig training;
    training.loss = *learner::loss_named("dapo");
    if (run.reference) training.loss.kl_coefficient = 0.01;
    training.optimizer.learning_rate = 1e-6;
    if (run.int8_moments) training.optimizer.moments = learner::Moments::kInt8;
    training.microbatch_tokens = run.microbatch;
    const auto trainer =
        must(learner::Trainer::create(policy, training, run.reference ? random_model(config, device, type) : nullptr));
    const auto batch = rollouts(run, config.vocab_size);
    learner::StepReport report;
    std::vector<double> seconds;
    for (int i = 0; i < run.steps; ++i) {
      wait_for(device);
      const double s = seconds_of([&] {
        report = must(trainer->step(batch));
        wait_for(device);
      });
      if (i > 0 || run.steps == 1) seconds.push_back(s);
    }
    const double s = median(seconds), rate = static_cast<double>(tokens) / s;
    const double flops = 6 * static_cast<double>(config.parameters()) * rate / 1e12;
    fmt::print("{:<44}{:>9}{:>12}{:>14}{:>10}{:>8}\n", "", "seconds", "tokens/s", "6 N TFLOP/s", "of it", "GB");
    const auto row = [&](const std::string& what, double took, double gb) {
      fmt::print("{:<44}{:>9.3f}{:>12.0f}{:>14.0f}{:>10.3f}{:>8.1f}\n", what, took, static_cast<double>(tokens) / took,
                 flops * s / took, flops * s / took / ceiling, gb);
      std::fflush(stdout);
    };
    row(device.is_cuda() && model::training::have_kernels() && run.fused ? "echoline"
                                                                         : "echoline, libtorch's kernels alone",
        s, bytes_at_most(device) / 1e9);
    fmt::print("  fastest {:.3f}, slowest {:.3f}; loss {:.6f}, gradient norm {:.6f}, entropy {:.6f}\n",
               *std::min_element(seconds.begin(), seconds.end()), *std::max_element(seconds.begin(), seconds.end()),
               report.loss, report.gradient_norm, report.entropy);
    std::fflush(stdout);
    if (run.kernels && device.is_cuda()) name_kernels(device, [&] { must(trainer->step(batch)); });
    std::fflush(stdout);
  }
  give_back(device);
  must(make_folders(folder));
  must(write_file_atomic(folder / "config.json", config.to_json()));
  if (run.baseline) {
    const json other = answer_of(fmt::format("{} {} {} {} {} {} {} {} 2>&1", run.python, ECHOLINE_TRANSFORMERS_TRAINER,
                                             (folder / "config.json").string(), sequences, run.prompt, run.response,
                                             run.microbatch, run.steps));
    if (other.is_object()) {
      auto seconds = other.at("seconds").get<std::vector<double>>();
      if (seconds.size() > 1) seconds.erase(seconds.begin());
      const double s = median(seconds);
      fmt::print("\n{:<44}{:>9.3f}{:>12.0f}{:>14.0f}{:>10.3f}{:>8.1f}\n",
                 fmt::format("transformers {}, torch {}", other.at("transformers").get<std::string>(),
                             other.at("torch").get<std::string>()),
                 s, static_cast<double>(tokens) / s,
                 6 * static_cast<double>(config.parameters()) * static_cast<double>(tokens) / s / 1e12,
                 6 * static_cast<double>(config.parameters()) * static_cast<double>(tokens) / s / 1e12 / ceiling,
                 other.at("bytes").get<double>() / 1e9);
    } else {
      fmt::print("\nno baseline: {} needs torch and transformers\n", run.python);
    }
    std::fflush(stdout);
  }
  if (run.gradients) compare_gradients(run, config, device, folder / "gradients");
}

}  // namespace echoline::bench
