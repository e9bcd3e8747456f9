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

Status init_model(const InitArguments& a) {
  ECHO_ASSIGN(const model::ModelFiles files, model::ModelFiles::of_preset(a.preset));
  if (std::filesystem::exists(std::filesystem::path(a.output) / "config.json"))
    return fail(Code::kInvalid, "model init", "{} already contains a model; choose another folder", a.output);
  ECHO_ASSIGN(const delta::OwnedState policy, model::init_policy(files.config, a.seed));
  return model::save_model(a.output, files, policy.view());
}

struct InfoArguments {
  std::string folder, preset;
  bool json = false, train = false, bf16 = false, int8 = false, recompute = false, reference = false;
  std::int64_t microbatch_tokens = 8192, tokens = 1024;
};

// Prints the memory that a learner step needs with these settings, part by part.
int train_info(const InfoArguments& a, const model::ModelConfig& config) {
  const model::TrainingMemory m = model::training_memory(
      config,
      {a.bf16, a.int8, a.reference, a.recompute, a.microbatch_tokens, std::min(a.tokens, config.positions_max)});
  const std::pair<const char*, Bytes> parts[] = {
      {"weights", m.weights},   {"gradients", m.gradients}, {"optimizer", m.optimizer}, {"activations", m.activations},
      {"passing", m.transient}, {"program", m.program},     {"total", m.total()}};
  if (a.json) {
    nlohmann::json out{{"schema_version", 1}, {"parameters", config.parameters()}};
    for (const auto& [name, size] : parts) out[fmt::format("{}_bytes", name)] = size.count;
    fmt::print("{}\n", out.dump(2));
    return 0;
  }
  const char* meanings[] = {a.reference ? "the policy and the reference policy" : "the policy",
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

// Returns the |w| below which 5, 50 and 95 % of the values lie, of a sample of about 2^24 values in a large model.
std::array<float, 3> magnitudes(const delta::StateView& state) {
  std::vector<std::uint64_t> counts(1u << 15);  // by the bits of exponent and upper mantissa, so in order of |w|
  std::uint64_t bytes = 0, sampled = 0;
  for (const delta::TensorView& t : state) bytes += t.bytes.size();
  const std::size_t sample_every = bytes / (1u << 25) + 1;
  for (const delta::TensorView& t : state) {
    const std::size_t width = t.dtype == delta::DType::kBF16 ? 2 : 4;
    for (std::size_t at = width - 2; at + 2 <= t.bytes.size(); at += sample_every * width, ++sampled) {
      std::uint16_t upper = 0;
      std::memcpy(&upper, t.bytes.data() + at, sizeof upper);
      ++counts[upper & 0x7fff];
    }
  }
  constexpr std::array<std::uint64_t, 3> kPercentages{5, 50, 95};
  std::array<float, 3> magnitudes_found{};
  std::uint64_t below = 0;
  for (std::uint32_t i = 0, q = 0; q < magnitudes_found.size() && i < counts.size(); ++i)
    for (below += counts[i]; q < magnitudes_found.size() && 100 * below >= kPercentages[q] * sampled; ++q)
      magnitudes_found[q] = std::bit_cast<float>(i << 16);
  return magnitudes_found;
}

int info(const InfoArguments& a) {
  if (a.folder.empty() == a.preset.empty())
    return report_error("model info", fail(Code::kInvalid, "", "expected either a model folder or --preset"));
  std::optional<model::ModelConfig> config;
  std::optional<std::array<float, 3>> weights;
  if (!a.preset.empty()) {
    auto preset = model::preset(a.preset);
    if (!preset) return report_error("model info", preset.error());
    config = *preset;
  } else {
    if (a.train) {  // train_info() needs only the shape
      const auto shape = model::ModelConfig::from_folder(a.folder);
      return shape ? train_info(a, *shape) : report_error("model info", shape.error());
    }
    const auto files = model::ModelFiles::read(a.folder);
    if (!files) return report_error("model info", files.error());
    if (const Status checked = model::check_weights(a.folder, files->config); !checked)
      return report_error("model info", checked.error());
    const auto checkpoint = delta::Checkpoint::open(a.folder);
    if (!checkpoint) return report_error("model info", checkpoint.error());
    config = files->config;
    weights = magnitudes(checkpoint->view());
  }
  if (a.train) return train_info(a, *config);
  const model::MemoryEstimate memory = model::memory_estimate(*config);
  if (a.json) {
    nlohmann::json spread;
    if (weights) spread = {{"p05", (*weights)[0]}, {"p50", (*weights)[1]}, {"p95", (*weights)[2]}};
    fmt::print("{}\n", nlohmann::json{{"schema_version", 1},
                                      {"weight_magnitudes", spread},
                                      {"parameters", config->parameters()},
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

void add_model(Verb& app, int& exit_code) {
  auto* verb = app.add_verb("model", "Make a tiny model, show a model, export a run's model, or generate with one");
  verb->require_verb();
  std::string names;
  for (const std::string& name : model::preset_names()) names += (names.empty() ? "" : ", ") + name;

  auto* init = verb->add_verb("init", "Write a newly initialised model as a Hugging Face directory");
  auto i = std::make_shared<InitArguments>();
  init->add_option("--preset", i->preset, "one of: " + names)->required();
  init->add_option("-o,--output", i->output, "folder to write")->required();
  init->add_option("--seed", i->seed, "of the random weights");
  init->callback([i, &exit_code] {
    const Status done = init_model(*i);
    exit_code = done ? 0 : report_error("model init", done.error());
    if (done) fmt::print("{}\n", i->output);
  });

  auto* show = verb->add_verb(
      "info", "Print parameters, memory and, of a directory whose shards it checks, how large the weights are");
  auto s = std::make_shared<InfoArguments>();
  show->add_option("folder", s->folder, "Hugging Face model directory");
  show->add_option("--preset", s->preset, "use a preset instead of a folder; one of: " + names);
  show->add_flag("--json", s->json, "print JSON");
  show->add_flag("--train", s->train, "the memory that a learner step needs with the settings below");
  show->add_flag("--bf16", s->bf16, "learner.compute: bf16");
  show->add_flag("--int8", s->int8, "learner.moments: int8");
  show->add_flag("--recompute", s->recompute, "learner.recompute: true");
  show->add_flag("--reference", s->reference, "learner.kl_coefficient above 0");
  show->add_option("--microbatch-tokens", s->microbatch_tokens, "learner.microbatch_tokens")->positive();
  show->add_option("--tokens", s->tokens, "of the longest prompt and response together")->positive();
  show->callback([s, &exit_code] { exit_code = info(*s); });
  add_model_use(*verb, exit_code);
}

}  // namespace echoline::cli
