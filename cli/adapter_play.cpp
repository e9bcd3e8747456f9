// echoline adapter play: runs one episode of a task. A person or a file gives the responses in the policy's place.
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/text.hpp"
#include "cli/adapter_verbs.hpp"
#include "cli/output.hpp"
#include "cli/task_choice.hpp"
#include "cli/verbs.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/policy_input.hpp"
#include "learner/held_out.hpp"

namespace echoline::cli {
namespace {

using data_plane::Score;
using data_plane::Step;
using nlohmann::json;

constexpr std::string_view kOperation = "adapter play";
constexpr std::size_t kResponseBytesMax = 4u << 20;  // TrajectoryLimits::text_max

struct Arguments {
  TaskArguments task_args;
  std::uint64_t problem = 0;  // its number, from 0
  // The end of a response: "line" (the end of a line), "empty" (an empty line) or "input" (the end of the input).
  std::string response_end = "line";
  bool held_out = false, reveal = false, as_json = false;
};

// Prints the episode and reads the responses. With --json it prints to stderr, because the JSON goes to stdout.
class Transcript {
 public:
  explicit Transcript(bool as_json) : out_(as_json ? stderr : stdout), is_interactive_(::isatty(STDIN_FILENO) == 1) {}

  // Control characters in a line are escaped, so that the terminal does not obey them.
  void show(std::string_view text) const {
    while (!text.empty()) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      std::string_view line = text.substr(0, end);
      if (line.ends_with('\r')) line.remove_suffix(1);
      write(printable(line, kResponseBytesMax) + "\n");
      text.remove_prefix(std::min(end + 1, text.size()));
    }
  }
  // Prints the policy's input: in a chat one message after another with its role, otherwise the text.
  void print_input(const PolicyInput& input, bool chat) const {
    if (input.messages.empty() && chat) show_heading("user");
    if (input.messages.empty() || !chat) return show(input.text);
    for (const ChatMessage& message : input.messages) {
      show_heading(message.role);
      show(message.content);
    }
  }
  void show_heading(std::string_view speaker) const { write(fmt::format("--- {}\n", speaker)); }
  void write(const std::string& text) const {
    std::fwrite(text.data(), 1, text.size(), out_);
    std::fflush(out_);
  }

  // Reads the next response; `response_end` as in Arguments. Absent at the end of the input; kInvalid if it is too
  // long.
  Result<std::optional<std::string>> read_response(const std::string& response_end) const {
    if (is_interactive_)
      print_stderr("{}", response_end == "line"    ? "> "
                         : response_end == "empty" ? "(an empty line ends the response)\n"
                                                   : "(Ctrl-D ends the response)\n");
    std::string text;
    for (bool has_lines = false;; has_lines = true) {
      bool at_input_end = false;
      const std::size_t line_begin = text.size();
      for (;;) {
        const int c = std::getchar();
        at_input_end = c == EOF;
        if (at_input_end || c == '\n') break;
        if (text.size() >= kResponseBytesMax)
          return fail(Code::kInvalid, "", "the response is longer than {}", to_text(Bytes{kResponseBytesMax}));
        text.push_back(static_cast<char>(c));
      }
      if (std::ferror(stdin) != 0) return fail(Code::kIo, "", "standard input cannot be read");
      const bool line_is_empty = text.size() == line_begin;
      if (at_input_end && line_is_empty) {
        if (!has_lines) return std::optional<std::string>();
        break;
      }
      if (at_input_end || response_end == "line") return std::optional(std::move(text));
      if (response_end == "empty" && line_is_empty) break;
      text.push_back('\n');
    }
    if (text.ends_with('\n')) text.pop_back();
    return std::optional(std::move(text));
  }
  // Whether responses must be printed: a terminal has shown them as they were typed, a file has not.
  bool echoes_responses() const { return !is_interactive_; }

