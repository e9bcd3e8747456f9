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

struct Arguments {
  std::string run, config, policy, url, model, api, key_file, device = "cpu";
  std::vector<std::string> overrides;
  std::optional<std::string> checkpoint;
  std::size_t samples = 1, problems = 0, at_once = 0, tries = 8;
  double temperature = -1, timeout_s = 600;
  std::int64_t tokens_max = 0;
  std::uint64_t seed = 0;
  bool as_json = false;
};

// The model to evaluate and the task.
struct Subject {
  learner::RunConfig config;
  std::string name;              // printed in the report
  std::filesystem::path policy;  // a Hugging Face directory; empty for a server
  std::optional<model::Phrasing> phrasing;
  std::unique_ptr<data_plane::Adapter> adapter;
  std::vector<schema::Problem> problems;
};

Result<std::filesystem::path> stored_policy(const Arguments& a, const std::filesystem::path& run, std::string& name) {
  std::optional<std::int64_t> step;
  if (a.checkpoint) {
    if (a.checkpoint->empty() || a.checkpoint->size() > 18 ||
        a.checkpoint->find_first_not_of("0123456789") != std::string::npos)
      return fail(Code::kInvalid, "evaluate", "--checkpoint: expected a number of learner steps, found '{}'",
                  *a.checkpoint);
    step = std::stoll(*a.checkpoint);
  }
  ECHO_ASSIGN(const learner::StoredPolicy policy, learner::find_policy(run / "checkpoints", step));
  name = fmt::format("{}, step {}", run.filename().string(), policy.step);
  return policy.model;
}

Result<Subject> read_subject(const Arguments& a) {
  Subject s;
  const bool server = !a.url.empty();
  if (!a.run.empty() && !a.config.empty())
    return fail(Code::kInvalid, "evaluate", "expected a run or --config RUNFILE, found both");
  if (!a.policy.empty() + a.checkpoint.has_value() + server > 1)
    return fail(Code::kInvalid, "evaluate", "expected only one of --checkpoint, --policy and --url");
  if (server == a.model.empty())
    return fail(Code::kInvalid, "evaluate",
                "--url and --model go together: the server's address, and its name for the model");
  std::filesystem::path run;
  if (a.config.empty()) {
    ECHO_ASSIGN(run, find_run(a.run));
  }
  ECHO_ASSIGN(const auto overrides, parse_overrides(a.overrides));
  ECHO_ASSIGN(s.config, learner::load_run_config(
                            a.config.empty() ? run / "config.yaml" : std::filesystem::path(a.config), overrides));
  if (server) {
    s.name = fmt::format("{} at {}", a.model, a.url);
  } else if (!a.policy.empty()) {
    s.policy = s.name = a.policy;
  } else if (!run.empty()) {
    ECHO_ASSIGN(s.policy, stored_policy(a, run, s.name));
  } else if (s.config.model.path && !a.checkpoint) {
    s.policy = *s.config.model.path;
    s.name = s.policy.string();
  } else {
    return fail(Code::kInvalid, "evaluate", "{}: no policy given; name a run, or use --policy DIR or --url", a.config);
  }
  if (!a.api.empty() && !server)
    return fail(Code::kInvalid, "evaluate", "--api chooses the interface of a server: it needs --url");
  // A chat server builds prompts itself; all others are built here from the model's tokenizer and chat template.
  if (!server || (a.api.empty() ? !s.config.prompts.chat : a.api == "completions")) {
    std::optional<std::filesystem::path> folder = s.config.model.path;
    if (!s.policy.empty()) folder = s.policy;
    auto files = folder ? model::ModelFiles::read(*folder) : model::ModelFiles::of_preset(*s.config.model.preset);
    if (!files) return as_mistake(std::move(files).error());
    ECHO_ASSIGN(s.phrasing, model::Phrasing::make(*files, s.config.prompts));
  }
  ECHO_ASSIGN(s.adapter,
              data_plane::make_adapter(s.config.task.adapter, s.config.task.options_json, s.config.run.seed));
  s.problems = s.adapter->evaluation();
  std::size_t problems_max = s.config.evaluation.problems.value_or(std::numeric_limits<std::uint32_t>::max());
  if (a.problems > 0) problems_max = a.problems;
  if (problems_max < s.problems.size()) s.problems.resize(problems_max);
  if (s.problems.empty())
    return fail(Code::kInvalid, "evaluate", "the task '{}' has no held-out problems", s.config.task.adapter);
  return s;
}

