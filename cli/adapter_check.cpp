// echoline adapter check: finds the mistakes of a task before a run does. A child process tries the task, so that this
// process can report a task that crashes or hangs.
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/log.hpp"
#include "base/text.hpp"
#include "cli/adapter_verbs.hpp"
#include "cli/output.hpp"
#include "cli/task_choice.hpp"
#include "cli/verbs.hpp"
#include "data_plane/adapters/check/check.hpp"

namespace echoline::cli {
namespace {

using data_plane::CheckReport;
using data_plane::Finding;
using nlohmann::json;

struct Arguments {
  TaskArguments task_args;
  double time_s = 20;       // about how long to test
  double patience_s = 120;  // a task that makes no progress for this long counts as hanging
  std::size_t problems = 64, batch = 64;
  bool as_json = false;
};

std::string json_line(const json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace) + "\n";
}

void write_line_or_exit(int descriptor, const std::string& line) {
  for (std::size_t bytes_written = 0; bytes_written < line.size();) {
    const ssize_t written = ::write(descriptor, line.data() + bytes_written, line.size() - bytes_written);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) ::_exit(1);  // the parent has closed the pipe
    bytes_written += static_cast<std::size_t>(written);
  }
}

json as_json(const Finding& finding) {
  json object{{"check", finding.check}, {"wrong", finding.wrong}, {"what", finding.what}};
  if (!finding.problem.empty()) object["problem"] = finding.problem;
  if (!finding.response.empty()) object["response"] = finding.response;
  return object;
}

// Runs in the child process. Before each step it writes to `pipe_end` what it is about to try; at the end, its
// findings.
[[noreturn]] void run_child(const Arguments& args, const TaskChoice& choice, int pipe_end) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);         // it must not outlive the parent
  log::configure(log::Level::kOff, "check");  // the findings say all, and the parent draws its progress on stderr
  data_plane::CheckOptions options;
  options.name = choice.task.adapter;
  options.options_json = choice.task.options_json;
  options.seed = choice.seed;
  options.time = from_seconds(args.time_s);
  options.problems = args.problems;
  options.batch = args.batch;
  options.before_call = [pipe_end](std::string_view what, std::string_view problem, std::string_view response) {
    write_line_or_exit(pipe_end, json_line({{"doing", what}, {"problem", problem}, {"response", response}}));
  };
  const SystemClock clock;
  const auto report = data_plane::check_adapter(options, clock);
  json message;
  if (report) {
    message = {{"facts", report->facts}, {"further", report->further}, {"findings", json::array()}};
    for (const Finding& finding : report->findings) message["findings"].push_back(as_json(finding));
  } else {
    message = {{"error",
                {{"code", static_cast<int>(report.error().code)},
                 {"operation", report.error().operation},
                 {"detail", report.error().detail}}}};
  }
  write_line_or_exit(pipe_end, json_line(message));
  ::_exit(0);  // without destructors: the parent's buffers and objects must not be flushed or ended twice
}

