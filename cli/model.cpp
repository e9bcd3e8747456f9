// echoline model init | info: make a model directory, or say what one holds and needs. model_use.cpp has the rest.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/model_verbs.hpp"
#include "cli/verbs.hpp"
#include "model/policy.hpp"

namespace echoline::cli {
namespace {

struct InitArguments {
  std::string preset, output;
  std::uint64_t seed = 1;
};

Status init_model(const InitArguments& a) {
  ECHO_ASSIGN(const model::ModelFiles files, model::ModelFiles::of_preset(a.preset));
  if (files.config.vocab_size > 4096)
    return fail(Code::kInvalid, "model init",
                "preset '{}' needs the tokenizer of a published model; only tiny-* and bytes-* come with their own",
                a.preset);
  if (std::filesystem::exists(std::filesystem::path(a.output) / "config.json"))
    return fail(Code::kInvalid, "model init", "{} holds a model already; choose another folder", a.output);
  ECHO_ASSIGN(const delta::OwnedState policy, model::init_policy(files.config, a.seed));
  return model::save_model(a.output, files, policy.view());
}

struct InfoArguments {
  std::string folder, preset;
  bool json = false;
};

int info(const InfoArguments& a) {
  if (a.folder.empty() == a.preset.empty())
    return complain("model info", fail(Code::kInvalid, "", "expected a model folder or --preset, exactly one of them"));
  std::optional<model::ModelConfig> config;
  if (!a.preset.empty()) {
    auto preset = model::preset(a.preset);
    if (!preset) return complain("model info", preset.error());
    config = *preset;
  } else {
    const auto files = model::ModelFiles::read(a.folder);
    if (!files) return complain("model info", files.error());
    if (const Status checked = model::check_weights(a.folder, files->config); !checked)
      return complain("model info", checked.error());
    config = files->config;
  }
  const model::MemoryEstimate memory = model::memory_estimate(*config);
  if (a.json) {
    fmt::print("{}\n", nlohmann::json{{"schema_version", 1},
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
  return 0;
}

}  // namespace

void add_model(Verb& app, int& exit) {
  auto* verb = app.add_verb("model", "Make a tiny model, look at one, take one out of a run, hear what it says");
  verb->needs_verb();
  std::string names;
  for (const std::string& name : model::preset_names()) names += (names.empty() ? "" : ", ") + name;

  auto* init = verb->add_verb("init", "Write a freshly initialised model as a Hugging Face directory");
  auto i = std::make_shared<InitArguments>();
  init->add_option("--preset", i->preset, "one of: " + names)->required();
  init->add_option("-o,--output", i->output, "folder to write")->required();
  init->add_option("--seed", i->seed, "of the random weights");
  init->callback([i, &exit] {
    const Status done = init_model(*i);
    exit = done ? 0 : complain("model init", done.error());
    if (done) fmt::print("{}\n", i->output);
  });

  auto* show = verb->add_verb("info", "Print parameters and memory; checks every shard of a directory");
  auto s = std::make_shared<InfoArguments>();
  show->add_option("folder", s->folder, "Hugging Face model directory");
  show->add_option("--preset", s->preset, "instead of a folder, one of: " + names);
  show->add_flag("--json", s->json, "print JSON");
  show->callback([s, &exit] { exit = info(*s); });
  add_model_use(*verb, exit);
}

}  // namespace echoline::cli
