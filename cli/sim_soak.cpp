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

std::string replay(std::uint64_t seed) { return fmt::format("echoline sim soak --seeds 1 --first {} --trace", seed); }

std::string to_text(const sim::Violation& v) {
  return fmt::format("{:.3f} s ({}): {}", seconds(v.at.time_since_epoch()), v.rule, v.text);
}

void print_failure(const sim::SoakResult& r) {
  print_stderr("seed {}: {}\n", r.seed, r.scenario);
  for (const sim::Violation& v : r.violations) print_stderr("  {}\n", to_text(v));
  print_stderr("  replay: {}\n", replay(r.seed));
}

nlohmann::json to_json(const sim::SoakSummary& s, const sim::SoakOptions& options, double wall_seconds) {
  nlohmann::json failures = nlohmann::json::array();
  for (const sim::SoakResult& r : s.failures) {
    nlohmann::json violations = nlohmann::json::array();
    for (const sim::Violation& v : r.violations)
      violations.push_back({{"at_seconds", seconds(v.at.time_since_epoch())}, {"rule", v.rule}, {"text", v.text}});
    failures.push_back(
        {{"seed", r.seed}, {"scenario", r.scenario}, {"violations", violations}, {"replay", replay(r.seed)}});
  }
  return {{"schema_version", 1},
          {"first", options.first},
          {"seeds", s.seeds},
          {"failures", failures},
          {"events", s.events},
          {"chunks", s.chunks},
          {"activations", s.activations},
          {"virtual_seconds", seconds(s.virtual_time)},
          {"cpu_seconds", s.cpu_seconds},
          {"cpu_seconds_max", s.cpu_seconds_max},
          {"wall_seconds", wall_seconds},
          {"trace_hash", fmt::format("{:016x}", s.combined_hash)}};
}

// Runs one seed and prints every event to stdout; the cores' own log goes to stderr.
int trace(const Arguments& a) {
  log::configure(log::Level::kDebug, "sim");
  const sim::SoakResult r = sim::soak(a.soak.first, [](const std::string& line) { fmt::print("{}\n", line); });
  fmt::print("seed {}: trace {:016x}, {} events, {:.1f} s of virtual time\n", r.seed, r.trace_hash, r.events,
             seconds(r.virtual_time));
  if (r.violations.empty()) return 0;
  print_failure(r);
  return 1;
}

int run(const Arguments& a) {
  using Clock = std::chrono::steady_clock;
  if (a.trace) return trace(a);
  log::configure(log::Level::kOff, "sim");
  const auto begin = Clock::now();
  const bool is_terminal = isatty(STDERR_FILENO) != 0;
  auto reported_at = begin;
  std::uint64_t failed = 0;
  const auto progress = [&](std::uint64_t done, const sim::SoakResult& r) {
    if (!r.violations.empty()) {
      ++failed;
      if (is_terminal) print_stderr("\r\033[K");
      print_failure(r);
    }
    const auto now = Clock::now();
    if (now - reported_at < (is_terminal ? std::chrono::milliseconds(200) : std::chrono::seconds(30)) &&
        done < a.soak.seeds)
      return true;
    reported_at = now;
    const double elapsed_s = std::chrono::duration<double>(now - begin).count();
    print_stderr("{}soak: {} of {} seeds, {} failed, {:.0f} seeds/s{}", is_terminal ? "\r\033[K" : "", done,
                 a.soak.seeds, failed, static_cast<double>(done) / std::max(elapsed_s, 1e-9),
                 is_terminal && done < a.soak.seeds ? "" : "\n");
    return true;
  };
  const sim::SoakSummary s = sim::run_soak(a.soak, progress);
  const double wall_seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  if (a.json)
    fmt::print("{}\n", to_json(s, a.soak, wall_seconds).dump(2));
  else
    fmt::print(
        "{} seeds from {}, {} failed\n"
        "{} events, {} chunks, {} versions activated, {:.0f} s of virtual time\n"
        "{:.0f} s of CPU, {:.3f} s a seed, {:.2f} s at most (seed {}); {:.0f} s by the clock; trace {:016x}\n",
        s.seeds, a.soak.first, s.failures.size(), s.events, s.chunks, s.activations, seconds(s.virtual_time),
        s.cpu_seconds, s.cpu_seconds / static_cast<double>(std::max<std::uint64_t>(1, s.seeds)), s.cpu_seconds_max,
        s.slowest_seed, wall_seconds, s.combined_hash);
  return s.failures.empty() ? 0 : 1;
}

}  // namespace

void add_sim_soak(Verb& sim, int& exit_code) {
  auto* verb = sim.add_verb("soak", "Simulate random fleets with random faults and check rules that must always hold");
  auto a = std::make_shared<Arguments>();
  a->soak.seeds = 100;
  a->soak.threads = std::max(1u, std::thread::hardware_concurrency());
  verb->add_option("--seeds", a->soak.seeds, "number of seeds; each is one scenario")->positive()->show_default();
  verb->add_option("--first", a->soak.first, "the first seed")->show_default();
  verb->add_option("--threads", a->soak.threads, "seeds at a time")->range(1, 1024)->show_default();
  verb->add_option("--twice", a->soak.twice, "run this number of seeds twice and compare their traces")->show_default();
  auto* json = verb->add_flag("--json", a->json, "print JSON");
  verb->add_flag("--trace", a->trace, "print every event of the first seed")->excludes(json);
  verb->footer(
      "Example:\n  echoline sim soak --seeds 20000 --twice 100\n"
      "A violated rule is printed with the command that replays it; the exit code is then 1.");
  verb->callback([a, &exit_code] { exit_code = run(*a); });
}

}  // namespace echoline::cli
