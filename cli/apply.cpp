// echoline apply: starts a run from a plan that was written and checked before.
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

// Reads from the plan's document with which run file and which --set values it was made.
Result<UpArguments> read_run_arguments(const nlohmann::json& document, const std::string& file) {
  const auto invalid = [&](std::string_view what) {
    return fail(Code::kInvalid, "read plan", "{}: {}; write it with `echoline plan RUN.yaml -o {}`", file, what, file);
  };
  const auto run = document.find("run");
  if (run == document.end() || !run->is_object()) return invalid("the plan does not name its run");
  const auto config = run->find("file"), overrides = run->find("set");
  if (config == run->end() || !config->is_string() || overrides == run->end() || !overrides->is_array())
    return invalid("run.file and run.set: expected a text and a list of texts");
  UpArguments up;
  up.config = config->get<std::string>();
  for (const nlohmann::json& override_text : *overrides) {
    if (!override_text.is_string()) return invalid("run.set: expected texts");
    up.overrides.push_back(override_text.get<std::string>());
  }
  return up;
}

int run(const Arguments& args) {
  const auto report_failure = [](const Error& error) { return report_error("apply", error); };
  nlohmann::json document;
  auto planned = provisioner::load_plan(args.plan, &document);
  if (!planned) return report_failure(as_user_error(planned.error()));
  auto up = read_run_arguments(document, args.plan);
  if (!up) return report_failure(up.error());
  const auto overrides = parse_overrides(up->overrides);
  if (!overrides) return report_failure(overrides.error());
  const auto config = learner::load_run_config(up->config, *overrides);
  if (!config) return report_failure(config.error());
  // The checks before a run: those of `echoline plan`, but with the plan that is given.
  if (const Status checked = learner::preflight(*config, {built_in_trainer(), args.plan}).status(); !checked)
    return report_failure(checked.error());
  const auto model = learner::run_model_config(*config);
  if (!model) return report_failure(model.error());
  auto market_now = learner::read_run_market(*config, *model, planned->request);
  if (!market_now) return report_failure(market_now.error());
  // A plan file does not store how the idle time and the staleness are predicted, so that is taken from the run file.
  // It does not depend on the length of the prompts.
  constexpr std::uint64_t kPromptTokensUnknown = 0;
  const provisioner::PlanRequest request = learner::plan_request(*config, *model, kPromptTokensUnknown);
  planned->request.staleness_worst = request.staleness_worst;
  planned->request.predict_idle = request.predict_idle;
  auto renewed = provisioner::renew_plan(*planned, market_now->offers, args.price_tolerance);
  if (!renewed) return report_failure(renewed.error());
  renewed->plan.market = std::move(market_now->market);

  for (const std::string& change : renewed->changes) print_stderr("{}\n", change);
  nlohmann::json renewed_json = renewed->plan.to_json();
  renewed_json["run"] = document["run"];
  if (args.check) {
    renewed_json["changes"] = renewed->changes;
    if (args.json)
      fmt::print("{}\n", renewed_json.dump(2));
    else
      fmt::print("{}", renewed->plan.to_table({}, screen_columns()));
    return 0;
  }
  up->plan = std::filesystem::absolute(args.plan).string() + ".applied";  // with today's prices
  if (const Status written = write_file_atomic(up->plan, renewed_json.dump(2) + "\n"); !written)
    return report_failure(written.error());
  up->json = args.json;
  up->restart_command = "echoline apply " + shell_word(args.plan);
  return run_up(*up);
}

}  // namespace

void add_apply(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("apply", "Start a run from a plan that `echoline plan -o` wrote");
  auto args = std::make_shared<Arguments>();
  verb->add_option("plan", args->plan, "the plan, e.g. plan.json")->required();
  verb->add_option(
          "--price-tolerance", args->price_tolerance,
          "largest accepted rise of the price of an offer and of the fleet, as a fraction (0.05: 5 %); an offer "
          "that costs more or is gone is replaced")
      ->non_negative()
      ->show_default();
  verb->add_flag("--check", args->check, "only show how the plan has changed");
  verb->add_flag("--json", args->json, "print the report, the errors, or with --check the plan, as JSON");
  verb->footer("The offers are read again. PLAN.applied is the plan with which the fleet was rented.");
  verb->callback([args, &exit_code] { exit_code = run(*args); });
}

}  // namespace echoline::cli
