// echoline learner, echoline worker: the two processes of a run.
#include <unistd.h>

#include <cstdio>

#include "base/log.hpp"
#include "cli/signals.hpp"
#include "cli/verbs.hpp"
#include "learner/report.hpp"
#include "learner/service.hpp"
#include "worker/agent.hpp"

namespace echoline::cli {
namespace {

struct LearnerArguments {
  std::string config;
  std::vector<std::string> overrides;
  bool resume = false, json = false;
};

int run_learner_verb(const LearnerArguments& a) {
  const std::atomic<bool>& stop = stop_on_signals();
  log::configure(log::Level::kInfo, "learner");
  const auto overrides = parse_overrides(a.overrides);
  if (!overrides) return complain("learner", overrides.error());
  const auto config = learner::load_run_config(a.config, *overrides);
  if (!config) return complain("learner", config.error());
  learner::ServiceOptions options;
  options.resume = a.resume;
  options.program = std::filesystem::read_symlink("/proc/self/exe");
  const auto outcome = learner::run_learner(*config, options, stop);
  if (!outcome) return complain("learner", outcome.error());
  if (a.json) fmt::print("{}\n", outcome->report.dump(2));
  return outcome->completed ? 0 : 1;
}

struct WorkerArguments {
  std::string join, name = "worker", run, bind = "127.0.0.1", up, down;
  double rollouts_per_s = 0;
  int threads = 1;
};

Result<overlay::Endpoint> parse_endpoint(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  unsigned port = 0;
  if (colon != std::string::npos && colon > 0)
    for (const char c : text.substr(colon + 1))
      port = c >= '0' && c <= '9' && port < 65536 ? port * 10 + unsigned(c - '0') : 65536;
  if (port == 0 || port > 65535)
    return fail(Code::kInvalid, "--join", "expected HOST:PORT such as 127.0.0.1:7070, found '{}'", text);
  return overlay::Endpoint{text.substr(0, colon), static_cast<std::uint16_t>(port)};
}

int run_worker_verb(const WorkerArguments& a) {
  const std::atomic<bool>& stop = stop_on_signals();
  log::configure(log::Level::kInfo, "worker " + a.name);
  worker::AgentOptions options;
  const auto learner = parse_endpoint(a.join);
  if (!learner) return complain("worker", learner.error());
  options.learner = *learner;
  for (const auto& [text, rate] : {std::pair(&a.up, &options.limits.up), std::pair(&a.down, &options.limits.down)}) {
    if (text->empty()) continue;
    const auto parsed = parse_bit_rate(*text);
    if (!parsed) return complain("worker", parsed.error());
    *rate = *parsed;
  }
  options.bind_host = a.bind;
  options.name = a.name;
  options.run_id = a.run;
  options.threads = a.threads;
  if (a.rollouts_per_s > 0) options.rollouts_per_s_max = a.rollouts_per_s;
  const auto report = worker::run_agent(options, stop);
  if (!report) return complain("worker", report.error());
  log::info("{} rollouts accepted, {} leases refused, {} versions installed; ended: {}", report->rollouts,
            report->refused, report->versions, report->reason);
  return 0;
}

}  // namespace

void add_learner(CLI::App& app, int& exit) {
  auto* verb = app.add_subcommand("learner", "Run the learner of a run file; `up` does this and shows the progress");
  auto a = std::make_shared<LearnerArguments>();
  verb->add_option("config", a->config, "run file, e.g. configs/quickstart.yaml")->required();
  verb->add_option("--set", a->overrides, "override a key of the run file, e.g. --set run.steps=50")
      ->allow_extra_args(false);
  verb->add_flag("--resume", a->resume, "go on from the last checkpoint of this run");
  verb->add_flag("--json", a->json, "print the report as JSON when done");
  verb->callback([a, &exit] { exit = run_learner_verb(*a); });
}

void add_worker(CLI::App& app, int& exit) {
  auto* verb = app.add_subcommand("worker", "Join a learner, generate and score rollouts, forward policies");
  auto a = std::make_shared<WorkerArguments>();
  verb->add_option("--join", a->join, "the learner, HOST:PORT")->required();
  verb->add_option("--name", a->name, "what the learner calls this worker: its offer id");
  verb->add_option("--run", a->run, "refuse a learner of any other run");
  verb->add_option("--bind", a->bind, "address where other workers fetch policies; there is no encryption yet");
  verb->add_option("--up", a->up, "limit of the uplink, e.g. '8 Mbit/s'");
  verb->add_option("--down", a->down, "limit of the downlink");
  verb->add_option("--rollouts-per-s", a->rollouts_per_s, "hold generation to this speed")
      ->check(CLI::NonNegativeNumber);
  verb->add_option("--threads", a->threads, "CPU threads for generation")->check(CLI::Range(1, 1024));
  verb->footer("Example: echoline worker --join 127.0.0.1:7070 --name my-gpu --up '100 Mbit/s'");
  verb->callback([a, &exit] { exit = run_worker_verb(*a); });
}

}  // namespace echoline::cli
