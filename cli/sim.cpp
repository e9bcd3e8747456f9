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
  bool declared = false, json = false;
};

struct Row {
  std::size_t workers = 0;
  chains::TopologyPolicy topology{};
  sim::BroadcastResult result;
};

Result<Row> simulate(const Arguments& a, std::size_t workers, const std::string& topology) {
  sim::BroadcastScenario scenario;
  scenario.workers = workers;
  ECHO_ASSIGN(scenario.topology, chains::parse_topology_policy(topology));
  if (scenario.topology == chains::TopologyPolicy::kAuto)
    return fail(Code::kInvalid, "--topologies",
                "expected the topologies to compare: echo2, best_chains, star, stripes, trees");
  scenario.seed = a.seed;
  ECHO_ASSIGN(scenario.learner_up, parse_bit_rate(a.learner_up));
  ECHO_ASSIGN(const BitRate rate, parse_bit_rate(a.worker_rate));
  scenario.worker_link = {rate, rate};
  scenario.chain_rate = rate;
  ECHO_ASSIGN(scenario.payload, parse_bytes(a.payload));
  scenario.learner_store = overlay::learner_store_bytes(scenario.payload);
  scenario.worker_store = overlay::worker_memory_bytes(scenario.payload, false);
  ECHO_ASSIGN(scenario.chunk, parse_bytes(a.chunk));
  ECHO_ASSIGN(scenario.delay, parse_duration(a.delay));
  ECHO_ASSIGN(scenario.jitter, parse_duration(a.jitter));
  ECHO_ASSIGN(scenario.heartbeat, parse_duration(a.heartbeat));
  scenario.cores_limit_rate = a.declared;
  scenario.poisoners = a.poisoners;
  Row row{workers, scenario.topology, {}};
  ECHO_ASSIGN(row.result, sim::simulate_broadcast(scenario));
  if (!row.result.finished)
    return fail(Code::kInternal, "sim", "seed {}: the fleet did not converge: {}", a.seed, row.result.unfinished);
  return row;
}

nlohmann::json to_json(const Row& row) {
  const sim::BroadcastResult& r = row.result;
  const sim::PublicationTimes& first = r.publications.front();
  return {{"workers", row.workers},
          {"topology", chains::to_string(row.topology)},
          {"t_b_seconds", first.t_b ? nlohmann::json(seconds(*first.t_b)) : nlohmann::json(nullptr)},
          {"last_seconds", seconds(first.last())},
          {"lower_bound_seconds", seconds(r.lower_bound)},
          {"predicted_seconds", seconds(r.predicted)},
          {"learner_bytes_sent", r.learner_bytes_sent.count},
          {"poisoned_chunks", r.poisoned},
          {"poisoned_chunks_refused", r.chunks_corrupt},
          {"poisoners_quarantined", r.poisoners_quarantined},
          {"others_quarantined", r.others_quarantined},
          {"trace_hash", fmt::format("{:016x}", r.trace_hash)}};
}

int run(const Arguments& a) {
  log::configure(log::Level::kError, "sim");
  nlohmann::json rows = nlohmann::json::array();
  if (!a.json)
    fmt::print(
        "{} to each worker; learner {}, workers {} up and down, one-way delay {}, chunks of {}, seed {}\n\n"
        "{:>8}  {:<10}{:>10}{:>10}{:>13}{:>12}{:>15}  {}\n",
        a.payload, a.learner_up, a.worker_rate, a.delay, a.chunk, a.seed, "workers", "topology", "T_b s", "last s",
        "lower bound", "last/bound", "learner sent", "trace");
  for (const std::size_t workers : a.workers) {
    for (const std::string& topology : a.topologies) {
      const auto row = simulate(a, workers, topology);
      if (!row) return report_error("sim", row.error());
      rows.push_back(to_json(*row));
      if (a.json) continue;
      const sim::BroadcastResult& r = row->result;
      const sim::PublicationTimes& first = r.publications.front();
      fmt::print("{:>8}  {:<10}{:>10}{:>10.3f}{:>13.3f}{:>12.2f}{:>15}  {:016x}\n", workers,
                 chains::to_string(row->topology), first.t_b ? fmt::format("{:.3f}", seconds(*first.t_b)) : "-",
                 seconds(first.last()), seconds(r.lower_bound), seconds(first.last()) / seconds(r.lower_bound),
                 to_text(r.learner_bytes_sent), r.trace_hash);
      if (a.poisoners > 0)
        fmt::print(
            "          poisoners flipped bits in {} chunks, {} were refused; {} of {} quarantined, and {} others\n",
            fmt::join(r.poisoned, ", "), r.chunks_corrupt, r.poisoners_quarantined, a.poisoners, r.others_quarantined);
    }
  }
  if (a.json) fmt::print("{}\n", nlohmann::json{{"schema_version", 1}, {"seed", a.seed}, {"rows", rows}}.dump(2));
  return 0;
}