Status ask_policy(const Subject& s, const Arguments& a, const learner::HeldOutQuestions& q,
                  learner::HeldOut& held_out) {
  struct Conversation {
    std::vector<model::Token> tokens;
    std::size_t prompt = 0, turns = 0;
  };
  const std::uint64_t total = std::uint64_t{s.problems.size()} * q.samples;
  std::map<std::uint64_t, Conversation> conversations;
  std::deque<std::uint64_t> waiting_ids;  // problems that wait for their next turn
  std::uint64_t next_id = 0;
  const auto tokens_left = [&](const Conversation& conversation) {
    const std::int64_t left =
        q.tokens_max - std::ssize(conversation.tokens) + static_cast<std::int64_t>(conversation.prompt);
    return q.turn_tokens_max > 0 ? std::min(left, q.turn_tokens_max) : left;
  };
  const auto question = [&](std::uint64_t id) {
    const Conversation& conversation = conversations.at(id);
    model::Question question{id, conversation.tokens, {}};
    question.sampling.temperature = q.temperature;
    question.sampling.top_p = q.top_p;
    question.sampling.tokens_max = tokens_left(conversation);
    question.sampling.eos = s.phrasing->eos();
    question.sampling.seed = learner::seed_of(q, id, conversation.turns);
    return question;
  };
  const auto refuse = [&](std::uint64_t id, const Error& why) {
    held_out.record_refusal(id, why.message());
    conversations.erase(id);
  };
  model::Questions questions;
  questions.device = a.device;
  questions.threads = s.config.learner.threads;
  if (a.at_once > 0) questions.in_flight_max = a.at_once;
  if (!s.phrasing->stop().empty())
    questions.ends = [&](std::span<const model::Token> response) {
      return s.phrasing->response_end(response, response.size() - 1).has_value();
    };
  questions.next = [&]() -> std::optional<model::Question> {
    if (!waiting_ids.empty()) {
      const std::uint64_t id = waiting_ids.front();
      waiting_ids.pop_front();
      return question(id);
    }
    while (next_id < total) {
      const std::uint64_t id = next_id++;
      auto prompt = s.phrasing->prompt(data_plane::prompt_of(s.problems[id / q.samples]));
      if (prompt) {
        const std::size_t tokens = prompt->size();
        conversations[id] = {*std::move(prompt), tokens, 0};
        return question(id);
      }
      refuse(id, prompt.error());
    }
    return std::nullopt;
  };
  questions.on_answer = [&](std::uint64_t id, Result<model::Generation> generation) -> Status {
    if (q.interrupted())
      return fail(Code::kCancelled, "evaluate", "stopped after {} of {} answers", held_out.answers(), total);
    if (!generation) {
      if (generation.error().code != Code::kInvalid) return std::move(generation).error();
      refuse(id, generation.error());  // longer than the model allows
      return ok();
    }
    ECHO_ASSIGN(const auto next_input,
                held_out.submit_turn(id, s.phrasing->answer(generation->tokens),
                                     generation->finish != model::Finish::kLength, std::ssize(generation->tokens)));
    q.progress(held_out.answers());
    if (!next_input) {
      conversations.erase(id);
      return ok();
    }
    Conversation& conversation = conversations.at(id);
    conversation.tokens.insert(conversation.tokens.end(), generation->tokens.begin(), generation->tokens.end());
    auto follow_up_tokens = s.phrasing->follow_up(conversation.tokens, *next_input);
    if (!follow_up_tokens) {
      refuse(id, follow_up_tokens.error());
      return ok();
    }
    conversation.tokens.insert(conversation.tokens.end(), follow_up_tokens->begin(), follow_up_tokens->end());
    ++conversation.turns;
    if (tokens_left(conversation) > 0) {
      waiting_ids.push_back(id);
    } else {
      held_out.end_early(id);
      conversations.erase(id);
    }
    return ok();
  };
  return ask_all(s.policy, questions);
}

