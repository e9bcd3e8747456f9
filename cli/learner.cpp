// echoline learner, echoline worker: the two processes of a run.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "base/files.hpp"
#include "base/log.hpp"
#include "cli/built_in.hpp"
#include "cli/output.hpp"
#include "cli/signals.hpp"
#include "cli/verbs.hpp"
#include "learner/launch.hpp"
#include "learner/report.hpp"
#include "learner/run_record.hpp"
#include "learner/service.hpp"
#include "overlay/uv/hosts.hpp"
#include "provisioner/providers/registry.hpp"
#include "worker/agent.hpp"
#include "worker/engines/make.hpp"

namespace echoline::cli {
namespace {

struct LearnerArguments {
  std::string config, plan;
  std::vector<std::string> overrides;
  bool resume = false, json = false;
};

int run_learner_verb(const LearnerArguments& a) {
  const std::atomic<bool>& stop = stop_on_signals();
  log::configure(log::Level::kInfo, "learner");
  const auto report_failure = [](const Error& error) { return report_error("learner", error); };
  const auto overrides = parse_overrides(a.overrides);
  if (!overrides) return report_failure(overrides.error());
  const auto config = learner::load_run_config(a.config, *overrides);
  if (!config) return report_failure(config.error());
  learner::ServiceOptions options;
  options.resume = a.resume;
  options.plan = a.plan;
  options.program = own_program();
  options.built_in = built_in_trainer();
  options.planned = [](const provisioner::Plan& plan) { print_stderr("{}\n", plan.to_table()); };
  const auto outcome = learner::run_learner(*config, options, stop);
  if (!outcome) return report_failure(outcome.error());
  if (a.json) fmt::print("{}\n", learner::json_text(outcome->report, 2));
  return outcome->completed ? 0 : 1;
}

struct WorkerArguments {
  std::string join, place, name = "worker", token, token_file, folder, bind, advertise, up, down;
  std::string away_max, memory_max, disk_max, cache_max, engine_name = "builtin", engine_folder, patience;
  std::uint16_t port = 0;
  double rollouts_per_s = 0;
  worker::EngineOptions engine;
};

Result<overlay::Endpoint> parse_endpoint(std::string_view option, const std::string& text) {
  const std::size_t colon = text.rfind(':');
  unsigned port = 0;
  if (colon != std::string::npos && colon > 0)
    for (const char c : text.substr(colon + 1))
      port = c >= '0' && c <= '9' && port < 65536 ? port * 10 + unsigned(c - '0') : 65536;
  if (port == 0 || port > 65535)
    return fail(Code::kInvalid, option, "expected HOST:PORT such as 127.0.0.1:7070 or [::1]:7070, found '{}'", text);
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return overlay::Endpoint{std::move(host), static_cast<std::uint16_t>(port)};
}

// The token from the command line, a file or the environment, in this order. The variable is removed from the
// environment, so that child processes do not inherit it.
Result<overlay::trust::Secret> find_token(const WorkerArguments& a) {
  std::string text = a.token;
  if (text.empty() && !a.token_file.empty()) {
    ECHO_ASSIGN(text, read_file(a.token_file, 4096));
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' ')) text.pop_back();
  }
  if (const char* value = std::getenv(learner::kTokenVariable); text.empty() && value) text = value;
  ::unsetenv(learner::kTokenVariable);
  return overlay::trust::Secret(std::move(text));
}

