// echoline sim: simulates fleets with the same protocol and fleet code as a real run.
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/log.hpp"
#include "chains/planner.hpp"
#include "cli/output.hpp"
#include "cli/sim_run.hpp"
#include "cli/sim_soak.hpp"
#include "cli/verbs.hpp"
#include "overlay/sizes.hpp"
#include "sim/broadcast_scenario.hpp"
#include "sim/market.hpp"

namespace echoline::cli {
namespace {

struct Arguments {
  std::vector<std::size_t> workers{2, 4, 8, 16, 32};
  std::string learner_up = "100 Mbit/s", worker_rate = "50 Mbit/s", payload = "20 MB", chunk = "128 KiB";
  std::string delay = "25 ms", jitter = "0 ms", heartbeat = "500 ms";
  std::vector<std::string> topologies{"star", "echo2", "trees"};
  std::size_t poisoners = 0;
  std::uint64_t seed = 1;
  bool workers_declare_rates = false;
  bool json = false;
};

// A row of the printed table.
struct Row {
  std::size_t workers = 0;
  chains::TopologyPolicy topology{};
  sim::BroadcastResult result;
};

Result<Row> simulate(const Arguments& args, std::size_t workers, const std::string& topology) {
  sim::BroadcastScenario scenario;
  scenario.workers = workers;
  ECHO_ASSIGN(scenario.topology, chains::parse_topology_policy(topology));
  if (scenario.topology == chains::TopologyPolicy::kAuto)
    return fail(Code::kInvalid, "--topologies",
                "expected the topologies to compare: echo2, best_chains, star, stripes, trees");
  scenario.seed = args.seed;
  ECHO_ASSIGN(scenario.learner_up, parse_bit_rate(args.learner_up));
  ECHO_ASSIGN(const BitRate worker_rate, parse_bit_rate(args.worker_rate));
  scenario.worker_link = {worker_rate, worker_rate};
  scenario.chain_rate = worker_rate;
  ECHO_ASSIGN(scenario.payload, parse_bytes(args.payload));
  scenario.learner_store = overlay::learner_store_bytes(scenario.payload);
  scenario.worker_store = overlay::worker_memory_bytes(scenario.payload, /*has_disk=*/false);
  ECHO_ASSIGN(scenario.chunk, parse_bytes(args.chunk));
  ECHO_ASSIGN(scenario.delay, parse_duration(args.delay));
  ECHO_ASSIGN(scenario.jitter, parse_duration(args.jitter));
  ECHO_ASSIGN(scenario.heartbeat, parse_duration(args.heartbeat));
  scenario.cores_limit_rate = args.workers_declare_rates;
  scenario.poisoners = args.poisoners;
  Row row{workers, scenario.topology, {}};
  ECHO_ASSIGN(row.result, sim::simulate_broadcast(scenario));
  if (!row.result.finished)
    return fail(Code::kInternal, "sim", "seed {}: the fleet did not converge: {}", args.seed, row.result.unfinished);
  return row;
}

nlohmann::json to_json(const Row& row) {
  const sim::BroadcastResult& result = row.result;
  const sim::PublicationTimes& first = result.publications.front();
  return {{"workers", row.workers},
          {"topology", chains::to_string(row.topology)},
          {"t_b_seconds", first.t_b ? nlohmann::json(seconds(*first.t_b)) : nlohmann::json(nullptr)},
          {"last_seconds", seconds(first.last())},
          {"lower_bound_seconds", seconds(result.lower_bound)},
          {"predicted_seconds", seconds(result.predicted)},
          {"learner_bytes_sent", result.learner_bytes_sent.count},
          {"poisoned_chunks", result.poisoned},
          {"poisoned_chunks_refused", result.chunks_corrupt},
          {"poisoners_quarantined", result.poisoners_quarantined},
          {"others_quarantined", result.others_quarantined},
          {"trace_hash", fmt::format("{:016x}", result.trace_hash)}};
}

int run(const Arguments& args) {
  log::configure(log::Level::kError, "sim");
  nlohmann::json rows = nlohmann::json::array();
  if (!args.json)
    fmt::print(
        "{} to each worker; learner {}, workers {} up and down, one-way delay {}, chunks of {}, seed {}\n\n"
        "{:>8}  {:<10}{:>10}{:>10}{:>13}{:>12}{:>15}  {}\n",
        args.payload, args.learner_up, args.worker_rate, args.delay, args.chunk, args.seed, "workers", "topology",
        "T_b s", "last s", "lower bound", "last/bound", "learner sent", "trace");
  for (const std::size_t workers : args.workers) {
    for (const std::string& topology : args.topologies) {
      const auto row = simulate(args, workers, topology);
      if (!row) return report_error("sim", row.error());
      rows.push_back(to_json(*row));
      if (args.json) continue;
      const sim::BroadcastResult& result = row->result;
      const sim::PublicationTimes& first = result.publications.front();
      fmt::print("{:>8}  {:<10}{:>10}{:>10.3f}{:>13.3f}{:>12.2f}{:>15}  {:016x}\n", workers,
                 chains::to_string(row->topology), first.t_b ? fmt::format("{:.3f}", seconds(*first.t_b)) : "-",
                 seconds(first.last()), seconds(result.lower_bound),
                 seconds(first.last()) / seconds(result.lower_bound), to_text(result.learner_bytes_sent),
                 result.trace_hash);
      if (args.poisoners > 0)
        fmt::print(
            "          poisoners flipped bits in {} chunks, {} were refused; {} of {} quarantined, and {} others\n",
            fmt::join(result.poisoned, ", "), result.chunks_corrupt, result.poisoners_quarantined, args.poisoners,
            result.others_quarantined);
    }
  }
  if (args.json) fmt::print("{}\n", nlohmann::json{{"schema_version", 1}, {"seed", args.seed}, {"rows", rows}}.dump(2));
  return 0;
}

// echoline sim market: simulates renting the fleet in markets that cheat.
namespace market {

struct Arguments {
  std::uint64_t first = 1, seeds = 1000;
  bool json = false, trace = false;
};

// The command that runs a seed again.
std::string replay_command(std::uint64_t seed) { return fmt::format("echoline sim market --first {} --trace", seed); }

void print_failure(const sim::MarketResult& result) {
  print_stderr("seed {}: {}\n", result.seed, result.scenario);
  for (const sim::MarketViolation& violation : result.violations)
    print_stderr("  {:.0f} s ({}): {}\n", seconds(violation.at), violation.rule, violation.text);
  print_stderr("  replay: {}\n", replay_command(result.seed));
}

nlohmann::json to_json(const Arguments& args, const sim::MarketSummary& summary) {
  nlohmann::json failures = nlohmann::json::array();
  for (const sim::MarketResult& result : summary.failures) {
    nlohmann::json violations = nlohmann::json::array();
    for (const sim::MarketViolation& violation : result.violations)
      violations.push_back({{"at_seconds", seconds(violation.at)}, {"rule", violation.rule}, {"text", violation.text}});
    failures.push_back({{"seed", result.seed},
                        {"scenario", result.scenario},
                        {"violations", violations},
                        {"replay", replay_command(result.seed)}});
  }
  // restarts_at has two counters for each action: of restarts before it and after it.
  nlohmann::json restarts = nlohmann::json::object();
  for (std::size_t i = 0; i < summary.restarts_at.size(); ++i)
    restarts[fmt::format("{} {}", i % 2 == 0 ? "before" : "after", sim::kMarketActions[i / 2])] =
        summary.restarts_at[i];
  return {{"schema_version", 1},
          {"first", args.first},
          {"seeds", summary.seeds},
          {"failed", summary.failed},
          {"failures", failures},
          {"actions", summary.actions},
          {"rentals", summary.rentals},
          {"losses", summary.losses},
          {"restarts", summary.restarts},
          {"restarts_at", restarts},
          {"drained", summary.drained},
          {"restored", summary.restored},
          {"nothing_left", summary.exhausted},
          {"money_spent", summary.closed},
          {"trace_hash", fmt::format("{:016x}", summary.combined_hash)}};
}

int run(const Arguments& args) {
  if (args.trace) {
    const sim::MarketResult result =
        sim::simulate_market(args.first, [](const std::string& line) { fmt::print("{}\n", line); });
    if (result.violations.empty()) return 0;
    print_failure(result);
    return 1;
  }
  const auto begin = std::chrono::steady_clock::now();
  const sim::MarketSummary summary = sim::simulate_markets(args.first, args.seeds, [](const sim::MarketResult& result) {
    if (!result.violations.empty()) print_failure(result);
  });
  const double wall_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (args.json)
    fmt::print("{}\n", to_json(args, summary).dump(2));
  else
    fmt::print(
        "{} markets from seed {}, {} failed, {:.1f} s\n"
        "{} rentals, {} machines lost, the learner killed {} times\n"
        "capacity restored in {}, nothing left to rent in {}, money spent in {}; trace {:016x}\n",
        summary.seeds, args.first, summary.failed, wall_seconds, summary.rentals, summary.losses, summary.restarts,
        summary.restored, summary.exhausted, summary.closed, summary.combined_hash);
  return summary.failed == 0 ? 0 : 1;
}

void add_verb(Verb& sim, int& exit_code) {
  auto* verb =
      sim.add_verb("market", "Simulate how a run rents its fleet in markets that cheat, refuse and take machines back");
  auto args = std::make_shared<Arguments>();
  verb->add_option("--seeds", args->seeds, "number of seeds; each is one market and one run")
      ->positive()
      ->show_default();
  verb->add_option("--first", args->first, "the first seed")->show_default();
  auto* json = verb->add_flag("--json", args->json, "print JSON");
  verb->add_flag("--trace", args->trace, "print every event of the first seed")->excludes(json);
  verb->footer("A violated rule is printed with the command that replays it; the exit code is then 1.");
  verb->callback([args, &exit_code] { exit_code = run(*args); });
}

}  // namespace market

}  // namespace

void add_sim(Verb& program, int& exit_code) {
  auto* verb =
      program.add_verb("sim", "Simulate broadcasts over star, chains and trees with the protocol code of real runs");
  auto args = std::make_shared<Arguments>();
  verb->add_option("--workers", args->workers, "fleet sizes, e.g. --workers 8,16,64")
      ->delimiter(',')
      ->range(std::size_t{1}, chains::kChainWorkersMax);
  verb->add_option("--topologies", args->topologies, "topologies to compare: star, echo2, best_chains, stripes, trees")
      ->delimiter(',');
  verb->add_option("--learner-up", args->learner_up, "uplink of the learner")->show_default();
  verb->add_option("--worker-rate", args->worker_rate, "uplink and downlink of each worker")->show_default();
  verb->add_option("--payload", args->payload, "size of the publication")->show_default();
  verb->add_option("--chunk", args->chunk, "size of a chunk")->show_default();
  verb->add_option("--delay", args->delay, "one-way delay between any two hosts")->show_default();
  verb->add_option("--jitter", args->jitter, "limit of an additional random delay")->show_default();
  verb->add_option("--heartbeat", args->heartbeat, "time between two heartbeats of a worker")->show_default();
  verb->add_option("--poisoners", args->poisoners,
                   "number of workers that flip a bit in 1 % of the chunks they forward");
  verb->add_option("--seed", args->seed, "the same seed gives the same trace hash")->show_default();
  verb->add_flag("--declared", args->workers_declare_rates,
                 "workers declare the rates of their links and keep to them, as in a run with network.worker_rate");
  verb->add_flag("--json", args->json, "print JSON");
  add_sim_run(*verb, exit_code);
  add_sim_soak(*verb, exit_code);
  market::add_verb(*verb, exit_code);
  verb->callback([args, verb, &exit_code] {
    if (!verb->subverb_was_given()) exit_code = run(*args);
  });
}

}  // namespace echoline::cli
