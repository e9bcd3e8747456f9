// echoline learner, echoline worker: the two kinds of processes of a run.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "base/files.hpp"
#include "base/log.hpp"
#include "cli/built_in.hpp"
#include "cli/join.hpp"
#include "cli/output.hpp"
#include "cli/signals.hpp"
#include "cli/verbs.hpp"
#include "learner/launch.hpp"
#include "learner/report.hpp"
#include "learner/run_record.hpp"
#include "learner/service.hpp"
#include "overlay/uv/hosts.hpp"
#include "provisioner/host_guard.hpp"
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

int run_learner_verb(const LearnerArguments& args) {
  const std::atomic<bool>& stop = stop_on_signals();
  log::configure(log::Level::kInfo, "learner");
  const auto report_failure = [](const Error& error) { return report_error("learner", error); };
  const auto overrides = parse_overrides(args.overrides);
  if (!overrides) return report_failure(overrides.error());
  const auto config = learner::load_run_config(args.config, *overrides);
  if (!config) return report_failure(config.error());
  learner::ServiceOptions options;
  options.resume = args.resume;
  options.plan = args.plan;
  options.program = own_program();
  options.built_in = built_in_trainer();
  options.on_plan = [](const provisioner::Plan& plan) { print_stderr("{}\n", plan.to_table()); };
  const auto outcome = learner::run_learner(*config, options, stop);
  if (!outcome) return report_failure(outcome.error());
  if (args.json) fmt::print("{}\n", learner::json_text(outcome->report, /*indent=*/2));
  return outcome->completed && outcome->unreturned.empty() ? 0 : 1;
}

struct WorkerArguments {
  std::string join, place, name = "worker", token, token_file, folder, bind, advertise, up, down;
  std::string away_max, memory_max, disk_max, cache_max, engine_name = "builtin", engine_folder, engine_timeout;
  std::string silence_max;
  std::uint16_t port = 0;
  double rollouts_per_s = 0;
  worker::EngineOptions engine;
};

int run_worker(const WorkerArguments& args, const std::atomic<bool>& stop, std::function<void()> on_contact) {
  worker::AgentOptions agent_options;
  agent_options.on_contact = std::move(on_contact);
  overlay::WorkerOptions& node_options = agent_options.node;
  const auto learner = overlay::parse_endpoint("--join", args.join);
  if (!learner) return report_error("worker", learner.error());
  node_options.learner = *learner;
  auto token = find_token(args.token, args.token_file);
  if (!token) return report_error("worker", token.error());
  node_options.token = std::move(*token);
  if (!args.advertise.empty()) {
    const auto advertise = overlay::parse_endpoint("--advertise", args.advertise);
    if (!advertise) return report_error("worker", advertise.error());
    node_options.advertise = *advertise;
  } else {
    // Containers of some providers state in their environment where a port can be reached.
    const auto mapped = provisioner::mapped_port(args.port, [](const char* name) { return std::getenv(name); });
    if (mapped) {
      node_options.advertise = overlay::Endpoint{mapped->host, mapped->port};
      log::info("other workers reach this worker's port {} at {}", args.port,
                overlay::to_text(*node_options.advertise));
    }
  }
  node_options.port = args.port;
  node_options.folder = args.folder;
  for (const auto& [text, rate] :
       {std::pair(&args.up, &node_options.limits.up), std::pair(&args.down, &node_options.limits.down)}) {
    if (text->empty()) continue;
    const auto parsed = parse_bit_rate(*text);
    if (!parsed) return report_error("worker", parsed.error());
    *rate = *parsed;
  }
  worker::EngineOptions engine = args.engine;
  for (const auto& [text, size] :
       {std::pair(&args.memory_max, &node_options.memory_max), std::pair(&args.disk_max, &node_options.disk_max),
        std::pair(&args.cache_max, &engine.cache_max)}) {
    if (text->empty()) continue;
    const auto parsed = parse_bytes(*text);
    if (!parsed) return report_error("worker", parsed.error());
    *size = *parsed;
  }
  if (!args.away_max.empty()) {
    const auto parsed = parse_duration(args.away_max);
    if (!parsed) return report_error("worker", parsed.error());
    node_options.away_max = *parsed;
  }
  const overlay::Listening listening =
      overlay::listening_for(args.bind, node_options.advertise.has_value(), node_options.learner.host);
  node_options.bind_host = listening.host;
  if (listening.leaf)
    log::warn(
        "the worker listens on {} only, so other workers cannot fetch policies from it and it will not forward any; "
        "use --bind :: or --advertise HOST:PORT to change that",
        listening.host);
  node_options.name = args.name;
  node_options.place = args.place;
  engine.kind = args.engine_name == "sglang" ? worker::EngineKind::kSglang
                : args.engine_name == "vllm" ? worker::EngineKind::kVllm
                                             : worker::EngineKind::kBuiltin;
  if (engine.kind == worker::EngineKind::kBuiltin) {
    auto builtin = built_in_engine();
    if (!builtin) return report_error("worker", builtin.error());
    engine.builtin_maker = std::move(*builtin);
  }
  engine.folder = args.engine_folder;
  if (const char* command = std::getenv(learner::kEngineCommandVariable); command && engine.command.empty())
    engine.command = command;
  if (!args.engine_timeout.empty()) {
    const auto parsed = parse_duration(args.engine_timeout);
    if (!parsed) return report_error("worker", parsed.error());
    engine.patience = *parsed;
  }
  auto maker = worker::engine_maker(std::move(engine));
  if (!maker) return report_error("worker", maker.error());
  agent_options.make_engine = std::move(*maker);
  if (args.rollouts_per_s > 0) agent_options.rollouts_per_s_max = args.rollouts_per_s;
  const auto report = worker::run_agent(agent_options, stop);
  if (!report) return report_error("worker", report.error());
  const double versions_or_1 = static_cast<double>(std::max<std::uint64_t>(1, report->versions));
  log::info(
      "{} rollouts accepted, {} leases refused, {} versions installed (mean: {:.1f} ms to install, {:.1f} ms from "
      "arrival to installation); ended: {}",
      report->rollouts, report->refused, report->versions, 1e3 * seconds(report->install_times) / versions_or_1,
      1e3 * seconds(report->install_waits) / versions_or_1, report->reason);
  if (!report->ended_cleanly)
    return report_error("worker",
                        fail(Code::kUnavailable, "work", "the worker ended before the run: {}", report->reason));
  return 0;
}

