// echoline token: issues a token with which one machine joins a run.
#include "overlay/trust/token.hpp"

#include <cstdio>

#include "base/clock.hpp"
#include "cli/output.hpp"
#include "cli/verbs.hpp"

namespace echoline::cli {
namespace {

struct TokenArguments {
  std::string run, instance, lifetime = "10 min", reach;
};

Result<overlay::trust::Secret> issue(const TokenArguments& a) {
  ECHO_ASSIGN(const std::filesystem::path folder, find_run(a.run));
  ECHO_ASSIGN(const Duration lifetime, parse_duration(a.lifetime));
  // The run's name is the last part of its folder's path; open() checks that the authority's key belongs to that run.
  ECHO_ASSIGN(const auto authority,
              overlay::trust::Authority::open(folder / "overlay", std::filesystem::canonical(folder).filename()));
  return overlay::trust::issue_token(authority, a.instance, overlay::trust::random_nonce(),
                                     SystemClock().unix_seconds(), lifetime, a.reach);
}

int run_token_verb(const TokenArguments& a) {
  const auto token = issue(a);
  if (!token) return report_error("token", token.error());
  fmt::print("{}\n", token->reveal());
  print_stderr(
      "valid once for '{}', for {}: echoline worker --join HOST:PORT --name {} with the token in ECHOLINE_TOKEN\n",
      a.instance, a.lifetime, a.instance);
  return 0;
}

}  // namespace

void add_token(Verb& app, int& exit_code) {
  auto* verb = app.add_verb("token", "Issue a single-use token with which one machine joins a run");
  auto a = std::make_shared<TokenArguments>();
  verb->add_option("run", a->run, "name or folder of the run; default: the newest below ./runs");
  verb->add_option("--instance", a->instance, "name that the worker will use with --name")->required();
  verb->add_option("--lifetime", a->lifetime, "time until the token expires");
  verb->add_option("--reach", a->reach,
                   "host at which others reach the machine, if it differs from the address of its connection");
  verb->footer(
      "The token is printed to stdout. It is a secret until it has been used:\n"
      "  export ECHOLINE_TOKEN=$(echoline token quickstart --instance my-gpu)");
  verb->callback([a, &exit_code] { exit_code = run_token_verb(*a); });
}

}  // namespace echoline::cli