int run_worker(const WorkerArguments& a, const std::atomic<bool>& stop) {
  worker::AgentOptions agent;
  overlay::WorkerOptions& options = agent.node;
  const auto learner = parse_endpoint("--join", a.join);
  if (!learner) return report_error("worker", learner.error());
  options.learner = *learner;
  auto token = find_token(a);
  if (!token) return report_error("worker", token.error());
  options.token = std::move(*token);
  if (!a.advertise.empty()) {
    const auto advertise = parse_endpoint("--advertise", a.advertise);
    if (!advertise) return report_error("worker", advertise.error());
    options.advertise = *advertise;
  } else {
    const auto mapped = provisioner::mapped_port(a.port, [](const char* name) { return std::getenv(name); });
    if (mapped) options.advertise = overlay::Endpoint{mapped->host, mapped->port};
    if (mapped) log::info("other workers reach its port {} as {}", a.port, overlay::to_text(*options.advertise));
  }
  options.port = a.port;
  options.folder = a.folder;
  for (const auto& [text, rate] : {std::pair(&a.up, &options.limits.up), std::pair(&a.down, &options.limits.down)}) {
    if (text->empty()) continue;
    const auto parsed = parse_bit_rate(*text);
    if (!parsed) return report_error("worker", parsed.error());
    *rate = *parsed;
  }
  worker::EngineOptions engine = a.engine;
  for (const auto& [text, size] :
       {std::pair(&a.memory_max, &options.memory_max), std::pair(&a.disk_max, &options.disk_max),
        std::pair(&a.cache_max, &engine.cache_max)}) {
    if (text->empty()) continue;
    const auto parsed = parse_bytes(*text);
    if (!parsed) return report_error("worker", parsed.error());
    *size = *parsed;
  }
  if (!a.away_max.empty()) {
    const auto parsed = parse_duration(a.away_max);
    if (!parsed) return report_error("worker", parsed.error());
    options.away_max = *parsed;
  }
  const overlay::Listening listening =
      overlay::listening_for(a.bind, options.advertise.has_value(), options.learner.host);
  options.bind_host = listening.host;
  if (listening.leaf)
    log::warn(
        "the worker listens on {} only, so other workers cannot fetch policies from it and it will not forward any; "
        "use --bind :: or --advertise HOST:PORT to change that",
        listening.host);
  options.name = a.name;
  options.place = a.place;
  engine.kind = a.engine_name == "sglang" ? worker::EngineKind::kSglang
                : a.engine_name == "vllm" ? worker::EngineKind::kVllm
                                          : worker::EngineKind::kBuiltin;
  if (engine.kind == worker::EngineKind::kBuiltin) {
    auto builtin = built_in_engine();
    if (!builtin) return report_error("worker", builtin.error());
    engine.builtin = std::move(*builtin);
  }
  engine.folder = a.engine_folder;
  if (!a.patience.empty()) {
    const auto parsed = parse_duration(a.patience);
    if (!parsed) return report_error("worker", parsed.error());
    engine.patience = *parsed;
  }
  auto maker = worker::engine_maker(std::move(engine));
  if (!maker) return report_error("worker", maker.error());
  agent.engine = std::move(*maker);
  if (a.rollouts_per_s > 0) agent.rollouts_per_s_max = a.rollouts_per_s;
  const auto report = worker::run_agent(agent, stop);
  if (!report) return report_error("worker", report.error());
  const double versions = static_cast<double>(std::max<std::uint64_t>(1, report->versions));
  log::info(
      "{} rollouts accepted, {} leases refused, {} versions installed (in the mean {:.1f} ms each, {:.1f} ms after "
      "they had "
      "come); ended: {}",
      report->rollouts, report->refused, report->versions, 1e3 * seconds(report->install_times) / versions,
      1e3 * seconds(report->install_waits) / versions, report->reason);
  if (!report->in_order)
    return report_error("worker",
                        fail(Code::kUnavailable, "work", "the worker ended before the run: {}", report->reason));
  return 0;
}

int run_worker_verb(const WorkerArguments& a) {
  const std::atomic<bool>& stop = stop_on_signals();
  log::configure(log::Level::kInfo, "worker " + a.name);
  const auto instance = provisioner::own_instance();
  const int exit_code = run_worker(a, stop);
  if (stop || !instance) return exit_code;  // the sender of the signal ends the instance
  if (const Status ended = instance->end(); ended)
    log::info("this instance ({}) is ended so that it costs nothing more", instance->id);
  else
    log::warn("this instance may continue to cost money: {}", ended.error().message());
  return exit_code;
}

}  // namespace

void add_learner(Verb& app, int& exit_code) {
  auto* verb = app.add_verb("learner", "Run the learner of a run file; `up` starts this and shows the progress");
  auto a = std::make_shared<LearnerArguments>();
  verb->add_option("config", a->config, "run file, e.g. configs/quickstart.yaml")->required();
  verb->add_option("--set", a->overrides, "override a key of the run file, e.g. --set run.steps=50")->one_value_each();
  verb->add_option("--plan", a->plan, "rent by this plan.json instead of making a new plan");
  verb->add_flag("--resume", a->resume, "continue from the last checkpoint of this run");
  verb->add_flag("--json", a->json, "print the report as JSON at the end");
  verb->callback([a, &exit_code] { exit_code = run_learner_verb(*a); });
}

