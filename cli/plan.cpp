// echoline plan: computes and prices a fleet before anything is rented.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "cli/built_in.hpp"
#include "cli/live_table.hpp"
#include "cli/output.hpp"
#include "cli/verbs.hpp"
#include "learner/market.hpp"
#include "learner/preflight.hpp"
#include "provisioner/plan_study.hpp"

namespace echoline::cli {
namespace {

struct Arguments {
  std::string config, offers, explain, output;
  std::vector<std::string> overrides, assume;
  bool json = false, sensitivity = false, dot = false, elsewhere = false;
};

// The answer to --sensitivity.
struct Study {
  std::vector<provisioner::Variation> variations;  // plans with one setting changed each
  std::vector<provisioner::IdlePoint> idle_curve;  // the learner's idle time against the price; empty without a plan
};
// `checked`: the result of the checks before a run. If they made no plan, they kept no offers either, so the offers are
// read again.
Result<Study> study_of(const learner::RunConfig& config, const learner::Preflight& checked) {
  if (checked.plan) {
    const provisioner::PlanRequest& request = checked.plan->plan.request;
    return Study{.variations = provisioner::vary_plan(request, checked.plan->offers),
                 .idle_curve = provisioner::idle_curve(request, checked.plan->offers)};
  }
  ECHO_ASSIGN(const auto model, learner::run_model_config(config));
  const provisioner::PlanRequest request = learner::plan_request(config, model, checked.prompt_tokens);
  ECHO_ASSIGN(const auto market, learner::read_run_market(config, model, request));
  return Study{.variations = provisioner::vary_plan(request, market.offers), .idle_curve = {}};
}

int run(const Arguments& args) {
  const auto report_failure = [](const Error& error) { return report_error("plan", error); };
  std::vector<std::string> override_texts = args.overrides;
  if (!args.offers.empty()) {
    override_texts.push_back("fleet.offers=" + args.offers);
    override_texts.push_back("fleet.search=false");
  }
  for (const std::string& text : args.assume) override_texts.push_back("fleet.assume." + text);
  const auto overrides = parse_overrides(override_texts);
  if (!overrides) return report_failure(overrides.error());
  const auto config = learner::load_run_config(args.config, *overrides);
  if (!config) return report_failure(config.error());
  const learner::Preflight checked =
      learner::preflight(*config, {.built_in = built_in_trainer(), .elsewhere = args.elsewhere});
  if (const Status status = checked.status(); !status) {
    const int exit_code = report_failure(status.error());
    if (args.sensitivity && status.error().code == Code::kInfeasible && !args.json)
      if (const auto study = study_of(*config, checked))
        fmt::print("{}", provisioner::variations_table(study->variations, screen_columns()));
    return exit_code;
  }
  for (const learner::Check& check : checked.checks)
    if (check.verdict == learner::Verdict::kWarning) print_stderr("{}: {}\n", check.name, check.detail);
  const provisioner::Plan& plan = checked.plan->plan;

  nlohmann::json plan_json = plan.to_json();
  // `echoline apply` starts the run with these arguments.
  plan_json["run"] = {{"file", std::filesystem::absolute(args.config).string()}, {"set", override_texts}};
  std::optional<Study> study;
  if (args.sensitivity) {
    auto made_study = study_of(*config, checked);
    if (!made_study) return report_failure(made_study.error());
    study = std::move(*made_study);
    plan_json["sensitivity"] = provisioner::variations_json(study->variations);
    plan_json["idle_curve"] = provisioner::idle_curve_json(study->idle_curve);
  }
  if (!args.output.empty())
    if (const Status written = write_file_atomic(args.output, plan_json.dump(2) + "\n"); !written)
      return report_failure(written.error());

  if (!args.explain.empty()) {
    const auto explained = provisioner::explain_offer(plan, checked.plan->offers, args.explain);
    if (!explained) return report_failure(as_user_error(explained.error()));
    if (args.json)
      fmt::print("{}\n", explained->to_json().dump(2));
    else
      fmt::print("{}", explained->to_text(screen_columns()));
    return 0;
  }
  if (args.dot) {
    fmt::print("{}", plan.to_dot());
    return 0;
  }
  if (args.json) {
    fmt::print("{}\n", plan_json.dump(2));
    return 0;
  }
  fmt::print("{}", plan.to_table(SystemClock().unix_seconds(), screen_columns()));
  if (study)
    fmt::print("\nidle against price\n{}\nwith another setting\n{}",
               provisioner::idle_curve_table(study->idle_curve, screen_columns()),
               provisioner::variations_table(study->variations, screen_columns()));
  if (!args.output.empty()) print_stderr("rent this fleet with: echoline apply {}\n", args.output);
  return 0;
}

}  // namespace

void add_plan(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("plan", "Check the run and show which offers would be rented, why, and at what price");
  auto args = std::make_shared<Arguments>();
  verb->add_option("config", args->config, "run file, e.g. configs/quickstart.yaml")->required();
  verb->add_option("--set", args->overrides, "override a key of the run file, e.g. --set staleness.budget=3")
      ->one_value_each();
  verb->add_option(
      "--offers", args->offers,
      "use these offers instead of the run file's: a reply of vast.ai, a catalogue of SkyPilot, or our own format");
  verb->add_option("--assume", args->assume,
                   "value to use where an offer states none, e.g. --assume storage_usd_per_hour=0.01")
      ->one_value_each();
  verb->add_option("--explain", args->explain,
                   "explain why this offer is rented or not, and at what price that would change");
  verb->add_flag("--sensitivity", args->sensitivity,
                 "also show the learner's idle time against the price, and the result of another S, lookahead, kappa, "
                 "uplink or price");
  verb->add_option("-o,--output", args->output, "write the plan to this file, for `echoline apply`");
  verb->add_flag("--elsewhere", args->elsewhere,
                 "the run will start on another machine: what this one lacks (GPU, memory, port, bundle, key) is only "
                 "printed");
  verb->add_flag("--json", args->json, "print the plan or the errors as JSON");
  verb->add_flag("--dot", args->dot, "print which node would send to which, for Graphviz");
  verb->footer("Nothing is rented. Exits with 3 when no fleet can keep the learner busy, and suggests changes.");
  verb->callback([args, &exit_code] { exit_code = run(*args); });
}

}  // namespace echoline::cli
