// echoline evaluate: scores a task's held-out problems with a policy or with a model behind a server.
#include <cstdio>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>

#include "base/clock.hpp"
#include "base/secret.hpp"
#include "cli/built_in.hpp"
#include "cli/output.hpp"
#include "cli/signals.hpp"
#include "cli/verbs.hpp"
#include "data_plane/policy_input.hpp"
#include "learner/checkpoint_folder.hpp"
#include "learner/held_out.hpp"
#include "learner/planning.hpp"

namespace echoline::cli {
namespace {

using nlohmann::json;

constexpr std::uint32_t kSamplesMax = 4096;
constexpr Duration kProgressInterval = std::chrono::seconds(5);

struct Arguments {
  std::string run, config, policy, url, model, api, key_file, device = "cpu";
  std::vector<std::string> overrides;
  std::optional<std::string> checkpoint;
  std::size_t samples = 1, tries = 8;
  std::size_t problems = 0, questions_at_once = 0;  // 0: not given
  double temperature = -1;                          // negative: not given
  double timeout_s = 600;
  std::int64_t tokens_max = 0;  // 0: not given
  std::optional<std::uint64_t> seed;
  bool as_json = false;
};

// The model to evaluate and the task.
struct Subject {
  learner::RunConfig config;
  std::string name;                         // printed in the report
  std::filesystem::path policy;             // a Hugging Face directory; empty for a server
  std::optional<model::Phrasing> phrasing;  // absent if a chat server builds the prompts
  std::unique_ptr<data_plane::Adapter> adapter;
  std::vector<schema::Problem> problems;
};

// The policy of a run's checkpoint. Sets `name` to the run and the step.
Result<std::filesystem::path> find_stored_policy(const Arguments& args, const std::filesystem::path& run,
                                                 std::string& name) {
  std::optional<std::int64_t> step;
  if (args.checkpoint) {
    constexpr std::size_t kDigitsMax = 18;  // always fit into 64 bits
    if (args.checkpoint->empty() || args.checkpoint->size() > kDigitsMax ||
        args.checkpoint->find_first_not_of("0123456789") != std::string::npos)
      return fail(Code::kInvalid, "evaluate", "--checkpoint: expected a number of learner steps, found '{}'",
                  *args.checkpoint);
    step = std::stoll(*args.checkpoint);
  }
  ECHO_ASSIGN(const learner::StoredPolicy policy, learner::find_policy(run / "checkpoints", step));
  name = fmt::format("{}, step {}", run.filename().string(), policy.step);
  return policy.model;
}

Result<Subject> read_subject(const Arguments& args) {
  Subject subject;
  const bool uses_server = !args.url.empty();
  if (!args.run.empty() && !args.config.empty())
    return fail(Code::kInvalid, "evaluate", "expected a run or --config RUNFILE, found both");
  const int subjects_named = (args.policy.empty() ? 0 : 1) + (args.checkpoint ? 1 : 0) + (uses_server ? 1 : 0);
  if (subjects_named > 1)
    return fail(Code::kInvalid, "evaluate", "expected only one of --checkpoint, --policy and --url");
  if (uses_server == args.model.empty())
    return fail(Code::kInvalid, "evaluate",
                "--url and --model go together: the server's address, and its name for the model");
  std::filesystem::path run;
  if (args.config.empty()) {
    ECHO_ASSIGN(run, find_run(args.run));
  }
  ECHO_ASSIGN(const auto overrides, parse_overrides(args.overrides));
  ECHO_ASSIGN(subject.config,
              learner::load_run_config(args.config.empty() ? run / "config.yaml" : std::filesystem::path(args.config),
                                       overrides));
  if (uses_server) {
    subject.name = fmt::format("{} at {}", args.model, args.url);
  } else if (!args.policy.empty()) {
    subject.policy = subject.name = args.policy;
  } else if (!run.empty()) {
    ECHO_ASSIGN(subject.policy, find_stored_policy(args, run, subject.name));
  } else if (subject.config.model.path && !args.checkpoint) {
    subject.policy = *subject.config.model.path;
    subject.name = subject.policy.string();
  } else {
    return fail(Code::kInvalid, "evaluate", "{}: no policy given; name a run, or use --policy DIR or --url",
                args.config);
  }
  if (!args.api.empty() && !uses_server)
    return fail(Code::kInvalid, "evaluate", "--api chooses the interface of a server: it needs --url");
  // A chat server builds prompts itself. All other prompts are built here, from the model's tokenizer and chat
  // template.
  const bool server_takes_text = args.api.empty() ? !subject.config.prompts.chat : args.api == "completions";
  if (!uses_server || server_takes_text) {
    std::optional<std::filesystem::path> folder = subject.config.model.path;
    if (!subject.policy.empty()) folder = subject.policy;
    auto files = folder ? model::ModelFiles::read(*folder) : model::ModelFiles::of_preset(*subject.config.model.preset);
    if (!files) return as_user_error(std::move(files).error());
    ECHO_ASSIGN(subject.phrasing, model::Phrasing::make(*files, subject.config.prompts));
  }
  ECHO_ASSIGN(subject.adapter, data_plane::make_adapter(subject.config.task.adapter, subject.config.task.options_json,
                                                        subject.config.run.seed));
  subject.problems = subject.adapter->evaluation();
  std::size_t problems_max = subject.config.evaluation.problems.value_or(std::numeric_limits<std::uint32_t>::max());
  if (args.problems > 0) problems_max = args.problems;
  if (problems_max < subject.problems.size()) subject.problems.resize(problems_max);
  if (subject.problems.empty())
    return fail(Code::kInvalid, "evaluate", "the task '{}' has no held-out problems", subject.config.task.adapter);
  return subject;
}

// Lets a policy on this machine answer all problems. Each problem has one conversation per sample, of one or more
// turns.
Status ask_policy(const Subject& subject, const Arguments& args, const learner::HeldOutQuestions& settings,
                  learner::HeldOut& held_out) {
  struct Conversation {
    std::vector<model::Token> tokens;
    std::size_t prompt_tokens = 0, turns = 0;
  };
  const std::uint64_t conversation_count = std::uint64_t{subject.problems.size()} * settings.samples;
  std::map<std::uint64_t, Conversation> conversations;
  std::deque<std::uint64_t> ids_to_continue;  // ids of conversations that wait for their next turn
  std::uint64_t next_id = 0;
  const auto tokens_left = [&](const Conversation& conversation) {
    const std::int64_t all_turns_left =
        settings.tokens_max - std::ssize(conversation.tokens) + static_cast<std::int64_t>(conversation.prompt_tokens);
    return settings.turn_tokens_max > 0 ? std::min(all_turns_left, settings.turn_tokens_max) : all_turns_left;
  };
  const auto make_question = [&](std::uint64_t id) {
    const Conversation& conversation = conversations.at(id);
    model::Question question{id, conversation.tokens, {}};
    question.sampling.temperature = settings.temperature;
    question.sampling.top_p = settings.top_p;
    question.sampling.tokens_max = tokens_left(conversation);
    question.sampling.eos = subject.phrasing->eos();
    question.sampling.seed = learner::seed_of(settings, id, conversation.turns);
    return question;
  };
  const auto refuse_and_end = [&](std::uint64_t id, const Error& why) {
    held_out.record_refusal(id, why.message());
    conversations.erase(id);
  };
  model::Questions questions;
  questions.device = args.device;
  questions.threads = subject.config.learner.threads;
  if (args.questions_at_once > 0) questions.in_flight_max = args.questions_at_once;
  if (!subject.phrasing->stop().empty())
    questions.ends = [&](std::span<const model::Token> response) {
      // Called after each token, so only the newest one is unchecked.
      return subject.phrasing->response_end(response, response.size() - 1).has_value();
    };
  questions.next = [&]() -> std::optional<model::Question> {
    if (!ids_to_continue.empty()) {
      const std::uint64_t id = ids_to_continue.front();
      ids_to_continue.pop_front();
      return make_question(id);
    }
    while (next_id < conversation_count) {
      const std::uint64_t id = next_id++;
      auto prompt = subject.phrasing->prompt(data_plane::prompt_of(subject.problems[id / settings.samples]));
      if (prompt) {
        const std::size_t prompt_tokens = prompt->size();
        conversations[id] = {.tokens = *std::move(prompt), .prompt_tokens = prompt_tokens, .turns = 0};
        return make_question(id);
      }
      refuse_and_end(id, prompt.error());
    }
    return std::nullopt;
  };
  questions.on_answer = [&](std::uint64_t id, Result<model::Generation> generation) -> Status {
    if (settings.interrupted())
      return fail(Code::kCancelled, "evaluate", "stopped after {} of {} answers", held_out.answers(),
                  conversation_count);
    if (!generation) {
      if (generation.error().code != Code::kInvalid) return std::move(generation).error();
      refuse_and_end(id, generation.error());  // it is longer than the model allows
      return ok();
    }
    ECHO_ASSIGN(const auto next_input,
                held_out.submit_turn(id, subject.phrasing->answer(generation->tokens),
                                     generation->finish != model::Finish::kLength, std::ssize(generation->tokens)));
    settings.progress(held_out.answers());
    if (!next_input) {
      conversations.erase(id);
      return ok();
    }
    Conversation& conversation = conversations.at(id);
    conversation.tokens.insert(conversation.tokens.end(), generation->tokens.begin(), generation->tokens.end());
    auto follow_up_tokens = subject.phrasing->follow_up(conversation.tokens, *next_input);
    if (!follow_up_tokens) {
      refuse_and_end(id, follow_up_tokens.error());
      return ok();
    }
    conversation.tokens.insert(conversation.tokens.end(), follow_up_tokens->begin(), follow_up_tokens->end());
    ++conversation.turns;
    if (tokens_left(conversation) > 0) {
      ids_to_continue.push_back(id);
    } else {
      held_out.end_early(id);
      conversations.erase(id);
    }
    return ok();
  };
  return answer_questions(subject.policy, questions);
}

// Lets a model behind a server answer all problems.
Status ask_server(const Subject& subject, const Arguments& args, const learner::HeldOutQuestions& settings,
                  learner::HeldOut& held_out) {
  TextServerOptions options;
  options.url = args.url;
  options.model = args.model;
  options.chat = !subject.phrasing;
  if (args.questions_at_once > 0) options.requests_in_flight_max = args.questions_at_once;
  options.timeout = from_seconds(args.timeout_s);
  options.tries_max = static_cast<int>(args.tries);
  ECHO_ASSIGN(options.key, read_secret("ECHOLINE_API_KEY", args.key_file));
  const SystemClock clock;
  ECHO_ASSIGN(TextServerClient server, TextServerClient::make(std::move(options), clock));
  return learner::ask_server(server, subject.config, subject.phrasing ? &*subject.phrasing : nullptr, subject.problems,
                             settings, held_out);
}

std::string number_text(const json& value, int digits) {
  return value.is_number() ? fmt::format("{:.{}f}", value.get<double>(), digits) : "-";
}

void print_result(const Subject& subject, const json& result) {
  fmt::print("{} on {} held-out problems of '{}'\n", subject.name, result.at("problems").get<std::uint64_t>(),
             subject.config.task.adapter);
  fmt::print("{:<18}{}  (95 %: {} to {})\n", "accuracy", number_text(result.at("accuracy"), 3),
             number_text(result.at("accuracy_low"), 3), number_text(result.at("accuracy_high"), 3));
  for (const json& pass : result.at("pass_at"))
    fmt::print("{:<18}{}\n", fmt::format("pass@{}", pass.at("k").get<std::uint64_t>()),
               number_text(pass.at("share"), 3));
  fmt::print("{:<18}{}\n", "reward", number_text(result.at("reward_mean"), 3));
  if (result.contains("by_task"))
    for (const auto& [task, scores] : result.at("by_task").items())
      fmt::print("{:<18}{} of {} answers, reward {}\n", task, number_text(scores.at("accuracy"), 3),
                 scores.at("answers").get<std::uint64_t>(), number_text(scores.at("reward_mean"), 3));
  const json& tokens = result.at("response_tokens");
  fmt::print("{:<18}mean {}, median {}, 95 % {}, most {};  {} % cut at the limit\n", "response tokens",
             number_text(tokens.at("mean"), 1), number_text(tokens.at("p50"), 0), number_text(tokens.at("p95"), 0),
             number_text(tokens.at("max"), 0), number_text(100 * result.at("truncated_fraction").get<double>(), 1));
  for (const auto& [why, count] : result.at("refused").items())
    fmt::print("{:<18}{} answers: {}\n", "refused", count.get<std::uint64_t>(), why);
  fmt::print("{:<18}{}\n", "seconds", number_text(result.at("seconds"), 1));
}

Result<json> evaluate(const Arguments& args, Subject& subject) {
  ECHO_ASSIGN(subject, read_subject(args));
  const std::atomic<bool>& stop = stop_on_signals();
  learner::HeldOutQuestions settings;
  settings.samples = static_cast<std::uint32_t>(args.samples);
  settings.temperature = args.temperature >= 0 ? args.temperature
                         : args.samples > 1    ? subject.config.rollout.temperature
                                               : 0;
  settings.top_p = settings.temperature > 0 ? subject.config.rollout.top_p : 1;
  settings.tokens_max = args.tokens_max > 0 ? args.tokens_max : subject.config.rollout.response_tokens_max;
  settings.turn_tokens_max = subject.config.rollout.turn_tokens_max.value_or(0);
  settings.seed = args.seed.value_or(0);
  settings.sends_seeds = args.seed.has_value();
  if (settings.samples > 1 && settings.temperature == 0)
    return fail(Code::kInvalid, "evaluate", "{} samples at temperature 0 would be {} equal answers", settings.samples,
                settings.samples);
  settings.interrupted = [&] { return stop.load(); };
  const SystemClock clock;
  const TimePoint start = clock.now();
  TimePoint progress_shown_at = start;
  const std::uint64_t total = std::uint64_t{subject.problems.size()} * settings.samples;
  settings.progress = [&](std::uint64_t answers) {
    if (clock.now() - progress_shown_at < kProgressInterval) return;
    progress_shown_at = clock.now();
    print_stderr("{} of {} answers\n", answers, total);
  };
  learner::HeldOut held_out(*subject.adapter, subject.problems, settings.samples, settings.seed);
  ECHO_TRY(subject.policy.empty() ? ask_server(subject, args, settings, held_out)
                                  : ask_policy(subject, args, settings, held_out));
  json result = held_out.result();
  result["schema_version"] = 1;
  result["task"] = subject.config.task.adapter;
  result["subject"] = subject.name;
  result["temperature"] = settings.temperature;
  result["seconds"] = seconds(clock.now() - start);
  return result;
}

}  // namespace

void add_evaluate(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("evaluate", "Score held-out problems with a policy or with a model behind a server");
  auto args = std::make_shared<Arguments>();
  verb->add_option("run", args->run,
                   "name or folder of a run (default: the newest); its newest checkpoint is evaluated");
  verb->add_option("--checkpoint", args->checkpoint,
                   "evaluate the run's checkpoint after this number of learner steps");
  verb->add_option("--config", args->config, "a run file instead of a run: uses its task and its model");
  verb->add_option("--set", args->overrides,
                   "override a key of the run file, e.g. --set rollout.response_tokens_max=512")
      ->one_value_each();
  verb->add_option("--policy", args->policy, "evaluate this Hugging Face model directory");
  verb->add_option("--url", args->url,
                   "evaluate a model behind a server with OpenAI's interface, e.g. http://127.0.0.1:8000/v1");
  verb->add_option("--model", args->model, "with --url: the server's name for the model");
  verb->add_option("--api", args->api,
                   "with --url: the interface of the server (default: chat if the run file has task.chat, otherwise "
                   "completions)")
      ->one_of({"chat", "completions"});
  verb->add_option("--key-file", args->key_file,
                   "with --url: a file of mode 600 that contains the key; alternatively, set ECHOLINE_API_KEY");
  verb->add_option("--concurrency", args->questions_at_once, "questions at a time (default: 64; 16 for a server)")
      ->range<std::size_t>(1, 1024);
  verb->add_option("--timeout", args->timeout_s, "with --url: time limit of an answer in seconds")
      ->range(0.001, 86'400.0)
      ->show_default();
  verb->add_option(
          "--tries", args->tries,
          "with --url: attempts for each question if the server is busy, not reachable or breaks off an answer")
      ->range<std::size_t>(1, 100)
      ->show_default();
  verb->add_option("--device", args->device, "for a policy: cpu, cuda or cuda:N")->show_default();
  verb->add_option("--samples", args->samples, "answers to each problem; with more than one: pass@k")
      ->range<std::size_t>(1, kSamplesMax)
      ->show_default();
  verb->add_option("--temperature", args->temperature,
                   "default: 0, which always takes the most likely token; with --samples, the temperature of the run")
      ->range(0.0, 100.0);
  verb->add_option("--max-tokens", args->tokens_max,
                   "limit of an answer in tokens (default: rollout.response_tokens_max)")
      ->range(1, 1'000'000);
  verb->add_option("--problems", args->problems, "number of problems, from the first (default: evaluation.problems)")
      ->range<std::size_t>(1, 1u << 30);
  verb->add_option("--seed", args->seed,
                   "seed of the sampling (default: 0; a server gets seeds only if this is given)");
  verb->add_flag("--json", args->as_json, "print JSON (docs/how-to/evaluate-a-policy.md has the fields)");
  verb->callback([args, &exit_code] {
    Subject subject;
    const auto result = evaluate(*args, subject);
    exit_code = result ? 0 : report_error("evaluate", result.error());
    if (!result) return;
    if (args->as_json)
      fmt::print("{}\n", result->dump(2, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace));
    else
      print_result(subject, *result);
  });
}

}  // namespace echoline::cli
