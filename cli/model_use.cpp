// echoline model export
// generate: copies the model of a run into a folder, or lets a model continue a text.
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
  const auto whole = find_run(run);
  if (whole) return learner::find_policy(*whole / "checkpoints");
  const std::size_t at = run.rfind('@');
  if (at == std::string::npos) return whole.error();
  const std::string step = run.substr(at + 1);
  if (step.empty() || step.size() > 18 || step.find_first_not_of("0123456789") != std::string::npos)
    return fail(Code::kInvalid, "find run", "expected RUN@STEP with a number of learner steps, found '{}'", run);
  ECHO_ASSIGN(const std::filesystem::path folder, find_run(run.substr(0, at)));
  return learner::find_policy(folder / "checkpoints", std::stoll(step));
}

int export_model(const ExportArguments& a) {
  const auto done = [&]() -> Result<learner::StoredPolicy> {
    ECHO_ASSIGN(learner::StoredPolicy policy, policy_of(a.run));
    ECHO_ASSIGN(const auto weights, delta::Checkpoint::open(policy.model));
    ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(weights.view()));
    if (digest.hex() != policy.digest)
      return fail(Code::kCorrupt, "read policy", "{} has digest {}, but the checkpoint states {}",
                  policy.model.string(), digest.hex(), policy.digest);
    ECHO_TRY(model::place_directory(policy.model, a.output, /*link=*/false));
    return policy;
  }();
  if (!done) return complain("model export", done.error());
  if (a.json)
    fmt::print(
        "{}\n",
        ordered_json{{"schema_version", 1}, {"folder", a.output}, {"step", done->step}, {"digest", done->digest}}.dump(
            2));
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

struct Said {
  std::string prompt, text, finish;
  std::vector<model::Token> prompt_tokens, tokens;
  std::vector<std::string> pieces;
  std::vector<float> logprobs;
};

Result<Said> said_by(const GenerateArguments& a) {
  ECHO_ASSIGN(const model::ModelFiles files, model::ModelFiles::read(a.folder));
  model::PromptStyle style;
  style.chat = a.chat;
  style.system = a.system;
  ECHO_ASSIGN(const model::Phrasing phrasing, model::Phrasing::make(files, style));
  Said said;
  ECHO_ASSIGN(said.prompt, phrasing.prompt_text(a.prompt));
  ECHO_ASSIGN(said.prompt_tokens, phrasing.prompt(a.prompt));
  if (a.continuation) {
    ECHO_ASSIGN(said.tokens, phrasing.tokenizer().encode(*a.continuation));
    ECHO_ASSIGN(said.logprobs,
                score(a.folder, a.device, said.prompt_tokens, said.tokens, a.temperature > 0 ? a.temperature : 1.0));
    said.finish = "given";
  } else {
    model::Sampling options;
    options.temperature = a.temperature;
    options.top_p = a.top_p;
    options.tokens_max = a.tokens_max;
    options.eos = phrasing.eos();
    options.seed = a.seed;
    ECHO_ASSIGN(model::Generation generation, ask(a.folder, a.device, said.prompt_tokens, options));
    said.finish = generation.finish == model::Finish::kEos ? "eos" : "length";
    said.tokens = std::move(generation.tokens);
    said.logprobs = std::move(generation.logprobs);
  }
  said.text = phrasing.answer(said.tokens);
  for (const model::Token token : said.tokens) said.pieces.push_back(phrasing.tokenizer().decode({&token, 1}));
  return said;
}

std::string dumped(const ordered_json& value, int indent) {
  // a token may be part of a UTF-8 character
  return value.dump(indent, ' ', false, ordered_json::error_handler_t::replace);
}

int generate(const GenerateArguments& a) {
  const auto said = said_by(a);
  if (!said) return complain("model generate", said.error());
  if (a.json) {
    ordered_json tokens = ordered_json::array();
    double sum = 0;
    for (std::size_t i = 0; i < said->tokens.size(); ++i) {
      tokens.push_back({{"id", said->tokens[i]}, {"text", said->pieces[i]}, {"logprob", said->logprobs[i]}});
      sum += said->logprobs[i];
    }
    fmt::print("{}\n", dumped({{"schema_version", 1},
                               {"prompt", said->prompt},
                               {"prompt_tokens", said->prompt_tokens},
                               {"text", said->text},
                               {"finish", said->finish},
                               {"logprob_sum", sum},
                               {"tokens", tokens}},
                              2));
  } else if (a.logprobs) {
    fmt::print("{:>8}  {:>12}  text\n", "id", "logprob");
    for (std::size_t i = 0; i < said->tokens.size(); ++i)
      fmt::print("{:>8}  {:>12.6f}  {}\n", said->tokens[i], said->logprobs[i], dumped(said->pieces[i], -1));
  } else {
    fmt::print("{}\n", said->text);
  }
  return 0;
}

}  // namespace

void add_model_use(Verb& verb, int& exit) {
  auto* exported = verb.add_verb("export", "Copy the policy of a run into a separate Hugging Face directory");
  auto e = std::make_shared<ExportArguments>();
  exported
      ->add_option("run", e->run,
                   "RUN or RUN@STEP: name or folder of a run, and the step of one of its checkpoints "
                   "(default: the newest)")
      ->required();
  exported->add_option("-o,--output", e->output, "folder to create; must not exist")->required();
  exported->add_flag("--json", e->json, "print JSON");
  exported->callback([e, &exit] { exit = export_model(*e); });

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
  generated->callback([g, &exit] { exit = generate(*g); });
}

}  // namespace echoline::cli