int run_worker_verb(const WorkerArguments& args) {
  const std::atomic<bool>& stop = stop_on_signals();
  log::configure(log::Level::kInfo, "worker " + args.name);
  const auto instance = provisioner::own_instance();
  if (!instance) return run_worker(args, stop, /*on_contact=*/{});
  provisioner::HostGuardOptions guard;
  if (!args.silence_max.empty()) {
    const auto parsed = parse_duration(args.silence_max);
    if (!parsed) return report_error("worker", parsed.error());
    guard.silence_max = *parsed;
  }
  guard.end_instance = [&instance]() -> Status {
    ECHO_TRY(instance->end());
    log::info("this instance ({}) is ended so that it costs nothing more", instance->id);
    return ok();
  };
  // guard_host() forks. In the child, it returns nothing, and the child runs the worker. In the parent, which is the
  // guard, it returns the exit code once the child has ended.
  provisioner::GuardedWorker worker;
  if (const auto exit_code = provisioner::guard_host(guard, stop, worker)) return *exit_code;
  const int exit_code = run_worker(args, stop, worker.on_contact);
  // The guard ends the instance. If the guard was killed or stopped, or could not be started, the worker does.
  if (worker.has_guard() || stop) return exit_code;
  if (const Status ended = guard.end_instance(); !ended)
    log::warn("this instance may continue to cost money: {}", ended.error().message());
  return exit_code;
}

}  // namespace

void add_learner(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("learner", "Run the learner of a run file; `up` starts this and shows the progress");
  auto args = std::make_shared<LearnerArguments>();
  verb->add_option("config", args->config, "run file, e.g. configs/quickstart.yaml")->required();
  verb->add_option("--set", args->overrides, "override a key of the run file, e.g. --set run.steps=50")
      ->one_value_each();
  verb->add_option("--plan", args->plan, "rent by this plan.json instead of making a new plan");
  verb->add_flag("--resume", args->resume, "continue from the last checkpoint of this run");
  verb->add_flag("--json", args->json, "print the report as JSON at the end");
  verb->callback([args, &exit_code] { exit_code = run_learner_verb(*args); });
}

