// How fast the built-in engine reads prompts and draws tokens, beside llama.cpp with the same weights, or on a GPU.
//
//   decode_bench [--preset qwen3-0.6b] [--threads 2] [--batch 1,4,16,64] [--prompt 512] [--tokens 16] [--repeats 3]
//                [--llama build/bin/llama-batched-bench] [--gguf /tmp/decode_bench.gguf]
//
// Every figure is printed beside its baseline of the same run: one thread of this engine where --threads is more, and
// llama.cpp, which runs as a child between two measurements of ours. Weights are random and bf16 on both sides. This
// engine also samples, llama.cpp does not. Medians of wall-clock time. --smoke: something tiny without llama.cpp, so
// that it cannot rot.
//
//   decode_bench --device cuda [--preset qwen3-0.6b] [--batch 1,16,64,256] [--prompt 128] [--tokens 128]
//
// On a GPU: --tokens drawn for each row behind a prompt of its own. Beside every figure: the same by libtorch's
// operations one after another, and the time in which weights, keys and values could be read once, at the rate of a
// copy within the device's memory in the same run.
#include <torch/cuda.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include "model/config.hpp"
#include "model/running_batch.hpp"
#include "model/runtime.hpp"
#include "model/transformer.hpp"

namespace echoline {
namespace {

using model::ModelConfig;
using model::Transformer;

std::shared_ptr<Transformer> random_weights(const ModelConfig& config, torch::Device device = torch::kCPU) {
  const auto model = std::make_shared<Transformer>(config, device, torch::kBFloat16);
  torch::NoGradGuard no_grad;
  torch::manual_seed(1);
  for (auto& item : model->named_parameters()) {
    if (item.value().dim() == 1) {
      item.value().fill_(1);
    } else {
      item.value().normal_(0, config.initializer_range);
    }
  }
  return model;
}

// GGUF, version 3, as far as llama.cpp needs it for a Qwen3 model without a vocabulary.
class Gguf {
 public:
  explicit Gguf(const std::filesystem::path& path) : out_(path, std::ios::binary) {}

  void write(const ModelConfig& config, const Transformer& model) {
    std::map<std::string, torch::Tensor> tensors;
    for (const auto& item : model.named_parameters()) tensors.emplace(name_of(item.key()), item.value().detach());
    out_.write("GGUF", 4);
    put(std::uint32_t{3});
    put(std::uint64_t{tensors.size()});
    put(std::uint64_t{14});
    text("general.architecture", "qwen3");
    text("tokenizer.ggml.model", "no_vocab");
    number("general.alignment", kAlignment);
    number("qwen3.vocab_size", config.vocab_size);
    number("qwen3.context_length", config.positions_max);
    number("qwen3.embedding_length", config.hidden_size);
    number("qwen3.block_count", config.layers);
    number("qwen3.feed_forward_length", config.intermediate_size);
    number("qwen3.attention.head_count", config.heads);
    number("qwen3.attention.head_count_kv", config.kv_heads);
    number("qwen3.attention.key_length", config.head_dim);
    number("qwen3.attention.value_length", config.head_dim);
    real("qwen3.attention.layer_norm_rms_epsilon", config.rms_norm_eps);
    real("qwen3.rope.freq_base", config.rope_theta);
    std::uint64_t at = 0;
    for (auto& [name, tensor] : tensors) {
      if (tensor.dim() == 1) tensor = tensor.to(torch::kFloat);
      string(name);
      put(static_cast<std::uint32_t>(tensor.dim()));
      for (std::int64_t d = tensor.dim(); d-- > 0;) put(static_cast<std::uint64_t>(tensor.size(d)));
      put(std::uint32_t{tensor.dim() == 1 ? 0u : 30u});  // fp32, bf16
      put(at);
      at = aligned(at + bytes(tensor));
    }
    pad();
    for (const auto& [name, tensor] : tensors) {
      out_.write(static_cast<const char*>(tensor.data_ptr()), static_cast<std::streamsize>(bytes(tensor)));
      pad();
    }
    if (!out_.flush()) {
      fmt::print(stderr, "decode_bench: cannot write the weights for llama.cpp; name a folder with room by --gguf\n");
      std::exit(1);
    }
  }