void add_worker(Verb& app, int& exit_code) {
  auto* verb = app.add_verb("worker", "Join a learner; generate and score rollouts, forward policies");
  auto a = std::make_shared<WorkerArguments>();
  verb->add_option("--join", a->join, "address of the learner, HOST:PORT; HOST is an IP address or a name")->required();
  verb->add_option("--name", a->name, "name of this worker at the learner: its offer id");
  verb->add_option("--place", a->place,
                   "the worker's place, as in network.regions, e.g. 'DE'; default: the place in its offer");
  verb->add_option("--token", a->token,
                   "join token; other users of this machine can see it here, so prefer --token-file or ECHOLINE_TOKEN");
  verb->add_option("--token-file", a->token_file,
                   "file with the join token; without --token and --token-file, ECHOLINE_TOKEN is read");
  verb->add_option("--folder", a->folder,
                   "folder for identity and received chunks, which survive a restart; without it, nothing is kept");
  verb->add_option(
      "--bind", a->bind,
      "address where other workers fetch policies; '::' for all, IPv4 and IPv6; default: all with --advertise, "
      "otherwise 127.0.0.1, where none on other machines can");
  verb->add_option("--port", a->port, "port of --bind; 0: any free port");
  verb->add_option("--advertise", a->advertise,
                   "HOST:PORT where others reach this worker, if its port is mapped; default: what a container of "
                   "vast.ai is told of "
                   "its --port");
  verb->add_option("--up", a->up, "limit of the uplink, e.g. '8 Mbit/s'");
  verb->add_option("--down", a->down, "limit of the downlink");
  verb->add_option("--away-max", a->away_max,
                   "how long to try to come back to a learner out of reach, e.g. '10 min'; default: the learner's "
                   "fleet.away_max");
  verb->add_option("--memory-max", a->memory_max,
                   "memory for publications, e.g. '4 GiB'; default: by the policy's size, 256 MiB with a folder");
  verb->add_option("--disk-max", a->disk_max, "disk space for publications in --folder; default: by the policy's size");
  verb->add_option("--rollouts-per-s", a->rollouts_per_s, "limit of the generation speed")->non_negative();
  verb->add_option("--rollouts-at-once", a->engine.rollouts_at_once, "limit of the responses generated at a time")
      ->range(1, 65536);
  verb->add_option("--cache-max", a->cache_max,
                   "memory for keys and values of their tokens, e.g. '8 GiB' (default: 4 GiB)");
  verb->add_option("--device", a->engine.device, "device of the built-in engine: cpu, cuda or cuda:N")->show_default();
  verb->add_option(
          "--threads", a->engine.threads,
          "threads that generate on a CPU, and that decode policies; 0: as many as this machine has; default: 1 "
          "where the built-in engine computes on a CPU, otherwise 0")
      ->range(0u, 1024u);
  verb->add_option("--engine", a->engine_name, "engine that generates: builtin, sglang or vllm")
      ->one_of({"builtin", "sglang", "vllm"})
      ->show_default();
  verb->add_option("--engine-command", a->engine.command,
                   "starts it as a child of this worker, e.g. 'vllm serve {model} --host 127.0.0.1 --port {port}'");
  verb->add_option("--engine-url", a->engine.url,
                   "or where one runs that reads --engine-folder, e.g. http://127.0.0.1:30000");
  verb->add_option("--engine-folder", a->engine_folder,
                   "where the policy is kept for it as a Hugging Face directory; default: a new one in /dev/shm");
  verb->add_option(
      "--engine-patience", a->patience,
      "how long its start, loading a policy, or an answer may take before it counts as hung (default: 10 min)");
  verb->footer(
      "Example, with a token from `echoline token --instance my-gpu` on the learner's machine:\n"
      "  ECHOLINE_TOKEN=... echoline worker --join 192.0.2.7:7070 --name my-gpu \\\n"
      "    --bind :: --up '100 Mbit/s'");
  verb->callback([a, &exit_code] { exit_code = run_worker_verb(*a); });
}

}  // namespace echoline::cli