void add_worker(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("worker", "Join a learner; generate and score rollouts, forward policies");
  auto args = std::make_shared<WorkerArguments>();
  verb->add_option("--join", args->join, "address of the learner, HOST:PORT; HOST is an IP address or a name")
      ->required();
  verb->add_option("--name", args->name,
                   "name that the learner shows for this worker; for a rented machine, its offer id");
  verb->add_option("--place", args->place,
                   "the worker's place, as in network.regions, e.g. 'DE'; default: the place in its offer");
  verb->add_option("--token", args->token,
                   "join token; other users of this machine can see it here, so prefer --token-file or ECHOLINE_TOKEN");
  verb->add_option("--token-file", args->token_file,
                   "file with the join token; without --token and --token-file, ECHOLINE_TOKEN is read");
  verb->add_option("--folder", args->folder,
                   "folder for identity and received chunks, which survive a restart; without it, nothing is kept");
  verb->add_option(
      "--bind", args->bind,
      "address where other workers fetch policies; '::' for all, IPv4 and IPv6; default: all with --advertise, "
      "otherwise 127.0.0.1, which other machines cannot reach");
  verb->add_option("--port", args->port, "port of --bind; 0: any free port");
  verb->add_option("--advertise", args->advertise,
                   "HOST:PORT where others reach this worker, if its port is mapped; default on vast.ai: the public "
                   "address of --port, from the container's environment");
  verb->add_option("--up", args->up, "limit of the uplink, e.g. '8 Mbit/s'");
  verb->add_option("--down", args->down, "limit of the downlink");
  verb->add_option("--away-max", args->away_max,
                   "how long to try to reach a lost learner again, e.g. '10 min'; default: the learner's "
                   "fleet.away_max");
  verb->add_option("--silence-max", args->silence_max,
                   "in a container that can end itself: how long the worker may be out of touch with its learner "
                   "before the container is ended (default: 15 min)");
  verb->add_option("--memory-max", args->memory_max,
                   "memory for policy versions that are received and forwarded, e.g. '4 GiB'; default: 256 MiB with "
                   "--folder, otherwise 1.5 snapshots of the policy, at least a snapshot and 256 MiB");
  verb->add_option("--disk-max", args->disk_max,
                   "disk space for publications in --folder; default: three snapshots of the policy, at least 4 GiB");
  verb->add_option("--rollouts-per-s", args->rollouts_per_s, "limit of the generation speed")->non_negative();
  verb->add_option("--rollouts-at-once", args->engine.rollouts_at_once,
                   "limit of the responses that one engine generates at a time")
      ->range(1, 65536);
  verb->add_option("--cache-max", args->cache_max, "memory of the KV cache, e.g. '8 GiB' (default: 4 GiB)");
  verb->add_option("--device", args->engine.device, "device of the built-in engine: cpu, cuda or cuda:N")
      ->show_default();
  verb->add_option(
          "--threads", args->engine.threads,
          "threads that generate on a CPU, and that decode policies; 0: as many as this machine has; default: 1 "
          "where the built-in engine computes on a CPU, otherwise 0")
      ->range(0u, 1024u);
  verb->add_option("--engine", args->engine_name, "engine that generates: builtin, sglang or vllm")
      ->one_of({"builtin", "sglang", "vllm"})
      ->show_default();
  verb->add_option("--engine-command", args->engine.command,
                   "command that starts the engine as a child of this worker, e.g. 'vllm serve {model} --host "
                   "127.0.0.1 --port {port}'");
  verb->add_option("--gpus-per-engine", args->engine.gpus_per_engine,
                   "GPUs of an engine that --engine-command starts; {gpus} stands for this number in the command")
      ->range(1, 1024)
      ->show_default();
  verb->add_option("--engines", args->engine.engines,
                   "number of engines to start, each with GPUs of its own; default: the number of GPUs (of "
                   "CUDA_VISIBLE_DEVICES, if set) divided by --gpus-per-engine")
      ->range(1u, 1024u);
  verb->add_option("--engine-url", args->engine.url,
                   "address of a running engine that reads --engine-folder, e.g. http://127.0.0.1:30000");
  verb->add_option(
      "--engine-folder", args->engine_folder,
      "where the policy is kept for the engine, as a Hugging Face directory; default: a new one in /dev/shm");
  verb->add_option("--engine-patience", args->engine_timeout,
                   "how long the engine's start, loading a policy, or an answer may take before it counts as hung "
                   "(default: 10 min)");
  verb->footer("`echoline token --instance my-gpu` on the learner's machine prints the token.");
  verb->callback([args, &exit_code] { exit_code = run_worker_verb(*args); });
}

}  // namespace echoline::cli