 private:
  std::FILE* const out_;
  const bool is_interactive_;
};

std::string components_text(const Score& score) {
  std::string text;
  for (const auto& [name, value] : score.components) text += fmt::format("  {} {:g}", printable(name, 40), value);
  return text;
}

json as_json(const Score& score) {
  return {{"reward", score.reward}, {"components", score.components}, {"correct", score.correct}};
}

Result<data_plane::Problem> chosen_problem(const Arguments& args, const data_plane::Adapter& adapter) {
  if (!args.held_out) return adapter.problem(args.problem);
  auto problems = adapter.evaluation();
  if (args.problem >= problems.size())
    return fail(Code::kInvalid, "", "--problem {}: the task has {} held-out problems, counted from 0", args.problem,
                problems.size());
  return std::move(problems[args.problem]);
}

Status play(const Arguments& args) {
  ECHO_ASSIGN(const TaskChoice choice, choose_task(args.task_args));
  auto adapter_or_error = data_plane::make_adapter(choice.task.adapter, choice.task.options_json, choice.seed);
  if (!adapter_or_error) return as_user_error(std::move(adapter_or_error).error());
  const auto adapter = *std::move(adapter_or_error);
  ECHO_ASSIGN(const auto problem, chosen_problem(args, *adapter));
  ECHO_ASSIGN(const auto episode,
              adapter->begin(problem, data_plane::episode_seed(choice.seed, /*group=*/args.problem, /*member=*/0)));

  const Transcript transcript(args.as_json);
  const bool chat = choice.prompts.chat;
  transcript.show_heading(
      fmt::format("{}: problem {}, seed {}", printable(choice.label), printable(problem.id(), 128), choice.seed));
  transcript.print_input(chat
                             ? PolicyInput(learner::task_messages(choice.prompts, problem))
                             : model::conversation(problem.prompt(), choice.prompts.text, /*system=*/{}).back().content,
                         chat);
  Score total;
  json turns = json::array();
  bool done = false;
  while (!done && turns.size() < data_plane::kTurnsMax) {
    if (chat) transcript.show_heading("assistant");
    ECHO_ASSIGN(auto response, transcript.read_response(args.response_end));
    if (!response) break;
    if (transcript.echoes_responses()) transcript.show(chat ? *response : "> " + *response);
    auto step = data_plane::step_and_wait(*episode, *response);
    if (!step)
      return fail(step.error().code, "", "turn {} of '{}': {}", turns.size() + 1, problem.id(), step.error().message());
    data_plane::add(total, step->score);
    done = step->done;
    transcript.write(fmt::format("[turn {}: reward {:g}{}{}]\n", turns.size() + 1, step->score.reward,
                                 components_text(step->score), done ? "" : "; it goes on"));
    turns.push_back(as_json(step->score));
    turns.back().update({{"response", *response}, {"done", done}});
    if (done) break;
    if (step->side_prompt) {  // a question to the policy in another role; the user answers it as well
      turns.back()["aside"] = data_plane::to_json(*step->side_prompt);
      transcript.show_heading("for another role");
      transcript.print_input(*step->side_prompt, chat);
      continue;
    }
    turns.back()["observation"] = data_plane::to_json(step->observation);
    transcript.print_input(step->observation, chat);
  }
  if (!done) {
    // The end of an unfinished episode can have a score of its own, such as a lost stake. It does not change `correct`.
    const Score last_score = episode->cut();
    const bool was_correct = total.correct;
    data_plane::add(total, last_score);
    total.correct = was_correct;
    if (transcript.echoes_responses() || turns.empty()) transcript.write("\n");
    transcript.write(fmt::format("[{}: reward {:g}{}]\n",
                                 turns.size() == data_plane::kTurnsMax ? "that was the last allowed turn"
                                                                       : "the input ended before the task was done",
                                 last_score.reward, components_text(last_score)));
  }
  transcript.show_heading(fmt::format("{}, reward {:g} in {} turn{}{}", total.correct ? "correct" : "not correct",
                                      total.reward, turns.size(), turns.size() == 1 ? "" : "s",
                                      components_text(total)));
  if (args.reveal) {
    transcript.show_heading("reference");
    transcript.show(problem.reference());
    if (const auto demonstration = adapter->demonstration(problem)) {
      transcript.show_heading("demonstration");
      transcript.show(*demonstration);
    }
  }
  if (args.as_json) {
    json result = as_json(total);
    result.update({{"schema_version", 1},
                   {"task", choice.label},
                   {"seed", choice.seed},
                   {"problem", problem.id()},
                   {"prompt", data_plane::to_json(data_plane::prompt_of(problem))},
                   {"done", done},
                   {"turns", turns}});
    if (args.reveal) result["reference"] = problem.reference();
    fmt::print("{}\n", result.dump(2, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace));
  }
  return ok();
}

}  // namespace

void add_adapter_play(Verb& adapter, int& exit_code) {
  auto* verb = adapter.add_verb(
      "play", "Answer a problem in the policy's place: see its prompt and the rewards of your answers");
  auto args = std::make_shared<Arguments>();
  args->task_args.add_options(*verb);
  verb->add_option("--problem", args->problem, "number of the training problem")->show_default();
  verb->add_flag("--held-out", args->held_out, "use a held-out problem instead");
  verb->add_option("--ends", args->response_end,
                   "what ends a response: the end of the line, an empty line, or the end of the input (Ctrl-D)")
      ->one_of({"line", "empty", "input"})
      ->show_default();
  verb->add_flag("--reveal", args->reveal, "show the reference at the end");
  verb->add_flag("--json", args->as_json, "print the episode as JSON at the end, and everything else on stderr");
  verb->callback([args, &exit_code] {
    const Status done = play(*args);
    exit_code = done ? 0 : report_error(kOperation, done.error());
  });
}

}  // namespace echoline::cli