Status ask_server(const Subject& s, const Arguments& a, const learner::HeldOutQuestions& q,
                  learner::HeldOut& held_out) {
  TextServerOptions options;
  options.url = a.url;
  options.model = a.model;
  options.chat = !s.phrasing;
  if (a.at_once > 0) options.at_once = a.at_once;
  options.timeout = from_seconds(a.timeout_s);
  options.tries_max = static_cast<int>(a.tries);
  ECHO_ASSIGN(options.key, read_secret("ECHOLINE_API_KEY", a.key_file));
  const SystemClock clock;
  ECHO_ASSIGN(TextServerClient server, TextServerClient::make(std::move(options), clock));
  return learner::ask_server(server, s.config, s.phrasing ? &*s.phrasing : nullptr, s.problems, q, held_out);
}

std::string number(const json& value, int digits) {
  return value.is_number() ? fmt::format("{:.{}f}", value.get<double>(), digits) : "-";
}

void print(const Subject& s, const json& r) {
  fmt::print("{} on {} held-out problems of '{}'\n", s.name, r.at("problems").get<std::uint64_t>(),
             s.config.task.adapter);
  fmt::print("{:<18}{}  (95 %: {} to {})\n", "accuracy", number(r.at("accuracy"), 3), number(r.at("accuracy_low"), 3),
             number(r.at("accuracy_high"), 3));
  for (const json& pass : r.at("pass_at"))
    fmt::print("{:<18}{}\n", fmt::format("pass@{}", pass.at("k").get<std::uint64_t>()), number(pass.at("share"), 3));
  fmt::print("{:<18}{}\n", "reward", number(r.at("reward_mean"), 3));
  if (r.contains("by_task"))
    for (const auto& [task, of] : r.at("by_task").items())
      fmt::print("{:<18}{} of {} answers, reward {}\n", task, number(of.at("accuracy"), 3),
                 of.at("answers").get<std::uint64_t>(), number(of.at("reward_mean"), 3));
  const json& tokens = r.at("response_tokens");
  fmt::print("{:<18}mean {}, median {}, 95 % {}, most {};  {} % cut at the limit\n", "response tokens",
             number(tokens.at("mean"), 1), number(tokens.at("p50"), 0), number(tokens.at("p95"), 0),
             number(tokens.at("max"), 0), number(100 * r.at("truncated_fraction").get<double>(), 1));
  for (const auto& [why, count] : r.at("refused").items())
    fmt::print("{:<18}{} answers: {}\n", "refused", count.get<std::uint64_t>(), why);
  fmt::print("{:<18}{}\n", "seconds", number(r.at("seconds"), 1));
}

Result<json> evaluate(const Arguments& a, Subject& s) {
  ECHO_ASSIGN(s, read_subject(a));
  const std::atomic<bool>& stop = stop_on_signals();
  learner::HeldOutQuestions q;
  q.samples = static_cast<std::uint32_t>(a.samples);
  q.temperature = a.temperature >= 0 ? a.temperature : a.samples > 1 ? s.config.rollout.temperature : 0;
  q.top_p = q.temperature > 0 ? s.config.rollout.top_p : 1;
  q.tokens_max = a.tokens_max > 0 ? a.tokens_max : s.config.rollout.response_tokens_max;
  q.turn_tokens_max = s.config.rollout.turn_tokens_max.value_or(0);
  q.seed = a.seed;
  if (q.samples > 1 && q.temperature == 0)
    return fail(Code::kInvalid, "evaluate", "{} samples at temperature 0 would be {} equal answers", q.samples,
                q.samples);
  q.interrupted = [&] { return stop.load(); };
  const SystemClock clock;
  const TimePoint start = clock.now();
  TimePoint last_progress = start;
  const std::uint64_t total = std::uint64_t{s.problems.size()} * q.samples;
  q.progress = [&](std::uint64_t answers) {
    if (clock.now() - last_progress < std::chrono::seconds(5)) return;
    last_progress = clock.now();
    print_stderr("{} of {} answers\n", answers, total);
  };
  learner::HeldOut held_out(*s.adapter, s.problems, q.samples, q.seed);
  ECHO_TRY(s.policy.empty() ? ask_server(s, a, q, held_out) : ask_policy(s, a, q, held_out));
  json result = held_out.result();
  result["schema_version"] = 1;
  result["task"] = s.config.task.adapter;
  result["subject"] = s.name;
  result["temperature"] = q.temperature;
  result["seconds"] = seconds(clock.now() - start);
  return result;
}

}  // namespace

