// echoline advise: finds settings that make a simulated run cheaper or faster. study/advice does the search.
#include <algorithm>
#include <cstdio>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "cli/output.hpp"
#include "cli/state_line.hpp"
#include "cli/verbs.hpp"
#include "study/advice.hpp"
#include "study/sim_run_like.hpp"

namespace echoline::cli {
namespace {

using namespace study;

struct Arguments {
  std::string scenario, like, aim = "usd", out;
  std::optional<std::string> deadline;
  std::optional<double> budget;
  std::optional<unsigned> staleness_max;
  std::vector<std::string> overrides;
  unsigned jobs = 0;
  bool json = false;
};

Result<AdviceArguments> advice_arguments(const Arguments& args) {
  AdviceArguments advice;
  if (args.scenario.empty() == args.like.empty())
    return fail(Code::kInvalid, "advise", "expected either a run file or --like with a run");
  advice.scenario = args.scenario;
  ECHO_ASSIGN(advice.overrides, parse_overrides(args.overrides));
  if (!args.like.empty()) {
    ECHO_ASSIGN(const auto folder, find_run(args.like));
    ECHO_ASSIGN(const MeasuredRun run, read_measured_run(folder));
    advice.scenario = run.config.string();
    advice.overrides = overrides_like(run, advice.overrides);
  }
  advice.aim = args.aim == "usd" ? AdviceAim::kUsd : AdviceAim::kHours;
  if (args.deadline) {
    const auto deadline = parse_duration(*args.deadline);
    if (!deadline) return fail(Code::kInvalid, "--deadline", "{}", deadline.error().detail);
    if (*deadline <= Duration{}) return fail(Code::kInvalid, "--deadline", "expected a time above 0, as in '6 h'");
    advice.hours_max = seconds(*deadline) / 3600;
  }
  advice.usd_max = args.budget;
  advice.staleness_budget_max = args.staleness_max;
  advice.threads = args.jobs;
  return advice;
}

// --- The text, at most 80 columns wide ------------------------------------------------------------------------

// With cents, if the sum is so small that they matter.
std::string usd_text(double usd) {
  constexpr double kCentsBelow = 100;
  return usd < kCentsBelow ? fmt::format("{:.2f}", usd) : fmt::format("{:.0f}", usd);
}

std::string figures_row(const std::string& name, const AdviceFigures& figures) {
  const std::string usd_range = fmt::format("{} to {}", usd_text(figures.usd_min), usd_text(figures.usd_max));
  return fmt::format("{:<10}{:>9.2f}{:>15}{:>7.2f}{:>8.2f}{:>8.1f}{:>7.2f}{:>5}{:>9}{}\n", name, figures.usd, usd_range,
                     figures.hours, figures.usd_per_hour, 100 * figures.idle_fraction, figures.staleness_mean,
                     figures.staleness_p95, figures.workers, figures.possible ? "" : " !");
}

std::string figures_table(const Advice& advice) {
  std::string text = fmt::format("{:<10}{:>9}{:>15}{:>7}{:>8}{:>8}{:>7}{:>5}{:>9}\n", "", "$", "$ by seed", "hours",
                                 "$/hour", "idle %", "stale", "p95", "workers");
  text += figures_row("run file", advice.given.figures);
  bool all_possible = advice.given.figures.possible;
  for (std::size_t i = 0; i < advice.best.size(); ++i) {
    text += figures_row(fmt::format("advice {}", i + 1), advice.best[i].figures);
    all_possible = all_possible && advice.best[i].figures.possible;
  }
  text += fmt::format("Means of simulations with seeds {} to {}. stale: age of the data, in learner steps\n",
                      advice.seed, advice.seed + kAdviceSeeds - 1);
  if (!all_possible) text += "!: it has no plan, or does not complete its steps; `echoline sim run` says why\n";
  return text;
}

// A command with the advised settings, and with those that the user gave for other keys.
std::string command_text(const Arguments& args, const KeyValues& changes) {
  std::string text = "  echoline sim run ";
  text += args.like.empty() ? shell_word(args.scenario) : "--like " + shell_word(args.like);
  const auto add_setting = [&](const std::string& setting) {
    text += fmt::format(" \\\n    --set {}", shell_word(setting));
  };
  for (const std::string& given : args.overrides)
    if (std::ranges::none_of(changes, [&](const auto& change) { return given.starts_with(change.first + "="); }))
      add_setting(given);
  for (const auto& [key, value] : changes) add_setting(fmt::format("{}={}", key, value));
  return text + "\n";
}

std::string effect_text(const Advice& advice, const AdviceEffect& effect) {
  const AdviceFigures &best = advice.best.front().figures, &with_given = effect.with_given;
  if (!with_given.possible) return " the other settings exclude it";
  const std::string difference = advice.aim == AdviceAim::kUsd
                                     ? fmt::format("{:>+9.2f} $", with_given.usd - best.usd)
                                     : fmt::format("{:>+9.2f} hours", with_given.hours - best.hours);
  return fmt::format("{}, idle {:.1f} %, stale {:.2f}{}", difference, 100 * with_given.idle_fraction,
                     with_given.staleness_mean, effect.within_limits ? "" : " (!)");
}

std::string effects_text(const Advice& advice) {
  if (advice.effects.empty()) return "\nNo other settings were better than the run file's.\n";
  std::string text = "\nEffect of each setting: advice 1 with one setting as in the run file\n";
  for (const AdviceEffect& effect : advice.effects)
    text += fmt::format("  {:<32}{}\n", effect.key + "=" + effect.given, effect_text(advice, effect));
  if (!std::ranges::all_of(advice.effects, &AdviceEffect::within_limits))
    text += "  (!): beyond --deadline or --budget\n";
  return text;
}

std::string advice_text(const Advice& advice, const Arguments& args) {
  std::string text = figures_table(advice);
  for (std::size_t i = 0; i < advice.best.size(); ++i) {
    const KeyValues changes = advised_changes(advice, advice.best[i]);
    text += fmt::format("\nAdvice {}{}\n", i + 1, changes.empty() ? ": the run file as it is" : "");
    text += command_text(args, changes);
  }
  text += effects_text(advice);
  text +=
      "\nThe settings staleness.* change the age of the data that the learner trains on,\n"
      "and so what it learns; these figures count dollars and hours only.\n";
  return text;
}

Status write_run_files(const AdviceArguments& arguments, const Advice& advice, const std::filesystem::path& folder) {
  ECHO_TRY(make_folders(folder));
  for (std::size_t i = 0; i < advice.best.size(); ++i) {
    ECHO_ASSIGN(const std::string yaml, advised_run_file(arguments, advised_changes(advice, advice.best[i])));
    ECHO_TRY(write_file_atomic(folder / fmt::format("advice-{}.yaml", i + 1), yaml));
  }
  return ok();
}

// Why the advice does not keep the limits, with the nearest run.
std::string limits_text(const Arguments& args, const AdviceFigures& nearest) {
  if (!nearest.possible) return "no combination has a plan and completes its steps";
  std::string limits;
  if (args.deadline) limits += fmt::format("--deadline '{}'", *args.deadline);
  if (args.budget) limits += fmt::format("{}--budget {}", limits.empty() ? "" : " and ", *args.budget);
  return fmt::format(
      "no combination keeps {} with every seed; advice 1 is the nearest, with up to {:.2f} h and ${:.2f}", limits,
      nearest.hours_max, nearest.usd_max);
}

int run_advise(const Arguments& args) {
  log::configure(log::Level::kError, "advise");
  const auto report_failure = [](const Error& error) { return report_error("advise", error); };
  const auto arguments = advice_arguments(args);
  if (!arguments) return report_failure(arguments.error());
  const auto advice = [&] {
    StateLine progress;
    return advise(*arguments, [&](std::uint64_t done, std::uint64_t total) {
      progress.show(fmt::format("{} % of about {} plans and simulations", 100 * done / total, total));
    });
  }();
  if (!advice) return report_failure(advice.error());
  if (!args.out.empty())
    if (const Status written = write_run_files(*arguments, *advice, args.out); !written)
      return report_failure(written.error());
  if (args.json)
    fmt::print("{}\n", advice_json(*advice).dump(2));
  else
    fmt::print("{}", advice_text(*advice, args));
  if (advice->within_limits) return 0;
  print_stderr("echoline advise: {}\n", limits_text(args, advice->best.front().figures));
  return 1;
}

}  // namespace

void add_advise(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("advise", "Find settings that make a simulated run cheaper or faster");
  auto args = std::make_shared<Arguments>();
  verb->add_option("scenario", args->scenario, "run file with a section `simulation`, e.g. configs/sim/regions.yaml");
  verb->add_option("--like", args->like, "a run that has ended: its file, with its measured values");
  verb->add_option("--minimise", args->aim, "usd: the cost of the run; hours: its time")
      ->one_of({"usd", "hours"})
      ->show_default();
  verb->add_option("--deadline", args->deadline, "the longest time that the run may take, e.g. '6 h'");
  verb->add_option("--budget", args->budget, "the most dollars that the run may cost, with the learner")->positive();
  verb->add_option("--staleness-max", args->staleness_max,
                   "the greatest staleness.budget that is tried; default: that of the file")
      ->range(0u, 1000u);
  verb->add_option("--set", args->overrides, "override a key of the file, as for `echoline sim run`")->one_value_each();
  verb->add_option("--jobs", args->jobs, "simulations at a time; default: one for each core")->range(1u, 1024u);
  verb->add_option("-o,--out", args->out, "write the advised run files, advice-1.yaml and so on, into this folder");
  verb->add_flag("--json", args->json, "print the advice or the errors as JSON");
  verb->footer(
      "It searches staleness.budget, publish_every and lookahead, network.topology, fleet.headroom and fleet.places "
      "(docs/advise.md). Plans drop most combinations, short simulations drop more, and the last ones are simulated "
      "completely with three seeds. The same file gives the same advice. It shows what each setting is worth by "
      "taking it back alone. With --like, the machines are those of the run's offers.\n"
      "staleness.* change the age of the data in training, and so what the model learns. staleness.budget never "
      "exceeds that of the file without --staleness-max. Exit code 1: no combination keeps the limits.");
  verb->callback([args, &exit_code] { exit_code = run_advise(*args); });
}

}  // namespace echoline::cli
