// echoline model export: copies the model of a run into a folder. echoline model generate: lets a model continue a
// text.
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "cli/built_in.hpp"
#include "cli/model_verbs.hpp"
#include "cli/verbs.hpp"
#include "delta/checkpoint.hpp"
#include "delta/digest.hpp"
#include "learner/checkpoint_folder.hpp"
#include "model/phrasing.hpp"
#include "model/policy.hpp"

namespace echoline::cli {
namespace {

using nlohmann::ordered_json;

struct ExportArguments {
  std::string run, output;
  bool json = false, merged = false, adapter = false;
};

// The policy of a checkpoint. `run` is RUN, for the newest one, or RUN@STEP. If there is a run whose whole name is
// `run`, an @ in it is part of the name.
Result<learner::StoredPolicy> find_policy_of(const std::string& run) {
  const auto run_folder = find_run(run);
  if (run_folder) return learner::find_policy(*run_folder / "checkpoints");
  const std::size_t at_sign = run.rfind('@');
  if (at_sign == std::string::npos) return run_folder.error();
  const std::string step = run.substr(at_sign + 1);
  constexpr std::size_t kDigitsMax = 18;  // always fit into 64 bits
  if (step.empty() || step.size() > kDigitsMax || step.find_first_not_of("0123456789") != std::string::npos)
    return fail(Code::kInvalid, "find run", "expected RUN@STEP with a number of learner steps, found '{}'", run);
  ECHO_ASSIGN(const std::filesystem::path folder, find_run(run.substr(0, at_sign)));
  return learner::find_policy(folder / "checkpoints", std::stoll(step));
}

// The difference between the log-probabilities of a policy and of the model that its adapter is merged into, over the
// tokens of model::probe_text(). Absent in a program without libtorch.
struct MergeDifference {
  std::size_t tokens = 0;
  double mean = 0, most = 0;  // absolute differences in nats
};
Result<std::optional<MergeDifference>> compare_with_merged(const delta::StateView& policy,
                                                           const delta::StateView& merged,
                                                           const model::ModelConfig& config) {
  const learner::PolicyProbe probe = built_in_trainer().probe;
  if (!probe || !config.check_computable()) return std::optional<MergeDifference>();
  model::ModelConfig merged_config = config;
  merged_config.adapter.reset();
  ECHO_ASSIGN(const std::vector<double> before, probe(policy, config, /*temperature=*/1.0, /*threads=*/1));
  ECHO_ASSIGN(const std::vector<double> after, probe(merged, merged_config, /*temperature=*/1.0, /*threads=*/1));
  MergeDifference difference{.tokens = before.size()};
  for (std::size_t i = 0; i < before.size(); ++i) {
    difference.mean += std::abs(before[i] - after[i]) / static_cast<double>(before.size());
    difference.most = std::max(difference.most, std::abs(before[i] - after[i]));
  }
  return std::optional(difference);
}

// Writes the model of a policy with an adapter: whole, with the adapter merged into the weights, or only the adapter.
Result<std::optional<MergeDifference>> export_adapted(const ExportArguments& args, const std::filesystem::path& folder,
                                                      const delta::StateView& policy) {
  std::optional<MergeDifference> difference;
  ECHO_ASSIGN(model::ModelFiles files, model::ModelFiles::read(folder, model::ModelUse::kCarry));
  const std::filesystem::path output = std::filesystem::absolute(args.output).lexically_normal();
  if (std::filesystem::exists(output))
    return fail(Code::kInvalid, "write model directory", "{} exists already; choose another folder", output.string());
  if (args.adapter) {
    ECHO_TRY(make_folders(output));
    ECHO_TRY(delta::write_safetensors(output / delta::kAdapterFileName, model::split_adapter(policy).adapter,
                                      {{"format", "pt"}}));
    ECHO_TRY(write_file_atomic(output / model::kAdapterConfigFile, files.config.adapter->to_json()));
    return difference;
  }
  if (args.merged) {
    ECHO_ASSIGN(const delta::OwnedState merged, model::merge_adapter(policy, *files.config.adapter));
    ECHO_ASSIGN(difference, compare_with_merged(policy, merged.view(), files.config));
    files.config.adapter.reset();
    ECHO_TRY(model::save_model(output, files, merged.view()));
    return difference;
  }
  files.config.adapter->base_model = output.string();
  ECHO_TRY(model::save_model(output, files, policy));
  return difference;
}

int export_model(const ExportArguments& args) {
  std::optional<MergeDifference> difference;
  const auto exported = [&]() -> Result<learner::StoredPolicy> {
    ECHO_ASSIGN(learner::StoredPolicy policy, find_policy_of(args.run));
    ECHO_ASSIGN(const auto weights, delta::Checkpoint::open(policy.model));
    ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(weights.view()));
    if (digest.hex() != policy.digest)
      return fail(Code::kCorrupt, "read policy", "{} has digest {}, but the checkpoint states {}",
                  policy.model.string(), digest.hex(), policy.digest);
    const bool has_adapter = std::filesystem::exists(policy.model / model::kAdapterConfigFile);
    if (!has_adapter && (args.merged || args.adapter))
      return fail(Code::kInvalid, "model export", "the policy of {} has no adapter: leave out --merged and --adapter",
                  args.run);
    if (has_adapter) {
      ECHO_ASSIGN(difference, export_adapted(args, policy.model, weights.view()));
      return policy;
    }
    ECHO_TRY(model::place_directory(policy.model, args.output, /*link=*/false));
    return policy;
  }();
  if (!exported) return report_error("model export", exported.error());
  if (args.json) {
    ordered_json out{
        {"schema_version", 1}, {"folder", args.output}, {"step", exported->step}, {"digest", exported->digest}};
    if (difference) out["merged_logprob_difference"] = {{"mean", difference->mean}, {"max", difference->most}};
    fmt::print("{}\n", out.dump(2));
    return 0;
  }
  fmt::print("{}\n", args.output);
  if (difference)
    fmt::print(
        "the rounding of the merged weights changes log-probabilities by {:.2g} nats on average and by {:.2g} "
        "at most, over {} tokens\n",
        difference->mean, difference->most, difference->tokens);
  return 0;
}

struct GenerateArguments {
  std::string folder, prompt, system, device = "cpu";
  std::optional<std::string> continuation;
  bool chat = false, logprobs = false, json = false;
  std::int64_t tokens_max = 64;
  double temperature = 1.0, top_p = 1.0;
  std::uint64_t seed = 0;
};

struct GeneratedText {
  std::string prompt, text, finish;  // finish: "eos", "length", or "given" for a scored text
  std::vector<model::Token> prompt_tokens, tokens;
  std::vector<std::string> pieces;  // the text of each token
  std::vector<float> logprobs;
};

Result<GeneratedText> continue_prompt(const GenerateArguments& args) {
  ECHO_ASSIGN(const model::ModelFiles files, model::ModelFiles::read(args.folder));
  model::PromptStyle style;
  style.chat = args.chat;
  style.system = args.system;
  ECHO_ASSIGN(const model::Phrasing phrasing, model::Phrasing::make(files, style));
  GeneratedText result;
  ECHO_ASSIGN(result.prompt, phrasing.prompt_text(args.prompt));
  ECHO_ASSIGN(result.prompt_tokens, phrasing.prompt(args.prompt));
  if (args.continuation) {
    ECHO_ASSIGN(result.tokens, phrasing.tokenizer().encode(*args.continuation));
    ECHO_ASSIGN(result.logprobs, score_continuation(args.folder, args.device, result.prompt_tokens, result.tokens,
                                                    args.temperature > 0 ? args.temperature : 1.0));
    result.finish = "given";
  } else {
    model::Sampling sampling;
    sampling.temperature = args.temperature;
    sampling.top_p = args.top_p;
    sampling.tokens_max = args.tokens_max;
    sampling.eos = phrasing.eos();
    sampling.seed = args.seed;
    ECHO_ASSIGN(model::Generation generation,
                generate_response(args.folder, args.device, result.prompt_tokens, sampling));
    result.finish = generation.finish == model::Finish::kEos ? "eos" : "length";
    result.tokens = std::move(generation.tokens);
    result.logprobs = std::move(generation.logprobs);
  }
  result.text = phrasing.answer(result.tokens);
  for (const model::Token token : result.tokens) result.pieces.push_back(phrasing.tokenizer().decode({&token, 1}));
  return result;
}

std::string json_dump(const ordered_json& value, int indent) {
  // A token may be a part of a UTF-8 character, so its text may not be UTF-8.
  return value.dump(indent, ' ', /*ensure_ascii=*/false, ordered_json::error_handler_t::replace);
}

int generate(const GenerateArguments& args) {
  const auto result = continue_prompt(args);
  if (!result) return report_error("model generate", result.error());
  if (args.json) {
    ordered_json tokens = ordered_json::array();
    double sum = 0;
    for (std::size_t i = 0; i < result->tokens.size(); ++i) {
      tokens.push_back({{"id", result->tokens[i]}, {"text", result->pieces[i]}, {"logprob", result->logprobs[i]}});
      sum += result->logprobs[i];
    }
    fmt::print("{}\n", json_dump({{"schema_version", 1},
                                  {"prompt", result->prompt},
                                  {"prompt_tokens", result->prompt_tokens},
                                  {"text", result->text},
                                  {"finish", result->finish},
                                  {"logprob_sum", sum},
                                  {"tokens", tokens}},
                                 /*indent=*/2));
  } else if (args.logprobs) {
    fmt::print("{:>8}  {:>12}  text\n", "id", "logprob");
    for (std::size_t i = 0; i < result->tokens.size(); ++i)
      fmt::print("{:>8}  {:>12.6f}  {}\n", result->tokens[i], result->logprobs[i],
                 json_dump(result->pieces[i], /*indent=*/-1));
  } else {
    fmt::print("{}\n", result->text);
  }
  return 0;
}

}  // namespace

