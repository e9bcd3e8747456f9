// echoline node: a further machine of the trainer, whose ranks publish from there.
#include <cstdio>

#include "base/log.hpp"
#include "cli/join.hpp"
#include "cli/output.hpp"
#include "cli/signals.hpp"
#include "cli/verbs.hpp"
#include "learner/external/trainer_node.hpp"
#include "overlay/trainer_node.hpp"
#include "overlay/uv/hosts.hpp"

namespace echoline::cli {
namespace {

struct NodeArguments {
  std::string join, name, folder, token, token_file, bind, advertise, up, memory_max, disk_max;
  std::uint16_t port = 0;
};

Result<learner::TrainerNodeOptions> options_of(const NodeArguments& args) {
  learner::TrainerNodeOptions options;
  overlay::WorkerOptions& overlay = options.overlay;
  ECHO_ASSIGN(overlay.learner, overlay::parse_endpoint("RUN-ADDRESS", args.join));
  ECHO_ASSIGN(overlay.token, find_token(args.token, args.token_file));
  overlay.name = overlay::is_trainer_node(args.name) ? args.name : std::string(overlay::kTrainerNodePrefix) + args.name;
  options.folder = args.folder;
  overlay.folder = options.folder / "overlay";
  overlay.port = args.port;
  if (!args.advertise.empty()) {
    ECHO_ASSIGN(overlay.advertise, overlay::parse_endpoint("--advertise", args.advertise));
  }
  if (!args.up.empty()) {
    ECHO_ASSIGN(overlay.limits.up, parse_bit_rate(args.up));
  }
  for (const auto& [text, size] :
       {std::pair(&args.memory_max, &overlay.memory_max), std::pair(&args.disk_max, &overlay.disk_max)}) {
    if (text->empty()) continue;
    ECHO_ASSIGN(*size, parse_bytes(*text));
  }
  const overlay::Listening listening =
      overlay::listening_for(args.bind, overlay.advertise.has_value(), overlay.learner.host);
  overlay.bind_host = listening.host;
  if (listening.leaf)
    log::warn("the node listens on {} only, so no worker can fetch policies from it; use --bind :: or --advertise",
              listening.host);
  return options;
}

int run_node_verb(const NodeArguments& args) {
  const std::atomic<bool>& stop = stop_on_signals();
  log::configure(log::Level::kInfo, "node " + args.name);
  const auto options = options_of(args);
  if (!options) return report_error("node", options.error());
  const auto report = learner::run_trainer_node(*options, stop);
  if (!report) return report_error("node", report.error());
  log::info("{} calls of ranks, {} publications ({} received, {} forwarded); ended: {}", report->calls,
            report->publications, to_text(report->received), to_text(report->forwarded), report->reason);
  if (!report->ended_cleanly)
    return report_error("node", fail(Code::kUnavailable, "node", "the node ended before the run: {}", report->reason));
  return 0;
}

}  // namespace

void add_node(Verb& program, int& exit_code) {
  auto* verb = program.add_verb(
      "node", "Join a run as a further machine of its trainer: pass on the shards of its ranks, forward policies");
  auto args = std::make_shared<NodeArguments>();
  verb->add_option("address", args->join, "address of the learner, HOST:PORT; HOST is an IP address or a name")
      ->required();
  verb->add_option("--name", args->name, "name of this machine; the token is issued for node:NAME")->required();
  verb->add_option("--folder", args->folder,
                   "folder that the ranks of this machine name instead of the run's: echoline.Client(FOLDER). It also "
                   "keeps the node's identity and publications")
      ->required();
  verb->add_option("--token", args->token,
                   "join token; other users of this machine can see it here, so prefer --token-file or ECHOLINE_TOKEN");
  verb->add_option("--token-file", args->token_file,
                   "file with the join token; without --token and --token-file, ECHOLINE_TOKEN is read");
  verb->add_option("--up", args->up,
                   "limit of the uplink towards workers, e.g. '100 Mbit/s'; the connection to the learner is not "
                   "limited. Without it, the learner takes this uplink to be as fast as its own");
  verb->add_option("--bind", args->bind,
                   "address where workers fetch policies; '::' for all; default: all with --advertise, otherwise "
                   "127.0.0.1, which other machines cannot reach");
  verb->add_option("--port", args->port, "port of --bind; 0: any free port");
  verb->add_option("--advertise", args->advertise, "HOST:PORT where workers reach this node, if its port is mapped");
  verb->add_option("--memory-max", args->memory_max,
                   "memory for policy versions, e.g. '4 GiB'; default: as a worker's");
  verb->add_option("--disk-max", args->disk_max, "disk space for publications in --folder; default: as a worker's");
  verb->callback([args, &exit_code] { exit_code = run_node_verb(*args); });
}

}  // namespace echoline::cli
