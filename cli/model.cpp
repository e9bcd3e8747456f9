// echoline model init: makes a model directory. echoline model info: shows its content and the memory it needs.
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "cli/model_verbs.hpp"
#include "cli/verbs.hpp"
#include "delta/checkpoint.hpp"
#include "model/policy.hpp"
#include "model/training_memory.hpp"

namespace echoline::cli {
namespace {

struct InitArguments {
  std::string preset, output;
  std::uint64_t seed = 1;
};

Status init_model(const InitArguments& args) {
  ECHO_ASSIGN(const model::ModelFiles files, model::ModelFiles::of_preset(args.preset));
  if (std::filesystem::exists(std::filesystem::path(args.output) / "config.json"))
    return fail(Code::kInvalid, "model init", "{} already contains a model; choose another folder", args.output);
  ECHO_ASSIGN(const delta::OwnedState policy, model::init_policy(files.config, args.seed));
  return model::save_model(args.output, files, policy.view());
}

struct InfoArguments {
  std::string folder, preset;
  bool json = false, train = false, bf16 = false, int8 = false, recompute = false, reference = false;
  std::int64_t microbatch_tokens = 8192, tokens = 1024, adapter_rank = 0;
};

// Prints the memory that a learner step needs with these settings, part by part. Returns the exit code.
int print_training_memory(const InfoArguments& args, model::ModelConfig config) {
  if (args.adapter_rank > 0) {
    config.adapter.emplace();
    config.adapter->rank = args.adapter_rank;
    config.adapter->alpha = 2 * static_cast<double>(args.adapter_rank);  // any value: the memory does not depend on it
  }
  const model::TrainingMemory memory =
      model::training_memory(config, {.bf16 = args.bf16,
                                      .int8_moments = args.int8,
                                      .reference = args.reference,
                                      .recompute = args.recompute,
                                      .microbatch_tokens = args.microbatch_tokens,
                                      .sequence_tokens = std::min(args.tokens, config.positions_max)});
  const std::pair<const char*, Bytes> parts[] = {{"weights", memory.weights},     {"gradients", memory.gradients},
                                                 {"optimizer", memory.optimizer}, {"activations", memory.activations},
                                                 {"passing", memory.transient},   {"program", memory.program},
                                                 {"total", memory.total()}};
  if (args.json) {
    nlohmann::json out{{"schema_version", 1},
                       {"parameters", config.parameters()},
                       {"active_parameters", config.active_parameters()},
                       {"adapter_parameters", config.adapter_parameters()}};
    for (const auto& [name, size] : parts) out[fmt::format("{}_bytes", name)] = size.count;
    fmt::print("{}\n", out.dump(2));
    return 0;
  }
  const char* meanings[] = {// in the order of `parts`
                            args.reference ? "the policy and the reference policy" : "the policy",
                            "summed in fp32",
                            "masters and two moments",
                            "stored for the gradient, for one micro-batch",
                            "logits and the gradients that pass between layers",
                            "the program, its libraries, the allocator's slack",
                            "the peak during a learner step"};
  std::size_t i = 0;
  for (const auto& [name, size] : parts) fmt::print("{:<14}{:<12}({})\n", name, to_text(size), meanings[i++]);
  return 0;
}

// Returns the |w| below which 5, 50 and 95 % of the weights lie, of a sample of about 2^24 weights in a large model.
// Counts by the upper 15 bits without the sign, which are exponent and upper mantissa both of bf16 and of fp32. Their
// order as numbers is that of |w|.
std::array<float, 3> magnitude_percentiles(const delta::StateView& state) {
  constexpr std::size_t kUpperValues = 1u << 15;     // number of values of the upper 15 bits
  constexpr std::uint64_t kSampledBytes = 1u << 25;  // 2^24 weights of bf16
  std::vector<std::uint64_t> counts(kUpperValues);
  std::uint64_t bytes = 0, sampled = 0;
  for (const delta::TensorView& tensor : state) bytes += tensor.bytes.size();
  const std::size_t sample_every = bytes / kSampledBytes + 1;
  for (const delta::TensorView& tensor : state) {
    const std::size_t element_bytes = tensor.dtype == delta::DType::kBF16 ? 2 : 4;
    const std::size_t first_upper = element_bytes - 2;  // little endian: the upper bytes are last
    for (std::size_t offset = first_upper; offset + 2 <= tensor.bytes.size();
         offset += sample_every * element_bytes, ++sampled) {
      std::uint16_t upper_bits = 0;
      std::memcpy(&upper_bits, tensor.bytes.data() + offset, sizeof upper_bits);
      ++counts[upper_bits & (kUpperValues - 1)];
    }
  }
  constexpr std::array<std::uint64_t, 3> kPercentages{5, 50, 95};
  std::array<float, 3> percentiles{};
  std::uint64_t weights_below = 0;
  for (std::uint32_t bits = 0, p = 0; p < percentiles.size() && bits < counts.size(); ++bits)
    for (weights_below += counts[bits]; p < percentiles.size() && 100 * weights_below >= kPercentages[p] * sampled; ++p)
      percentiles[p] = std::bit_cast<float>(bits << 16);
  return percentiles;
}

// Prints a model's shape and the memory it needs. Returns the exit code.
int print_info(const InfoArguments& args) {
  if (args.folder.empty() == args.preset.empty())
    return report_error("model info", fail(Code::kInvalid, "", "expected either a model folder or --preset"));
  std::optional<model::ModelConfig> config;
  std::optional<std::array<float, 3>> weights;
  if (!args.preset.empty()) {
    auto preset = model::preset(args.preset);
    if (!preset) return report_error("model info", preset.error());
    config = *preset;
  } else {
    if (args.train) {  // the memory depends only on the shape
      const auto shape = model::ModelConfig::from_folder(args.folder);
      return shape ? print_training_memory(args, *shape) : report_error("model info", shape.error());
    }
    const auto shape = model::ModelConfig::from_folder(args.folder, model::ModelUse::kCarry);
    if (!shape) return report_error("model info", shape.error());
    if (shape->family == model::Family::kCarried) return print_carried_model(*shape, args.folder, args.json);
    const auto files = model::ModelFiles::read(args.folder);
    if (!files) return report_error("model info", files.error());
    if (const Status checked = model::check_weights(args.folder, files->config); !checked)
      return report_error("model info", checked.error());
    const auto checkpoint = delta::Checkpoint::open(args.folder);
    if (!checkpoint) return report_error("model info", checkpoint.error());
    config = files->config;
    weights = magnitude_percentiles(checkpoint->view());
  }
  if (args.train) return print_training_memory(args, *config);
  const model::MemoryEstimate memory = model::memory_estimate(*config);
  if (args.json) {
    nlohmann::json magnitudes;
    if (weights) magnitudes = {{"p05", (*weights)[0]}, {"p50", (*weights)[1]}, {"p95", (*weights)[2]}};
    fmt::print("{}\n", nlohmann::json{{"schema_version", 1},
                                      {"weight_magnitudes", magnitudes},
                                      {"parameters", config->parameters()},
                                      {"active_parameters", config->active_parameters()},
                                      {"layers", config->layers},
                                      {"hidden_size", config->hidden_size},
                                      {"heads", config->heads},
                                      {"kv_heads", config->kv_heads},
                                      {"vocab_size", config->vocab_size},
                                      {"tied_embeddings", config->tie_embeddings},
                                      {"policy_bytes", memory.policy_bf16.count},
                                      {"training_bytes", memory.training.count},
                                      {"kv_cache_bytes_per_token", memory.kv_cache_per_token.count}}
                           .dump(2));
    return 0;
  }
  fmt::print("{:<22}{}\n", "parameters", config->parameters());
  if (config->experts)
    fmt::print("{:<22}{}  (compute one token: {} of {} experts in {} layers)\n", "active parameters",
               config->active_parameters(), config->experts->per_token, config->experts->count,
               config->mixture_layers());
  fmt::print("{:<22}{} layers, hidden {}, {} heads ({} key/value) of {}, vocabulary {}, {} embeddings\n", "shape",
             config->layers, config->hidden_size, config->heads, config->kv_heads, config->head_dim, config->vocab_size,
             config->tie_embeddings ? "tied" : "untied");
  fmt::print("{:<22}{}  (what a full broadcast carries, and a worker holds)\n", "policy, bf16",
             to_text(memory.policy_bf16));
  fmt::print("{:<22}{}  (policy and gradient bf16; masters and two moments fp32)\n", "training",
             to_text(memory.training));
  fmt::print("{:<22}{}\n", "KV cache per token", to_text(memory.kv_cache_per_token));
  if (weights)
    fmt::print("{:<22}half of them below {:.3g}, 5 % below {:.3g}, 5 % above {:.3g}\n", "magnitude of weights",
               (*weights)[1], (*weights)[0], (*weights)[2]);
  return 0;
}

}  // namespace

void add_model(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("model", "Make a tiny model, show a model, export a run's model, or generate with one");
  verb->require_verb();
  std::string names;
  for (const std::string& name : model::preset_names()) names += (names.empty() ? "" : ", ") + name;

  auto* init = verb->add_verb("init", "Write a newly initialised model as a Hugging Face directory");
  auto init_args = std::make_shared<InitArguments>();
  init->add_option("--preset", init_args->preset, "one of: " + names)->required();
  init->add_option("-o,--output", init_args->output, "folder to write")->required();
  init->add_option("--seed", init_args->seed, "seed of the random weights");
  init->callback([init_args, &exit_code] {
    const Status done = init_model(*init_args);
    exit_code = done ? 0 : report_error("model init", done.error());
    if (done) fmt::print("{}\n", init_args->output);
  });

  auto* info = verb->add_verb(
      "info", "Print parameters, memory and, of a directory whose shards it checks, how large the weights are");
  auto info_args = std::make_shared<InfoArguments>();
  info->add_option("folder", info_args->folder, "Hugging Face model directory");
  info->add_option("--preset", info_args->preset, "use a preset instead of a folder; one of: " + names);
  info->add_flag("--json", info_args->json, "print JSON");
  info->add_flag("--train", info_args->train, "the memory that a learner step needs with the settings below");
  info->add_flag("--bf16", info_args->bf16, "learner.compute: bf16");
  info->add_flag("--int8", info_args->int8, "learner.moments: int8");
  info->add_flag("--recompute", info_args->recompute, "learner.recompute: true");
  info->add_flag("--reference", info_args->reference, "learner.kl_coefficient above 0");
  info->add_option("--adapter-rank", info_args->adapter_rank, "learner.adapter.rank, on all targets of its default")
      ->range(0, static_cast<int>(model::kAdapterRankMax));
  info->add_option("--microbatch-tokens", info_args->microbatch_tokens, "learner.microbatch_tokens")->positive();
  info->add_option("--tokens", info_args->tokens, "tokens of the longest prompt and response together")->positive();
  info->callback([info_args, &exit_code] { exit_code = print_info(*info_args); });
  add_model_use(*verb, exit_code);
}

}  // namespace echoline::cli
