// echoline store pull: keeps a Hugging Face directory at the newest stored version.
#include "base/child_process.hpp"
#include "base/log.hpp"
#include "cli/signals.hpp"
#include "cli/store.hpp"
#include "store/replica.hpp"

namespace echoline::cli {
namespace {

using nlohmann::json;

constexpr Duration kStopPoll = std::chrono::milliseconds(100);
constexpr Duration kHookPoll = std::chrono::milliseconds(200);
constexpr double kPollMin = 0.1, kPollMax = 3600;

struct Arguments : StoreArguments {
  std::string folder, hook;
  bool follow = false;
  double poll_s = 2;
};

struct PullReport {
  store::ReplicaStep step;
  double seconds = 0;
};

// Runs the user's command with the version in its environment.
Status run_hook(const Arguments& args, const store::ReplicaStep& step, const std::atomic<bool>& stop) {
  if (args.hook.empty()) return ok();
  const std::vector<std::string> command{"/usr/bin/env",
                                         fmt::format("ECHOLINE_VERSION={}", step.name.version),
                                         fmt::format("ECHOLINE_EPOCH={}", step.name.epoch),
                                         fmt::format("ECHOLINE_DIGEST={}", step.digest.hex()),
                                         fmt::format("ECHOLINE_MODEL={}", args.folder),
                                         "/bin/sh",
                                         "-c",
                                         args.hook};
  ECHO_ASSIGN(ChildProcess child, ChildProcess::start(command));
  for (;;) {
    const auto end = child.pump(kHookPoll, [](const std::string& line) { log::info("hook: {}", line); });
    if (end && end->status == 0) return ok();
    if (end)
      return fail(Code::kUnavailable, "hook", "version {}: `{}` ended with {} {}", step.name.version, args.hook,
                  end->status ? "status" : "signal", end->status ? *end->status : end->signal.value_or(0));
    ECHO_TRY(check_not_stopped(stop));
  }
}

void print(const PullReport& report, bool as_json) {
  const store::ReplicaStep& step = report.step;
  if (as_json)
    fmt::print("{}\n", json{{"schema_version", 1},
                            {"version", step.name.version.value},
                            {"epoch", step.name.epoch},
                            {"digest", step.digest.hex()},
                            {"snapshots", step.snapshots},
                            {"deltas", step.deltas},
                            {"patch_bytes", step.patch_bytes},
                            {"seconds", report.seconds}}
                           .dump());
  else if (step.snapshots + step.deltas == 0)
    fmt::print("version {} is current\n", step.name.version);
  else
    fmt::print("version {} by {} snapshots and {} deltas, {} in {:.2f} s\n", step.name.version, step.snapshots,
               step.deltas, to_text(Bytes{step.patch_bytes}), report.seconds);
  std::fflush(stdout);
}

// One look at the store: installs the newest version if it is a new one, and runs the hook.
Status pull_once(const Arguments& args, const std::atomic<bool>& stop, bool prints_always) {
  const Stopwatch pulling;
  ECHO_ASSIGN(const OpenStore open, open_store(args));
  ECHO_ASSIGN(store::Replica replica,
              store::Replica::open(args.folder, *open.reader, {.threads = args.common.threads, .stop = &stop}));
  ECHO_ASSIGN(const store::ReplicaStep step, replica.follow());
  const bool is_new = step.snapshots + step.deltas > 0;
  if (is_new || prints_always) print({.step = step, .seconds = pulling.seconds()}, args.common.json);
  return is_new ? run_hook(args, step, stop) : ok();
}

int pull(const Arguments& args) {
  const std::atomic<bool>& stop = stop_on_signals();
  if (!args.follow) {
    const Status pulled = pull_once(args, stop, /*prints_always=*/true);
    return pulled ? 0 : report_error("store pull", pulled.error());
  }
  std::string last_trouble;
  while (!stop) {
    const Status pulled = pull_once(args, stop, /*prints_always=*/false);
    if (!pulled && pulled.error().code == Code::kInvalid) return report_error("store pull", pulled.error());
    const std::string trouble = pulled ? "" : pulled.error().message();
    if (!stop && !trouble.empty() && trouble != last_trouble) log::warn("{}; trying again", trouble);
    last_trouble = trouble;
    for (Duration waited{}; !stop && waited < from_seconds(args.poll_s); waited += kStopPoll)
      std::this_thread::sleep_for(kStopPoll);
  }
  return 0;
}

}  // namespace

void add_store_pull(Verb* group, int& exit_code) {
  auto* verb = group->add_verb("pull", "Bring a Hugging Face directory to the newest stored version");
  auto args = std::make_shared<Arguments>();
  add_store_options(verb, *args, /*with_threads=*/true);
  verb->add_option("DIR", args->folder, "the directory; made if it does not exist")->required();
  verb->add_flag("--follow", args->follow, "go on with each further version, until it is stopped");
  verb->add_option("--hook", args->hook, "shell command after each version, for instance to reload a server");
  verb->add_option("--poll", args->poll_s, "seconds between two looks at the store")
      ->range(kPollMin, kPollMax)
      ->show_default();
  verb->footer(
      "The next delta is applied in place if DIR has its base; otherwise the cheapest of a snapshot and deltas is "
      "fetched. Signatures and digests are checked before weights change, and an interrupted pull goes on where it "
      "was.\n"
      "The hook gets ECHOLINE_VERSION, ECHOLINE_EPOCH, ECHOLINE_DIGEST and ECHOLINE_MODEL (DIR).");
  verb->callback([args, &exit_code] { exit_code = pull(*args); });
}

}  // namespace echoline::cli
