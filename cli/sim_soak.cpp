// echoline sim soak: simulates many random fleets with random faults.
#include "cli/sim_soak.hpp"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/log.hpp"
#include "cli/output.hpp"
#include "sim/soak.hpp"

namespace echoline::cli {
namespace {

struct Arguments {
  sim::SoakOptions soak;
  bool json = false, trace = false;
};

// The command that runs a seed again.
std::string replay_command(std::uint64_t seed) {
  return fmt::format("echoline sim soak --seeds 1 --first {} --trace", seed);
}

std::string to_text(const sim::Violation& violation) {
  return fmt::format("{:.3f} s ({}): {}", seconds(violation.at.time_since_epoch()), violation.rule, violation.text);
}

void print_failure(const sim::SoakResult& result) {
  print_stderr("seed {}: {}\n", result.seed, result.scenario);
  for (const sim::Violation& violation : result.violations) print_stderr("  {}\n", to_text(violation));
  print_stderr("  replay: {}\n", replay_command(result.seed));
}

nlohmann::json to_json(const sim::SoakSummary& summary, const sim::SoakOptions& options, double wall_seconds) {
  nlohmann::json failures = nlohmann::json::array();
  for (const sim::SoakResult& result : summary.failures) {
    nlohmann::json violations = nlohmann::json::array();
    for (const sim::Violation& violation : result.violations)
      violations.push_back({{"at_seconds", seconds(violation.at.time_since_epoch())},
                            {"rule", violation.rule},
                            {"text", violation.text}});
    failures.push_back({{"seed", result.seed},
                        {"scenario", result.scenario},
                        {"violations", violations},
                        {"replay", replay_command(result.seed)}});
  }
  return {{"schema_version", 1},
          {"first", options.first},
          {"seeds", summary.seeds},
          {"failures", failures},
          {"events", summary.events},
          {"chunks", summary.chunks},
          {"activations", summary.activations},
          {"virtual_seconds", seconds(summary.virtual_time)},
          {"cpu_seconds", summary.cpu_seconds},
          {"cpu_seconds_max", summary.cpu_seconds_max},
          {"wall_seconds", wall_seconds},
          {"trace_hash", fmt::format("{:016x}", summary.combined_hash)}};
}

// Runs one seed and prints every event to stdout; the cores' own log goes to stderr.
int trace_seed(const Arguments& args) {
  log::configure(log::Level::kDebug, "sim");
  const sim::SoakResult result = sim::soak(args.soak.first, [](const std::string& line) { fmt::print("{}\n", line); });
  fmt::print("seed {}: trace {:016x}, {} events, {:.1f} s of virtual time\n", result.seed, result.trace_hash,
             result.events, seconds(result.virtual_time));
  if (result.violations.empty()) return 0;
  print_failure(result);
  return 1;
}

int run(const Arguments& args) {
  using Clock = std::chrono::steady_clock;
  if (args.trace) return trace_seed(args);
  log::configure(log::Level::kOff, "sim");
  const auto begin = Clock::now();
  const bool is_terminal = isatty(STDERR_FILENO) != 0;
  const std::chrono::milliseconds report_interval =
      is_terminal ? std::chrono::milliseconds(200) : std::chrono::seconds(30);
  auto last_report_at = begin;
  std::uint64_t failed = 0;  // seeds
  // Returns true: the next seed runs. "\r\033[K" goes to the start of the terminal's line and erases it.
  const auto progress = [&](std::uint64_t done, const sim::SoakResult& result) {
    if (!result.violations.empty()) {
      ++failed;
      if (is_terminal) print_stderr("\r\033[K");
      print_failure(result);
    }
    const auto now = Clock::now();
    if (now - last_report_at < report_interval && done < args.soak.seeds) return true;
    last_report_at = now;
    constexpr double kSecondsMin = 1e-9;  // against a division by 0
    const double elapsed_s = std::max(std::chrono::duration<double>(now - begin).count(), kSecondsMin);
    print_stderr("{}soak: {} of {} seeds, {} failed, {:.0f} seeds/s{}", is_terminal ? "\r\033[K" : "", done,
                 args.soak.seeds, failed, static_cast<double>(done) / elapsed_s,
                 is_terminal && done < args.soak.seeds ? "" : "\n");
    return true;
  };
  const sim::SoakSummary summary = sim::run_soak(args.soak, progress);
  const double wall_seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  if (args.json)
    fmt::print("{}\n", to_json(summary, args.soak, wall_seconds).dump(2));
  else
    fmt::print(
        "{} seeds from {}, {} failed\n"
        "{} events, {} chunks, {} versions activated, {:.0f} s of virtual time\n"
        "{:.0f} s of CPU, {:.3f} s a seed, {:.2f} s at most (seed {}); {:.0f} s by the clock; trace {:016x}\n",
        summary.seeds, args.soak.first, summary.failures.size(), summary.events, summary.chunks, summary.activations,
        seconds(summary.virtual_time), summary.cpu_seconds,
        summary.cpu_seconds / static_cast<double>(std::max<std::uint64_t>(1, summary.seeds)), summary.cpu_seconds_max,
        summary.slowest_seed, wall_seconds, summary.combined_hash);
  return summary.failures.empty() ? 0 : 1;
}

}  // namespace

void add_sim_soak(Verb& sim, int& exit_code) {
  auto* verb = sim.add_verb("soak", "Simulate random fleets with random faults and check rules that must always hold");
  auto args = std::make_shared<Arguments>();
  args->soak.seeds = 100;
  args->soak.threads = std::max(1u, std::thread::hardware_concurrency());
  verb->add_option("--seeds", args->soak.seeds, "number of seeds; each is one scenario")->positive()->show_default();
  verb->add_option("--first", args->soak.first, "the first seed")->show_default();
  verb->add_option("--threads", args->soak.threads, "seeds at a time")->range(1, 1024)->show_default();
  verb->add_option("--twice", args->soak.twice, "run this number of seeds twice and compare their traces")
      ->show_default();
  auto* json = verb->add_flag("--json", args->json, "print JSON");
  verb->add_flag("--trace", args->trace, "print every event of the first seed")->excludes(json);
  verb->footer("A violated rule is printed with the command that replays it; the exit code is then 1.");
  verb->callback([args, &exit_code] { exit_code = run(*args); });
}

}  // namespace echoline::cli
