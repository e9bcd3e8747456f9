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
  bool json = false, sensitivity = false, dot = false;
};

// How other settings would change the plan. When no plan exists, the request and the offers are put together here.
Result<std::vector<provisioner::Variation>> variations(const learner::RunConfig& config,
                                                       const learner::Preflight& checked) {
  if (checked.plan) return provisioner::vary_plan(checked.plan->plan.request, checked.plan->offers);
  ECHO_ASSIGN(const auto model, learner::run_model_config(config));
  const provisioner::PlanRequest request = learner::plan_request(config, model, checked.prompt_tokens);
  ECHO_ASSIGN(const auto market, learner::run_market(config, model, request));
  return provisioner::vary_plan(request, market.offers);
}

int run(const Arguments& a) {
  const auto report_failure = [](const Error& error) { return report_error("plan", error); };
  std::vector<std::string> texts = a.overrides;
  if (!a.offers.empty()) {
    texts.push_back("fleet.offers=" + a.offers);
    texts.push_back("fleet.search=false");
  }
  for (const std::string& text : a.assume) texts.push_back("fleet.assume." + text);
  const auto overrides = parse_overrides(texts);
  if (!overrides) return report_failure(overrides.error());
  const auto config = learner::load_run_config(a.config, *overrides);
  if (!config) return report_failure(config.error());
  const learner::Preflight checked = learner::preflight(*config, {built_in_trainer()});
  if (const Status status = checked.status(); !status) {
    const int code = report_failure(status.error());
    if (a.sensitivity && status.error().code == Code::kInfeasible && !a.json)
      if (const auto alternatives = variations(*config, checked))
        fmt::print("{}", provisioner::variations_table(*alternatives, screen_columns()));
    return code;
  }
  for (const learner::Check& check : checked.checks)
    if (check.verdict == learner::Verdict::kWarning) print_stderr("{}: {}\n", check.name, check.detail);
  const provisioner::Plan& plan = checked.plan->plan;

  nlohmann::json document = plan.to_json();
  // `apply` starts the run from this.
  document["run"] = {{"file", std::filesystem::absolute(a.config).string()}, {"set", texts}};
  if (!a.output.empty())
    if (const Status written = write_file_atomic(a.output, document.dump(2) + "\n"); !written)
      return report_failure(written.error());

  if (!a.explain.empty()) {
    const auto explained = provisioner::explain_offer(plan, checked.plan->offers, a.explain);
    if (!explained) return report_failure(as_mistake(explained.error()));
    if (a.json)
      fmt::print("{}\n", explained->to_json().dump(2));
    else
      fmt::print("{}", explained->to_text(screen_columns()));
    return 0;
  }
  if (a.dot) {
    fmt::print("{}", plan.to_dot());
    return 0;
  }
  std::optional<std::vector<provisioner::Variation>> alternatives;
  if (a.sensitivity) {
    auto varied = variations(*config, checked);
    if (!varied) return report_failure(varied.error());
    alternatives = std::move(*varied);
  }
  if (a.json) {
    if (alternatives) document["sensitivity"] = provisioner::variations_json(*alternatives);
    fmt::print("{}\n", document.dump(2));
    return 0;
  }
  fmt::print("{}", plan.to_table(SystemClock().unix_seconds(), screen_columns()));
  if (alternatives)
    fmt::print("\nwith another setting\n{}", provisioner::variations_table(*alternatives, screen_columns()));
  if (!a.output.empty()) print_stderr("rent this fleet with: echoline apply {}\n", a.output);
  return 0;
}

}  // namespace

void add_plan(Verb& app, int& exit_code) {
  auto* verb = app.add_verb("plan", "Check the run and show which offers would be rented, why, and at what price");
  auto a = std::make_shared<Arguments>();
  verb->add_option("config", a->config, "run file, e.g. configs/quickstart.yaml")->required();
  verb->add_option("--set", a->overrides, "override a key of the run file, e.g. --set staleness.budget=3")
      ->one_value_each();
  verb->add_option(
      "--offers", a->offers,
      "use these offers instead of the run file's: a reply of vast.ai, a catalogue of SkyPilot, or our own format");
  verb->add_option("--assume", a->assume,
                   "value to use where an offer states none, e.g. --assume storage_usd_per_hour=0.01")
      ->one_value_each();
  verb->add_option("--explain", a->explain,
                   "explain why this offer is rented or not, and at what price that would change");
  verb->add_flag("--sensitivity", a->sensitivity, "also show the result of another S, kappa, uplink or price");
  verb->add_option("-o,--output", a->output, "write the plan to this file, for `echoline apply`");
  verb->add_flag("--json", a->json, "print the plan or the errors as JSON");
  verb->add_flag("--dot", a->dot, "print which node would send to which, for Graphviz");
  verb->footer("Nothing is rented. Exits with 3 when no fleet can keep the learner busy, and suggests changes.");
  verb->callback([a, &exit_code] { exit_code = run(*a); });
}

}  // namespace echoline::cli