std::string describe_exit(int status) {
  if (WIFSIGNALED(status))
    return fmt::format("it was ended by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  return fmt::format("it ended this program with status {}", WEXITSTATUS(status));
}

// Reads the child's lines until its report: {facts, findings, further}; `further` counts findings that are left out. If
// the child ends or hangs before that, the returned report has one finding, which names the step it was about to try.
Result<json> read_child_report(pid_t child, int pipe_end, Duration patience) {
  std::string received;
  json current_step = {{"doing", "starting"}, {"problem", ""}, {"response", ""}};
  const bool shows_progress = ::isatty(STDERR_FILENO) == 1;
  const auto failure_report = [&](std::string what) {
    const Finding finding{.check = "calls",
                          .wrong = true,
                          .what = fmt::format("{}: {}", current_step.value("doing", ""), what),
                          .problem = current_step.value("problem", ""),
                          .response = current_step.value("response", "")};
    return json{{"facts", json::object()}, {"further", json::object()}, {"findings", {as_json(finding)}}};
  };
  const auto wait_for_child = [&] {
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    return status;
  };
  for (;;) {
    pollfd poll_entry{.fd = pipe_end, .events = POLLIN, .revents = 0};
    constexpr double kTimeoutMsMax = 2e9;  // poll() takes an int
    const int ready_count = ::poll(&poll_entry, 1, static_cast<int>(std::min(seconds(patience) * 1000, kTimeoutMsMax)));
    if (ready_count < 0 && errno == EINTR) continue;
    if (ready_count == 0) {
      ::kill(child, SIGKILL);
      wait_for_child();
      return failure_report(fmt::format("the task hangs: no progress for {}", to_text(patience)));
    }
    char bytes[1 << 16];
    const ssize_t bytes_read = ::read(pipe_end, bytes, sizeof bytes);
    if (bytes_read < 0 && errno == EINTR) continue;
    if (bytes_read <= 0) return failure_report(describe_exit(wait_for_child()));
    received.append(bytes, static_cast<std::size_t>(bytes_read));
    for (std::size_t end = 0; (end = received.find('\n')) != std::string::npos;) {
      json message = json::parse(received.substr(0, end), nullptr, /*allow_exceptions=*/false);
      received.erase(0, end + 1);
      if (!message.is_object()) return failure_report("the task wrote to a descriptor that it must not use");
      if (message.contains("doing")) {
        if (shows_progress && message.value("doing", "") != current_step.value("doing", ""))
          print_stderr("\r\033[K{:.70}", message.value("doing", ""));  // cut, so that it stays on one line
        current_step = std::move(message);
        continue;
      }
      if (shows_progress) print_stderr("\r\033[K");
      wait_for_child();
      if (const auto error = message.find("error"); error != message.end())
        return as_user_error(Error{static_cast<Code>(error->value("code", 0)), error->value("operation", ""),
                                   error->value("detail", "")});
      return message;
    }
  }
}

// Runs the check in a child process. Returns its report, as read_child_report() does.
Result<json> check(const Arguments& args, const TaskChoice& choice) {
  int pipe_ends[2];
  if (::pipe(pipe_ends) != 0) return fail(Code::kIo, "check", "pipe: {}", std::strerror(errno));
  std::fflush(nullptr);  // otherwise the child would write buffered output again
  const pid_t child = ::fork();
  if (child < 0) return fail(Code::kIo, "check", "fork: {}", std::strerror(errno));
  if (child == 0) {
    ::close(pipe_ends[0]);
    run_child(args, choice, pipe_ends[1]);
  }
  ::close(pipe_ends[1]);
  auto message = read_child_report(child, pipe_ends[0], from_seconds(args.patience_s));
  ::close(pipe_ends[0]);
  return message;
}

std::string time_text(double us) {  // microseconds
  return us >= 1e6    ? fmt::format("{:.2f} s", us / 1e6)
         : us >= 1000 ? fmt::format("{:.1f} ms", us / 1000)
                      : fmt::format("{:.1f} us", us);
}

void print_facts(const TaskChoice& choice, const json& facts) {
  fmt::print("{}, seed {}\n", choice.label, choice.seed);
  if (facts.contains("start_seconds"))
    fmt::print("{:<15}{}\n", "ready after", time_text(1e6 * facts.at("start_seconds").get<double>()));
  if (facts.contains("problems"))
    fmt::print("{:<15}{} tested, {} different\n", "problems", facts.at("problems").dump(),
               facts.at("problems_different").dump());
  if (facts.contains("held_out"))
    fmt::print("{:<15}{}; searched among {} training problems\n", "held out", facts.at("held_out").dump(),
               facts.value("compared_with_held_out", 0));
  if (facts.contains("demonstrations")) {
    const json& demonstrations = facts.at("demonstrations");
    const auto tried = demonstrations.at("tried").get<std::uint64_t>(),
               multi_turn = demonstrations.at("first_of_many_turns").get<std::uint64_t>();
    fmt::print("{:<15}{}\n", "demonstrations",
               tried > 0        ? fmt::format("{} of {} are correct", demonstrations.at("correct").dump(), tried)
               : multi_turn > 0 ? fmt::format("{} first turns of several", multi_turn)
                                : "none");
  }
  if (facts.contains("responses")) {
    const json& responses = facts.at("responses");
    fmt::print("{:<15}{} kinds to {} problems; {} scores, {} failures, {} different rewards; repeatable: {}\n",
               "responses", responses.at("kinds").dump(), responses.at("problems").dump(),
               responses.at("scores").dump(), responses.at("failed").dump(), responses.at("rewards").dump(),
               facts.value("repeatable", ""));
  }
  if (facts.contains("episodes"))
    fmt::print("{:<15}{} played, the longest with {} turns\n", "episodes", facts.at("episodes").at("played").dump(),
               facts.at("episodes").at("longest").dump());
  if (facts.contains("speed")) {
    const json& speed = facts.at("speed");
    fmt::print("{:<15}median {}, p99 {}; {} at a time: {:.0f} per second\n", "speed", time_text(speed.at("median_us")),
               time_text(speed.at("p99_us")), speed.at("batch").dump(), speed.at("per_s").get<double>());
  }
}

void print_findings(const json& message, bool wrong) {
  for (const json& finding : message.at("findings")) {
    if (finding.at("wrong").get<bool>() != wrong) continue;
    fmt::print("{} ({}): {}\n", wrong ? "WRONG" : "note", finding.at("check").get<std::string>(),
               finding.at("what").get<std::string>());
    if (finding.contains("problem"))
      fmt::print("    problem {}{}\n", finding.at("problem").get<std::string>(),
                 finding.contains("response") ? ", response '" + finding.at("response").get<std::string>() + "'" : "");
    else if (finding.contains("response"))
      fmt::print("    response '{}'\n", finding.at("response").get<std::string>());
  }
}

// Adds a note about a task whose program needs more than half of its deadline here. On a busy machine it could exceed
// the deadline and be ended.
void compare_with_deadline(const TaskChoice& choice, json& message) {
  const json options = json::parse(choice.task.options_json, nullptr, /*allow_exceptions=*/false);
  const json& facts = message.at("facts");
  if (choice.task.adapter != "process" || !options.is_object() || !facts.contains("responses") ||
      !facts.contains("speed"))
    return;
  const auto deadline = parse_duration(options.value("deadline", "30 s"));
  if (!deadline) return;
  const auto note = [&](std::string what) {
    message["findings"].push_back(
        as_json(Finding{.check = "speed", .wrong = false, .what = std::move(what), .problem = {}, .response = {}}));
  };
  const double slowest_s = facts.at("responses").value("slowest_seconds", 0.0), deadline_s = seconds(*deadline);
  if (slowest_s > deadline_s / 2 && slowest_s < deadline_s)
    note(fmt::format("the slowest response took {:.2f} s; the deadline is {}", slowest_s, to_text(*deadline)));
  const double batch = options.value("batch", 64.0),
               one_request_s = batch * facts.at("speed").value("median_us", 0.0) / 1e6;
  if (one_request_s > deadline_s / 2)
    note(
        fmt::format("{} responses in one request would take {:.1f} s, and the deadline is {}: lower task.options.batch "
                    "or raise the deadline",
                    batch, one_request_s, to_text(*deadline)));
}

int run(const Arguments& args) {
  const auto report_failure = [&](const Error& error) { return report_error("adapter check", error); };
  const auto choice = choose_task(args.task_args);
  if (!choice) return report_failure(choice.error());
  auto message = check(args, *choice);
  if (!message) return report_failure(message.error());
  compare_with_deadline(*choice, *message);
  const bool is_sound = std::ranges::none_of(message->at("findings"),
                                             [](const json& finding) { return finding.at("wrong").get<bool>(); });
  if (args.as_json) {
    json report = message->at("facts");
    report.update({{"schema_version", 1},
                   {"task", choice->label},
                   {"seed", choice->seed},
                   {"sound", is_sound},
                   {"findings", message->at("findings")},
                   {"further", message->at("further")}});
    fmt::print("{}\n", report.dump(2, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace));
    return is_sound ? 0 : 1;
  }
  print_facts(*choice, message->at("facts"));
  print_findings(*message, /*wrong=*/true);
  print_findings(*message, /*wrong=*/false);
  for (const auto& [check, count] : message->at("further").items())
    fmt::print("and {} more of '{}'\n", count.dump(), check);
  fmt::print("{}\n", is_sound ? "no mistakes found" : "the task is not ready for a run");
  return is_sound ? 0 : 1;
}

}  // namespace

void add_adapter_check(Verb& adapter, int& exit_code) {
  auto* verb = adapter.add_verb("check", "Try a task in the way a run uses it, and report its mistakes");
  auto args = std::make_shared<Arguments>();
  args->task_args.add_options(*verb);
  verb->add_option("--seconds", args->time_s, "approximate time of the check; a slow task is tested less thoroughly")
      ->range(0.1, 86'400.0)
      ->show_default();
  verb->add_option("--problems", args->problems, "number of training problems to test")
      ->range<std::size_t>(1, 4096)
      ->show_default();
  verb->add_option("--batch", args->batch, "responses graded at a time in the speed test")
      ->range<std::size_t>(1, 65'536)
      ->show_default();
  verb->add_option("--patience", args->patience_s, "seconds after which a call counts as hanging")
      ->range(0.1, 86'400.0)
      ->show_default();
  verb->add_flag("--json", args->as_json, "print JSON (docs/reference/task-verbs.md has the fields)");
  verb->footer("Exit code 0: no mistakes; 1: mistakes; 2: the task cannot be created from these options.");
  verb->callback([args, &exit_code] { exit_code = run(*args); });
}

}  // namespace echoline::cli