 private:
  static constexpr std::uint32_t kAlignment = 32;
  static std::uint64_t aligned(std::uint64_t at) { return (at + kAlignment - 1) / kAlignment * kAlignment; }
  static std::uint64_t bytes(const torch::Tensor& tensor) {
    return static_cast<std::uint64_t>(tensor.numel()) * tensor.element_size();
  }
  static std::string name_of(const std::string& key) {
    static const std::map<std::string, std::string> kNames = {{"model.embed_tokens.weight", "token_embd.weight"},
                                                              {"model.norm.weight", "output_norm.weight"},
                                                              {"lm_head.weight", "output.weight"},
                                                              {"self_attn.q_proj.weight", "attn_q.weight"},
                                                              {"self_attn.k_proj.weight", "attn_k.weight"},
                                                              {"self_attn.v_proj.weight", "attn_v.weight"},
                                                              {"self_attn.o_proj.weight", "attn_output.weight"},
                                                              {"self_attn.q_norm.weight", "attn_q_norm.weight"},
                                                              {"self_attn.k_norm.weight", "attn_k_norm.weight"},
                                                              {"input_layernorm.weight", "attn_norm.weight"},
                                                              {"post_attention_layernorm.weight", "ffn_norm.weight"},
                                                              {"mlp.gate_proj.weight", "ffn_gate.weight"},
                                                              {"mlp.up_proj.weight", "ffn_up.weight"},
                                                              {"mlp.down_proj.weight", "ffn_down.weight"}};
    constexpr std::string_view kLayers = "model.layers.";
    if (!key.starts_with(kLayers)) return kNames.at(key);
    const std::size_t dot = key.find('.', kLayers.size());
    return "blk." + key.substr(kLayers.size(), dot - kLayers.size()) + "." + kNames.at(key.substr(dot + 1));
  }

