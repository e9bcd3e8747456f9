// echoline: post-trains a language model with one learner and a rented rollout fleet. The program's entry point.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>

#include "base/suggest.hpp"
#include "cli/json_errors.hpp"
#include "cli/output.hpp"
#include "cli/verbs.hpp"

#ifndef ECHOLINE_VERSION
#define ECHOLINE_VERSION "unknown"
#endif

int main(int argc, char** argv) {
  using namespace echoline::cli;
  open_standard_files();
  // Found before parsing, because errors of parsing are JSON as well.
  set_json_errors(std::find(argv, argv + argc, std::string_view("--json")) != argv + argc);
  Verb program("Post-train a language model with reinforcement learning on one learner and a rented rollout fleet.");
  program.version(std::string("echoline ") + ECHOLINE_VERSION);
  program.require_verb();
  program.footer(
      "Data goes to stdout, progress to stderr; --json prints the same data for programs.\n"
      "Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 infeasible plan.");
  int exit_code = 0;
  add_up(program, exit_code);
  add_plan(program, exit_code);
  add_apply(program, exit_code);
  add_learner(program, exit_code);
  add_worker(program, exit_code);
  add_node(program, exit_code);
  add_relay(program, exit_code);
  add_token(program, exit_code);
  add_publish(program, exit_code);
  add_model(program, exit_code);
  add_evaluate(program, exit_code);
  add_rescore(program, exit_code);
  add_config(program, exit_code);
  add_sim(program, exit_code);
  add_sweep(program, exit_code, ECHOLINE_VERSION);
  add_advise(program, exit_code);
  add_status(program, exit_code);
  add_report(program, exit_code);
  add_ledger(program, exit_code);
  add_down(program, exit_code);
  add_bundle(program, exit_code);
  add_doctor(program, exit_code);
  add_delta(program, exit_code);
  add_store(program, exit_code);
  add_adapter(program, exit_code);
  add_completion(program, exit_code);
  add_man(program, exit_code);
  const std::vector<std::string> verbs = program.verbs();
  if (argc > 1 && argv[1][0] != '-' && std::find(verbs.begin(), verbs.end(), argv[1]) == verbs.end()) {
    const int refused = report_error(
        "", echoline::fail(echoline::Code::kInvalid, "", "unknown verb '{}'{}; `echoline --help` lists them", argv[1],
                           echoline::did_you_mean(argv[1], verbs)));
    return flush_stdout(refused);
  }
  try {
    if (const int usage_error = program.parse(argc, argv); usage_error != 0) exit_code = usage_error;
  } catch (const std::exception& error) {
    // fmt::print throws when stdout cannot be written to; flush_stdout() then reports errno. Any other exception is a
    // bug, because expected failures are values.
    const auto* system_error = dynamic_cast<const std::system_error*>(&error);
    if (system_error != nullptr && std::ferror(stdout) != 0)
      errno = system_error->code().value();
    else
      report_error("", echoline::fail(echoline::Code::kInternal, "internal error", "{}", error.what()));
    exit_code = 1;
  }
  return flush_stdout(exit_code);
}
