// echoline token: issues a token with which one machine joins a run.
#include "overlay/trust/token.hpp"

#include <cstdio>

#include "base/clock.hpp"
#include "cli/output.hpp"
#include "cli/verbs.hpp"
#include "overlay/trainer_node.hpp"

namespace echoline::cli {
namespace {

// `reach`: the host at which others reach the machine that joins.
struct TokenArguments {
  std::string run, instance, lifetime = "10 min", reach;
};

Result<overlay::trust::Secret> issue_worker_token(const TokenArguments& args) {
  ECHO_ASSIGN(const std::filesystem::path folder, find_run(args.run));
  ECHO_ASSIGN(const Duration lifetime, parse_duration(args.lifetime));
  // The run's name is the last part of its folder's path; open() checks that the authority's key belongs to that run.
  ECHO_ASSIGN(const auto authority,
              overlay::trust::Authority::open(folder / "overlay", std::filesystem::canonical(folder).filename()));
  return overlay::trust::issue_token(authority, args.instance, overlay::trust::random_nonce(),
                                     SystemClock().unix_seconds(), lifetime, args.reach);
}

int run_token_verb(const TokenArguments& args) {
  const auto token = issue_worker_token(args);
  if (!token) return report_error("token", token.error());
  fmt::print("{}\n", token->reveal());
  const std::string command = overlay::is_trainer_node(args.instance)
                                  ? "node HOST:PORT --folder FOLDER --name " + args.instance
                                  : "worker --join HOST:PORT --name " + args.instance;
  print_stderr("valid once for '{}', for {}: echoline {} with the token in ECHOLINE_TOKEN\n", args.instance,
               args.lifetime, command);
  return 0;
}

}  // namespace

void add_token(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("token", "Issue a single-use token with which one machine joins a run");
  auto args = std::make_shared<TokenArguments>();
  verb->add_option("run", args->run, "name or folder of the run; default: the newest below ./runs");
  verb->add_option("--instance", args->instance, "name that the worker will use with --name")->required();
  verb->add_option("--lifetime", args->lifetime, "time until the token expires");
  verb->add_option("--reach", args->reach,
                   "host at which others reach the machine, if it differs from the address of its connection");
  verb->footer("The token is printed to stdout. It is a secret until it has been used.");
  verb->callback([args, &exit_code] { exit_code = run_token_verb(*args); });
}

}  // namespace echoline::cli