  template <class T>
  void put(T value) {
    out_.write(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void string(std::string_view value) {
    put(std::uint64_t{value.size()});
    out_.write(value.data(), static_cast<std::streamsize>(value.size()));
  }
  void text(std::string_view key, std::string_view value) {
    string(key);
    put(std::uint32_t{8});
    string(value);
  }
  void number(std::string_view key, std::int64_t value) {
    string(key);
    put(std::uint32_t{4});
    put(static_cast<std::uint32_t>(value));
  }
  void real(std::string_view key, double value) {
    string(key);
    put(std::uint32_t{6});
    put(static_cast<float>(value));
  }
  void pad() {
    while (static_cast<std::uint64_t>(out_.tellp()) % kAlignment != 0) out_.put(0);
  }

  std::ofstream out_;
};

// Tokens a second: of the prompts that are read, of those that are drawn.
struct Speed {
  double reading = 0, drawing = 0;
  std::size_t kernels = 0;  // of a recorded step
};

struct Load {
  std::int64_t rows, prompt, tokens;
};

Speed ours(const std::shared_ptr<Transformer>& model, const Load& load, bool recorded = true) {
  model::RunningBatch batch(
      model, {.rows_max = load.rows, .cache_max = {std::uint64_t{40} << 30}, .use_cuda_decoder = recorded});
  for (std::int64_t row = 0; row < load.rows; ++row) {
    model::Sequence s{.id = static_cast<std::uint64_t>(row), .prompt = {}, .sampling = {}};
    for (std::int64_t t = 0; t < load.prompt; ++t)  // no two alike: those would be read once
      s.prompt.push_back(static_cast<model::Token>((7 * row + 3 * t) % model->config().vocab_size));
    s.sampling.tokens_max = load.tokens + 1;
    s.sampling.seed = s.id;
    if (const Status added = batch.add(std::move(s)); !added) throw std::runtime_error(added.error().message());
  }
  const auto seconds = [](auto&& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  Speed speed;
  speed.reading = double(load.rows * load.prompt) / seconds([&] { batch.step(); });
  if (load.tokens > 0)
    speed.drawing = double(load.rows * load.tokens) / seconds([&] {
                      for (std::int64_t t = 0; t < load.tokens; ++t) batch.step();
                    });
  speed.kernels = batch.kernels();
  return speed;
}

// The number behind "key": in a line of JSON.
double number_in(std::string_view line, std::string_view key) {
  const std::size_t at = line.find(fmt::format("\"{}\":", key));
  return at == std::string_view::npos ? 0 : std::strtod(line.data() + at + key.size() + 3, nullptr);
}

Speed llama(const std::string& program, const std::string& gguf, int threads, const Load& load) {
  const std::int64_t context = load.rows * (load.prompt + std::max<std::int64_t>(load.tokens, 1));
  const std::string command = fmt::format(
      "'{}' -m '{}' -t {} -tb {} -c {} -b 2048 -ub 512 -npp {} -ntg {} -npl {} --output-format jsonl 2>/dev/null",
      program, gguf, threads, threads, std::max<std::int64_t>(context, 64), load.prompt,
      std::max<std::int64_t>(load.tokens, 1), load.rows);
  FILE* const child = ::popen(command.c_str(), "r");
  if (child == nullptr) throw std::runtime_error("cannot start " + program);
  std::string text;
  char part[4096];
  while (const std::size_t count = std::fread(part, 1, sizeof part, child)) text.append(part, count);
  ::pclose(child);
  const Speed speed{number_in(text, "speed_pp"), number_in(text, "speed_tg")};
  if (!(speed.reading > 0)) throw std::runtime_error(fmt::format("no result from: {}", command));
  return speed;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Options {
  std::string preset = "qwen3-0.6b", program, gguf = "/tmp/decode_bench.gguf", device = "cpu";
  int threads = 2, repeats = 3;
  std::vector<std::int64_t> batches = {1, 4, 16, 64};
  std::int64_t prompt = 512, tokens = 16;
};

int run_on_gpu(const Options& options) {
  const ModelConfig config = model::preset(options.preset).value();
  const auto device = model::device_named(options.device);
  if (!device) {
    fmt::print(stderr, "decode_bench: {}\n", device.error().message());
    return 1;
  }
  const auto model = random_weights(config, *device);
  const torch::Tensor from = torch::zeros({std::int64_t{1} << 30}, torch::TensorOptions(*device).dtype(torch::kByte));
  torch::Tensor to = torch::empty_like(from);
  std::vector<double> copies;
  for (int i = 0; i < 10; ++i) {
    torch::cuda::synchronize();
    const auto begin = std::chrono::steady_clock::now();
    to.copy_(from);
    torch::cuda::synchronize();
    copies.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  to = torch::Tensor();
  const double bandwidth = 2 * double(1 << 30) / median(copies);  // read and written
  const std::uint64_t weights =  // of the embedding, a row for each token unless it is the head as well
      2 * (config.parameters() - (config.tie_embeddings ? 0 : std::uint64_t(config.vocab_size * config.hidden_size)));
  fmt::print("{} on {}, bf16; a copy reads and writes {:.0f} GB/s; {} tokens behind prompts of {}\n", options.preset,
             options.device, bandwidth / 1e9, options.tokens, options.prompt);
  fmt::print("{:>5} {:>10} {:>9} {:>8} {:>9} {:>6} {:>12}   {:>34}\n", "rows", "tokens/s", "ms/step", "kernels",
             "bound ms", "share", "read, /s", "by operations: tokens/s, read, /s");
  for (const std::int64_t rows : options.batches) {
    const Load load{rows, options.prompt, options.tokens};
    std::vector<double> speeds, readings;
    Speed one;
    for (int repeat = -1; repeat < options.repeats; ++repeat) {  // the first one warms up
      one = ours(model, load);
      if (repeat < 0) continue;
      speeds.push_back(one.drawing);
      readings.push_back(one.reading);
    }
    const Speed operations = ours(model, {rows, options.prompt, std::min<std::int64_t>(options.tokens, 32)}, false);
    const double cache = double(rows) * (double(options.prompt) + double(options.tokens) / 2) *
                         double(model::memory_estimate(config).kv_cache_per_token.count);
    const double step = double(rows) / median(speeds), bound = (double(weights) + cache) / bandwidth;
    fmt::print("{:5} {:10.0f} {:9.3f} {:8} {:9.3f} {:6.2f} {:12.0f}   {:22.0f} {:11.0f}\n", rows, median(speeds),
               step * 1e3, one.kernels, bound * 1e3, bound / step, median(readings), operations.drawing,
               operations.reading);
    std::fflush(stdout);
  }
  return 0;
}

int run(const Options& options) {
  if (options.device != "cpu") return run_on_gpu(options);
  const ModelConfig config = model::preset(options.preset).value();
  model::use_threads(options.threads);
  model::keep_freed_memory();
  const auto model = random_weights(config);
  if (!options.program.empty()) Gguf(options.gguf).write(config, *model);
  std::vector<std::pair<std::string, Load>> loads;
  for (const std::int64_t rows : options.batches)
    loads.emplace_back(fmt::format("decode, batch {}", rows), Load{rows, 16, options.tokens});
  loads.emplace_back(fmt::format("prompt of {} tokens", options.prompt), Load{1, options.prompt, 0});
  fmt::print("{}, bf16 weights, {} thread{}, kernels {}; tokens/s\n", options.preset, options.threads,
             options.threads == 1 ? "" : "s", model::runtime().kernels);
  for (const auto& [name, load] : loads) {
    const auto of = [&](const Speed& speed) { return load.tokens > 0 ? speed.drawing : speed.reading; };
    std::vector<double> all, single, peer, speedup, ratio;
    for (int repeat = 0; repeat < options.repeats; ++repeat) {
      model::use_threads(options.threads);
      if (repeat == 0) ours(model, {load.rows, load.prompt, 1});  // warms up
      all.push_back(of(ours(model, load)));
      if (options.threads > 1) {
        model::use_threads(1);
        single.push_back(of(ours(model, load)));
        speedup.push_back(all.back() / single.back());
      }
      if (!options.program.empty()) {
        peer.push_back(of(llama(options.program, options.gguf, options.threads, load)));
        ratio.push_back(all.back() / peer.back());
      }
    }
    fmt::print("{:<22} {:9.1f}", name, median(all));
    if (!single.empty()) fmt::print("   one thread {:9.1f}: {:5.2f} x", median(single), median(speedup));
    if (!peer.empty()) fmt::print("   llama.cpp {:9.1f}: {:5.2f} x", median(peer), median(ratio));
    fmt::print("\n");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace echoline

int main(int argc, char** argv) {
  echoline::Options options;
  bool smoke = false;
  CLI::App app{"Prompts read and tokens drawn by the built-in engine, beside llama.cpp"};
  app.add_option("--preset", options.preset, "a published shape of the Qwen3 family");
  app.add_option("--threads", options.threads, "of both")->check(CLI::Range(1, 1024));
  app.add_option("--batch", options.batches, "rows that are drawn together")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024));
  app.add_option("--prompt", options.prompt, "tokens of the prompt that is read")->check(CLI::Range(1, 8192));
  app.add_option("--tokens", options.tokens, "drawn for every row")->check(CLI::Range(1, 4096));
  app.add_option("--repeats", options.repeats, "of every measurement; the median counts")->check(CLI::Range(1, 100));
  app.add_option("--llama", options.program, "llama.cpp's llama-batched-bench; absent: this engine alone");
  app.add_option("--device", options.device, "cpu, cuda or cuda:N");
  app.add_option("--gguf", options.gguf, "where the weights are written for it");
  app.add_flag("--smoke", smoke, "a tiny shape");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  if (smoke) {
    options.preset = "tiny-64";
    options.program = "";
    options.batches = {1, 8};
    options.prompt = 40;
    options.tokens = 4;
    options.repeats = 1;
  }
  try {
    return echoline::run(options);
  } catch (const std::exception& e) {
    fmt::print(stderr, "decode_bench: {}\n", e.what());
    return 1;
  }
}
