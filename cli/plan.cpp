// echoline plan: prices a fleet before a cent is spent.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/output.hpp"
#include "cli/verbs.hpp"
#include "learner/preflight.hpp"

namespace echoline::cli {
namespace {

struct Arguments {
  std::string config;
  std::vector<std::string> overrides;
  bool json = false;
};

int run(const Arguments& a) {
  const auto refuse = [&](const Error& error) {
    return a.json ? complain_json("plan", error) : complain("plan", error);
  };
  const auto overrides = parse_overrides(a.overrides);
  if (!overrides) return refuse(overrides.error());
  const auto config = learner::load_run_config(a.config, *overrides);
  if (!config) return refuse(config.error());
  const learner::Preflight checked = learner::preflight(*config);
  if (const Status status = checked.status(); !status) return refuse(status.error());
  for (const learner::Check& check : checked.checks)
    if (check.verdict == learner::Verdict::kWarning) say("{}: {}\n", check.name, check.detail);
  if (a.json)
    fmt::print("{}\n", checked.plan->plan.to_json().dump(2));
  else
    fmt::print("{}", checked.plan->plan.to_table());
  return 0;
}

}  // namespace

void add_plan(Verb& app, int& exit) {
  auto* verb = app.add_verb("plan", "Check the run and say which offers would be rented and why, at what price");
  auto a = std::make_shared<Arguments>();
  verb->add_option("config", a->config, "run file, e.g. configs/quickstart.yaml")->required();
  verb->add_option("--set", a->overrides, "override a key of the run file, e.g. --set staleness.budget=3")
      ->one_value_each();
  verb->add_flag("--json", a->json, "print the plan, or what is wrong, as JSON");
  verb->footer("Exits with 3 when no fleet can keep the learner busy, and names the ways out.");
  verb->callback([a, &exit] { exit = run(*a); });
}

}  // namespace echoline::cli
