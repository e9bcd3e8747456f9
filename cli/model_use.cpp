// echoline model export: copies the model of a run into a folder. echoline model generate: lets a model continue a
// text.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/built_in.hpp"
#include "cli/model_verbs.hpp"
#include "cli/verbs.hpp"
#include "delta/checkpoint.hpp"
#include "delta/digest.hpp"
#include "learner/checkpoint_folder.hpp"
#include "model/phrasing.hpp"

namespace echoline::cli {
namespace {

using nlohmann::ordered_json;

struct ExportArguments {
  std::string run, output;
  bool json = false;
};

// `run` is RUN or RUN@STEP. A run whose name contains an @ is found first.
Result<learner::StoredPolicy> policy_of(const std::string& run) {
  const auto run_folder = find_run(run);
  if (run_folder) return learner::find_policy(*run_folder / "checkpoints");
  const std::size_t at_sign = run.rfind('@');
  if (at_sign == std::string::npos) return run_folder.error();
  const std::string step = run.substr(at_sign + 1);
  if (step.empty() || step.size() > 18 || step.find_first_not_of("0123456789") != std::string::npos)
    return fail(Code::kInvalid, "find run", "expected RUN@STEP with a number of learner steps, found '{}'", run);
  ECHO_ASSIGN(const std::filesystem::path folder, find_run(run.substr(0, at_sign)));
  return learner::find_policy(folder / "checkpoints", std::stoll(step));
}

int export_model(const ExportArguments& a) {
  const auto exported = [&]() -> Result<learner::StoredPolicy> {
    ECHO_ASSIGN(learner::StoredPolicy policy, policy_of(a.run));
    ECHO_ASSIGN(const auto weights, delta::Checkpoint::open(policy.model));
    ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(weights.view()));
    if (digest.hex() != policy.digest)
      return fail(Code::kCorrupt, "read policy", "{} has digest {}, but the checkpoint states {}",
                  policy.model.string(), digest.hex(), policy.digest);
    ECHO_TRY(model::place_directory(policy.model, a.output, /*link=*/false));
    return policy;
  }();
  if (!exported) return report_error("model export", exported.error());
  if (a.json)
    fmt::print("{}\n",
               ordered_json{
                   {"schema_version", 1}, {"folder", a.output}, {"step", exported->step}, {"digest", exported->digest}}
                   .dump(2));
  else
    fmt::print("{}\n", a.output);
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
  std::string prompt, text, finish;
  std::vector<model::Token> prompt_tokens, tokens;
  std::vector<std::string> pieces;
  std::vector<float> logprobs;
};

Result<GeneratedText> continue_prompt(const GenerateArguments& a) {
  ECHO_ASSIGN(const model::ModelFiles files, model::ModelFiles::read(a.folder));
  model::PromptStyle style;
  style.chat = a.chat;
  style.system = a.system;
  ECHO_ASSIGN(const model::Phrasing phrasing, model::Phrasing::make(files, style));
  GeneratedText result;
  ECHO_ASSIGN(result.prompt, phrasing.prompt_text(a.prompt));
  ECHO_ASSIGN(result.prompt_tokens, phrasing.prompt(a.prompt));
  if (a.continuation) {
    ECHO_ASSIGN(result.tokens, phrasing.tokenizer().encode(*a.continuation));
    ECHO_ASSIGN(result.logprobs, score(a.folder, a.device, result.prompt_tokens, result.tokens,
                                       a.temperature > 0 ? a.temperature : 1.0));
    result.finish = "given";
  } else {
    model::Sampling options;
    options.temperature = a.temperature;
    options.top_p = a.top_p;
    options.tokens_max = a.tokens_max;
    options.eos = phrasing.eos();
    options.seed = a.seed;
    ECHO_ASSIGN(model::Generation generation, ask(a.folder, a.device, result.prompt_tokens, options));
    result.finish = generation.finish == model::Finish::kEos ? "eos" : "length";
    result.tokens = std::move(generation.tokens);
    result.logprobs = std::move(generation.logprobs);
  }
  result.text = phrasing.answer(result.tokens);
  for (const model::Token token : result.tokens) result.pieces.push_back(phrasing.tokenizer().decode({&token, 1}));
  return result;
}

std::string json_dump(const ordered_json& value, int indent) {
  // a token may be part of a UTF-8 character
  return value.dump(indent, ' ', false, ordered_json::error_handler_t::replace);
}

int generate(const GenerateArguments& a) {
  const auto result = continue_prompt(a);
  if (!result) return report_error("model generate", result.error());
  if (a.json) {
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
                                 2));
  } else if (a.logprobs) {
    fmt::print("{:>8}  {:>12}  text\n", "id", "logprob");
    for (std::size_t i = 0; i < result->tokens.size(); ++i)
      fmt::print("{:>8}  {:>12.6f}  {}\n", result->tokens[i], result->logprobs[i], json_dump(result->pieces[i], -1));
  } else {
    fmt::print("{}\n", result->text);
  }
  return 0;
}

}  // namespace

void add_model_use(Verb& verb, int& exit_code) {
  auto* exported = verb.add_verb("export", "Copy the policy of a run into a separate Hugging Face directory");
  auto e = std::make_shared<ExportArguments>();
  exported
      ->add_option("run", e->run,
                   "RUN or RUN@STEP: name or folder of a run, and the step of one of its checkpoints "
                   "(default: the newest)")
      ->required();
  exported->add_option("-o,--output", e->output, "folder to create; must not exist")->required();
  exported->add_flag("--json", e->json, "print JSON");
  exported->callback([e, &exit_code] { exit_code = export_model(*e); });

  auto* generated = verb.add_verb("generate", "Continue a prompt, or score a given continuation");
  auto g = std::make_shared<GenerateArguments>();
  generated->add_option("folder", g->folder, "Hugging Face model directory")->required();
  generated->add_option("--prompt", g->prompt, "text to continue")->required();
  generated->add_flag("--chat", g->chat, "put the prompt as a user message into the model's chat template");
  generated->add_option("--system", g->system, "system message; needs --chat");
  generated->add_option("--continuation", g->continuation, "score this text instead of generating");
  generated->add_option("--max-tokens", g->tokens_max, "longest answer")->range(1, 1'000'000);
  generated->add_option("--temperature", g->temperature, "0 always takes the most likely token")->range(0.0, 100.0);
  generated->add_option("--top-p", g->top_p, "sample from the most likely tokens that together have this probability")
      ->range(0.001, 1.0);
  generated->add_option("--seed", g->seed, "of the sampling");
  generated->add_option("--device", g->device, "cpu, cuda or cuda:N")->show_default();
  generated->add_flag("--logprobs", g->logprobs,
                      "print every token with its log-probability (nats, at the temperature, "
                      "over the whole vocabulary)");
  generated->add_flag("--json", g->json, "print JSON: prompt tokens, text, and every token with its log-probability");
  generated->callback([g, &exit_code] { exit_code = generate(*g); });
}

}  // namespace echoline::cli
