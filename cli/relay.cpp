// echoline relay: a host with a public address through which workers reach a learner that has none.
#include "overlay/relay/relay.hpp"

#include <chrono>
#include <cstdio>
#include <thread>

#include "base/log.hpp"
#include "base/secret.hpp"
#include "cli/output.hpp"
#include "cli/signals.hpp"
#include "cli/verbs.hpp"
#include "overlay/uv/hosts.hpp"

namespace echoline::cli {
namespace {

struct RelayArguments {
  std::string listen = "[::]:7443", key_file, rate, bytes, idle;
  std::size_t runs = overlay::relay::RelayLimits{}.runs;
  std::size_t connections = overlay::relay::RelayLimits{}.connections_per_run;
};

Result<overlay::relay::RelayOptions> options_of(const RelayArguments& args) {
  overlay::relay::RelayOptions options;
  ECHO_ASSIGN(options.bind, overlay::parse_endpoint("--listen", args.listen));
  ECHO_ASSIGN(std::string key, read_secret("ECHOLINE_RELAY_KEY", args.key_file));
  options.key = overlay::trust::Secret(std::move(key));
  options.limits.runs = args.runs;
  options.limits.connections_per_run = args.connections;
  if (!args.rate.empty()) {
    ECHO_ASSIGN(options.limits.rate_per_run, parse_bit_rate(args.rate));
  }
  if (!args.bytes.empty()) {
    ECHO_ASSIGN(options.limits.bytes_per_run, parse_bytes(args.bytes));
  }
  if (!args.idle.empty()) {
    ECHO_ASSIGN(options.limits.idle_timeout, parse_duration(args.idle));
  }
  return options;
}

int run_relay_verb(const RelayArguments& args) {
  const std::atomic<bool>& stop = stop_on_signals();
  log::configure(log::Level::kInfo, "relay");
  auto options = options_of(args);
  if (!options) return report_error("relay", options.error());
  const auto relay = overlay::relay::Relay::start(*std::move(options));
  if (!relay) return report_error("relay", relay.error());
  fmt::print("{}\n", overlay::to_text((*relay)->endpoint()));
  std::fflush(stdout);
  log::info("the relay listens; learners reach it with network.relay: HOST:{}", (*relay)->endpoint().port);
  while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  (*relay)->stop();
  const overlay::relay::RelayStats stats = (*relay)->stats();
  log::info("the relay ends: {} runs and {} connections were open, {} were passed on, {} connections were refused",
            stats.runs, stats.joined, echoline::to_text(Bytes{stats.bytes}), stats.refused);
  return 0;
}

}  // namespace

void add_relay(Verb& program, int& exit_code) {
  auto* verb = program.add_verb(
      "relay", "Pass workers' connections on to learners that can open no port, without being able to read them");
  auto args = std::make_shared<RelayArguments>();
  verb->add_option("--listen", args->listen, "HOST:PORT to listen on, the only port that is needed")->show_default();
  verb->add_option("--key-file", args->key_file,
                   "file of mode 600 with the key that learners must hold, at least 32 characters; alternatively, set "
                   "ECHOLINE_RELAY_KEY");
  verb->add_option("--runs", args->runs, "runs at a time")->range(std::size_t{1}, std::size_t{1024})->show_default();
  verb->add_option("--connections", args->connections, "connections of workers per run")
      ->range(std::size_t{1}, std::size_t{65536})
      ->show_default();
  verb->add_option("--run-rate", args->rate,
                   "limit of the bytes that one run passes, both directions together, e.g. "
                   "'100 Mbit/s'; default: none");
  verb->add_option("--run-bytes", args->bytes,
                   "limit of the bytes that one run passes as long as this relay runs, "
                   "e.g. '500 GiB'; default: none");
  verb->add_option("--idle-max", args->idle, "when a connection without a byte is closed (default: 15 min)");
  verb->footer(
      "`openssl rand -hex 32 > relay.key && chmod 600 relay.key` makes the key.\n"
      "The learner then needs --set network.relay=HOST:PORT and the same key in ECHOLINE_RELAY_KEY.");
  verb->callback([args, &exit_code] { exit_code = run_relay_verb(*args); });
}

}  // namespace echoline::cli