void add_model_use(Verb& verb, int& exit_code) {
  auto* export_verb = verb.add_verb("export", "Copy the policy of a run into a separate Hugging Face directory");
  auto export_args = std::make_shared<ExportArguments>();
  export_verb
      ->add_option("run", export_args->run,
                   "RUN or RUN@STEP: name or folder of a run, and the step of one of its checkpoints "
                   "(default: the newest)")
      ->required();
  export_verb->add_option("-o,--output", export_args->output, "folder to create; must not exist")->required();
  auto* merged = export_verb->add_flag("--merged", export_args->merged,
                                       "add the adapter to the weights, and print what their rounding changes");
  export_verb->add_flag("--adapter", export_args->adapter, "only the adapter, as a directory of PEFT")
      ->excludes(merged);
  export_verb->add_flag("--json", export_args->json, "print JSON");
  export_verb->callback([export_args, &exit_code] { exit_code = export_model(*export_args); });

  auto* generate_verb = verb.add_verb("generate", "Continue a prompt, or score a given continuation");
  auto generate_args = std::make_shared<GenerateArguments>();
  generate_verb->add_option("folder", generate_args->folder, "Hugging Face model directory")->required();
  generate_verb->add_option("--prompt", generate_args->prompt, "text to continue")->required();
  generate_verb->add_flag("--chat", generate_args->chat,
                          "put the prompt as a user message into the model's chat template");
  generate_verb->add_option("--system", generate_args->system, "system message; needs --chat");
  generate_verb->add_option("--continuation", generate_args->continuation, "score this text instead of generating");
  generate_verb->add_option("--max-tokens", generate_args->tokens_max, "longest answer")->range(1, 1'000'000);
  generate_verb->add_option("--temperature", generate_args->temperature, "0 always takes the most likely token")
      ->range(0.0, 100.0);
  generate_verb
      ->add_option("--top-p", generate_args->top_p,
                   "sample from the most likely tokens that together have this probability")
      ->range(0.001, 1.0);
  generate_verb->add_option("--seed", generate_args->seed, "seed of the sampling");
  generate_verb->add_option("--device", generate_args->device, "cpu, cuda or cuda:N")->show_default();
  generate_verb->add_flag("--logprobs", generate_args->logprobs,
                          "print every token with its log-probability (nats, at the temperature, "
                          "over the whole vocabulary)");
  generate_verb->add_flag("--json", generate_args->json,
                          "print JSON: prompt tokens, text, and every token with its log-probability");
  generate_verb->callback([generate_args, &exit_code] { exit_code = generate(*generate_args); });
}

}  // namespace echoline::cli