void add_evaluate(Verb& app, int& exit_code) {
  auto* verb = app.add_verb("evaluate", "Score held-out problems with a policy or with a model behind a server");
  auto a = std::make_shared<Arguments>();
  verb->add_option("run", a->run, "name or folder of a run (default: the newest); its newest checkpoint is evaluated");
  verb->add_option("--checkpoint", a->checkpoint, "evaluate the run's checkpoint after this number of learner steps");
  verb->add_option("--config", a->config, "a run file instead of a run: uses its task and its model");
  verb->add_option("--set", a->overrides, "override a key of the run file, e.g. --set rollout.response_tokens_max=512")
      ->one_value_each();
  verb->add_option("--policy", a->policy, "evaluate this Hugging Face model directory");
  verb->add_option("--url", a->url,
                   "evaluate a model behind a server with OpenAI's interface, e.g. http://127.0.0.1:8000/v1");
  verb->add_option("--model", a->model, "with --url: the server's name for the model");
  verb->add_option("--api", a->api,
                   "with --url: the interface of the server (default: chat if the run file has task.chat, otherwise "
                   "completions)")
      ->one_of({"chat", "completions"});
  verb->add_option("--key-file", a->key_file,
                   "with --url: a file of mode 600 that contains the key; alternatively, set ECHOLINE_API_KEY");
  verb->add_option("--concurrency", a->at_once, "questions at a time (default: 64; 16 for a server)")
      ->range<std::size_t>(1, 1024);
  verb->add_option("--timeout", a->timeout_s, "with --url: time limit of an answer in seconds")
      ->range(0.001, 86'400.0)
      ->show_default();
  verb->add_option(
          "--tries", a->tries,
          "with --url: attempts for each question if the server is busy, not reachable or breaks off an answer")
      ->range<std::size_t>(1, 100)
      ->show_default();
  verb->add_option("--device", a->device, "for a policy: cpu, cuda or cuda:N")->show_default();
  verb->add_option("--samples", a->samples, "answers to each problem; with more than one: pass@k")
      ->range<std::size_t>(1, kSamplesMax)
      ->show_default();
  verb->add_option("--temperature", a->temperature,
                   "default: 0, which always takes the most likely token; with --samples, the temperature of the run")
      ->range(0.0, 100.0);
  verb->add_option("--max-tokens", a->tokens_max, "limit of an answer in tokens (default: rollout.response_tokens_max)")
      ->range(1, 1'000'000);
  verb->add_option("--problems", a->problems, "number of problems, from the first (default: evaluation.problems)")
      ->range<std::size_t>(1, 1u << 30);
  verb->add_option("--seed", a->seed, "of the sampling");
  verb->add_flag("--json", a->as_json, "print JSON (docs/how-to/evaluate-a-policy.md has the fields)");
  verb->footer(
      "  echoline evaluate quickstart\n"
      "  echoline evaluate quickstart --checkpoint 60 --samples 8\n"
      "  echoline evaluate --config configs/quickstart.yaml \\\n"
      "    --url http://127.0.0.1:8000/v1 --model qwen3 --api chat");
  verb->callback([a, &exit_code] {
    Subject s;
    const auto result = evaluate(*a, s);
    exit_code = result ? 0 : report_error("evaluate", result.error());
    if (!result) return;
    if (a->as_json)
      fmt::print("{}\n", result->dump(2, ' ', false, json::error_handler_t::replace));
    else
      print(s, *result);
  });
}

}  // namespace echoline::cli
