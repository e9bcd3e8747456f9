// echoline apply: starts a run by a plan that was written and checked before.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "cli/built_in.hpp"
#include "cli/live_table.hpp"
#include "cli/output.hpp"
#include "cli/up.hpp"
#include "cli/verbs.hpp"
#include "learner/market.hpp"
#include "learner/planning.hpp"
#include "learner/preflight.hpp"
#include "provisioner/renewal.hpp"

namespace echoline::cli {
namespace {

struct Arguments {
  std::string plan;
  double price_tolerance = 0.05;
  bool check = false, json = false;
};

// Reads from the plan which run file and which --set values it was made with.
Result<UpArguments> run_of(const nlohmann::json& document, const std::string& file) {
  const auto wrong = [&](std::string_view what) {
    return fail(Code::kInvalid, "read plan", "{}: {}; write it with `echoline plan RUN.yaml -o {}`", file, what, file);
  };
  const auto run = document.find("run");
  if (run == document.end() || !run->is_object()) return wrong("the plan does not name its run");
  const auto config = run->find("file"), set = run->find("set");
  if (config == run->end() || !config->is_string() || set == run->end() || !set->is_array())
    return wrong("run.file and run.set: expected a text and a list of texts");
  UpArguments up;
  up.config = config->get<std::string>();
  for (const nlohmann::json& text : *set) {
    if (!text.is_string()) return wrong("run.set: expected texts");
    up.overrides.push_back(text.get<std::string>());
  }
  return up;
}

int run(const Arguments& a) {
  const auto report_failure = [](const Error& error) { return report_error("apply", error); };
  nlohmann::json document;
  auto planned = provisioner::load_plan(a.plan, &document);
  if (!planned) return report_failure(as_mistake(planned.error()));
  auto up = run_of(document, a.plan);
  if (!up) return report_failure(up.error());
  const auto overrides = parse_overrides(up->overrides);
  if (!overrides) return report_failure(overrides.error());
  const auto config = learner::load_run_config(up->config, *overrides);
  if (!config) return report_failure(config.error());
  if (const Status checked = learner::preflight(*config, {built_in_trainer(), a.plan}).status(); !checked)
    return report_failure(checked.error());
  const auto model = learner::run_model_config(*config);
  if (!model) return report_failure(model.error());
  auto market = learner::run_market(*config, *model, planned->request);
  if (!market) return report_failure(market.error());
  // staleness_worst is not stored in a plan file, so it is computed again.
  planned->request.staleness_worst = learner::plan_request(*config, *model, 0).staleness_worst;
  auto renewed = provisioner::renew_plan(*planned, market->offers, a.price_tolerance);
  if (!renewed) return report_failure(renewed.error());
  renewed->plan.market = std::move(market->market);

  for (const std::string& change : renewed->changes) print_stderr("{}\n", change);
  nlohmann::json renewed_json = renewed->plan.to_json();
  renewed_json["run"] = document["run"];
  if (a.check) {
    renewed_json["changes"] = renewed->changes;
    if (a.json)
      fmt::print("{}\n", renewed_json.dump(2));
    else
      fmt::print("{}", renewed->plan.to_table({}, screen_columns()));
    return 0;
  }
  up->plan = std::filesystem::absolute(a.plan).string() + ".applied";  // with today's prices
  if (const Status written = write_file_atomic(up->plan, renewed_json.dump(2) + "\n"); !written)
    return report_failure(written.error());
  up->json = a.json;
  up->restart_command = "echoline apply " + shell_word(a.plan);
  return run_up(*up);
}

}  // namespace

void add_apply(Verb& app, int& exit_code) {
  auto* verb = app.add_verb("apply", "Start a run by a plan that `echoline plan -o` wrote");
  auto a = std::make_shared<Arguments>();
  verb->add_option("plan", a->plan, "the plan, e.g. plan.json")->required();
  verb->add_option("--price-tolerance", a->price_tolerance,
                   "by which share the price of an offer and of the fleet may have risen; an offer that costs more or "
                   "is gone is replaced")
      ->non_negative()
      ->show_default();
  verb->add_flag("--check", a->check, "only show how the plan has changed");
  verb->add_flag("--json", a->json, "print the report, the errors, or with --check the plan, as JSON");
  verb->footer("The offers are read again. PLAN.applied is the plan by which the fleet was rented.");
  verb->callback([a, &exit_code] { exit_code = run(*a); });
}

}  // namespace echoline::cli