// echoline sim market: simulates renting the fleet in markets that cheat.
namespace market {

struct Arguments {
  std::uint64_t first = 1, seeds = 1000;
  bool json = false, trace = false;
};

std::string replay(std::uint64_t seed) { return fmt::format("echoline sim market --first {} --trace", seed); }

void print_failure(const sim::MarketResult& r) {
  print_stderr("seed {}: {}\n", r.seed, r.scenario);
  for (const sim::MarketViolation& v : r.violations)
    print_stderr("  {:.0f} s ({}): {}\n", seconds(v.at), v.rule, v.text);
  print_stderr("  replay: {}\n", replay(r.seed));
}

nlohmann::json to_json(const Arguments& a, const sim::MarketSummary& s) {
  nlohmann::json failures = nlohmann::json::array();
  for (const sim::MarketResult& r : s.failures) {
    nlohmann::json violations = nlohmann::json::array();
    for (const sim::MarketViolation& v : r.violations)
      violations.push_back({{"at_seconds", seconds(v.at)}, {"rule", v.rule}, {"text", v.text}});
    failures.push_back(
        {{"seed", r.seed}, {"scenario", r.scenario}, {"violations", violations}, {"replay", replay(r.seed)}});
  }
  nlohmann::json restarts = nlohmann::json::object();
  for (std::size_t i = 0; i < s.restarts_at.size(); ++i)
    restarts[fmt::format("{} {}", i % 2 == 0 ? "before" : "after", sim::kMarketActions[i / 2])] = s.restarts_at[i];
  return {{"schema_version", 1},
          {"first", a.first},
          {"seeds", s.seeds},
          {"failed", s.failed},
          {"failures", failures},
          {"actions", s.actions},
          {"rentals", s.rentals},
          {"losses", s.losses},
          {"restarts", s.restarts},
          {"restarts_at", restarts},
          {"drained", s.drained},
          {"restored", s.restored},
          {"nothing_left", s.exhausted},
          {"money_spent", s.closed},
          {"trace_hash", fmt::format("{:016x}", s.combined_hash)}};
}

int run(const Arguments& a) {
  if (a.trace) {
    const sim::MarketResult r =
        sim::simulate_market(a.first, [](const std::string& line) { fmt::print("{}\n", line); });
    if (r.violations.empty()) return 0;
    print_failure(r);
    return 1;
  }
  const auto begin = std::chrono::steady_clock::now();
  const sim::MarketSummary s = sim::simulate_markets(a.first, a.seeds, [](const sim::MarketResult& r) {
    if (!r.violations.empty()) print_failure(r);
  });
  const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (a.json)
    fmt::print("{}\n", to_json(a, s).dump(2));
  else
    fmt::print(
        "{} markets from seed {}, {} failed, {:.1f} s\n"
        "{} rentals, {} machines lost, the learner killed {} times\n"
        "capacity restored in {}, nothing left to rent in {}, money spent in {}; trace {:016x}\n",
        s.seeds, a.first, s.failed, wall, s.rentals, s.losses, s.restarts, s.restored, s.exhausted, s.closed,
        s.combined_hash);
  return s.failed == 0 ? 0 : 1;
}

void add_verb(Verb& sim, int& exit_code) {
  auto* verb =
      sim.add_verb("market", "Simulate how a run rents its fleet in markets that cheat, refuse and take machines back");
  auto a = std::make_shared<Arguments>();
  verb->add_option("--seeds", a->seeds, "number of seeds; each is one market and one run")->positive()->show_default();
  verb->add_option("--first", a->first, "the first seed")->show_default();
  auto* json = verb->add_flag("--json", a->json, "print JSON");
  verb->add_flag("--trace", a->trace, "print every event of the first seed")->excludes(json);
  verb->footer(
      "Example:\n  echoline sim market --seeds 20000\n"
      "A violated rule is printed with the command that replays it; the exit code is then 1.");
  verb->callback([a, &exit_code] { exit_code = run(*a); });
}

}  // namespace market

}  // namespace

void add_sim(Verb& app, int& exit_code) {
  auto* verb =
      app.add_verb("sim", "Simulate broadcasts over star, chains and trees with the protocol code of real runs");
  auto a = std::make_shared<Arguments>();
  verb->add_option("--workers", a->workers, "fleet sizes, e.g. --workers 8,16,64")
      ->delimiter(',')
      ->range(std::size_t{1}, chains::kChainWorkersMax);
  verb->add_option("--topologies", a->topologies, "topologies to compare: star, echo2, best_chains, stripes, trees")
      ->delimiter(',');
  verb->add_option("--learner-up", a->learner_up, "uplink of the learner")->show_default();
  verb->add_option("--worker-rate", a->worker_rate, "uplink and downlink of each worker")->show_default();
  verb->add_option("--payload", a->payload, "size of the publication")->show_default();
  verb->add_option("--chunk", a->chunk, "size of a chunk")->show_default();
  verb->add_option("--delay", a->delay, "one-way delay between any two hosts")->show_default();
  verb->add_option("--jitter", a->jitter, "limit of an additional random delay")->show_default();
  verb->add_option("--heartbeat", a->heartbeat, "time between two heartbeats of a worker")->show_default();
  verb->add_option("--poisoners", a->poisoners, "number of workers that flip a bit in 1 % of the chunks they forward");
  verb->add_option("--seed", a->seed, "the same seed gives the same trace hash")->show_default();
  verb->add_flag("--declared", a->declared,
                 "workers declare the rates of their links and keep to them, as in a run with network.worker_rate");
  verb->add_flag("--json", a->json, "print JSON");
  verb->footer(
      "Examples:\n"
      "  echoline sim --workers 8,64 --learner-up '2 Gbit/s' \\\n"
      "    --worker-rate '500 Mbit/s' --payload '2 GB' --chunk '1 MiB'\n"
      "  echoline sim --workers 10000 --topologies echo2 --learner-up '16 Gbit/s' \\\n"
      "    --worker-rate '1 Gbit/s' --payload '200 MB' --chunk '1 MiB' \\\n"
      "    --heartbeat '5 s'\n"
      "  echoline sim run configs/sim/small.yaml\n"
      "  echoline sim soak --seeds 1000\n"
      "  echoline sim market --seeds 1000");
  add_sim_run(*verb, exit_code);
  add_sim_soak(*verb, exit_code);
  market::add_verb(*verb, exit_code);
  verb->callback([a, verb, &exit_code] {
    if (!verb->verb_was_given()) exit_code = run(*a);
  });
}

}  // namespace echoline::cli
