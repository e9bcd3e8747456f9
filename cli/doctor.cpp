// echoline doctor: checks this machine, and a run file if one is given, before a run depends on them.
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/files.hpp"
#include "cli/built_in.hpp"
#include "cli/verbs.hpp"
#include "data_plane/sandbox/sandbox.hpp"
#include "learner/preflight.hpp"
#include "overlay/uv/node.hpp"
#include "provisioner/ledger.hpp"

namespace echoline::cli {
namespace {

struct Arguments {
  std::string config;
  std::vector<std::string> overrides;
  bool json = false;
};

using learner::Check;
using learner::Verdict;

// A check that passes with `detail`, or fails with the message of `status`.
Check check_of_status(const std::string& name, const Status& status, std::string detail) {
  if (status) return {name, Verdict::kOk, std::move(detail)};
  return {name, Verdict::kFailed, status.error().message(), status.error().code};
}

// Enough for the run file configs/quickstart.yaml.
constexpr unsigned kCoresWanted = 2;
constexpr double kGibWanted = 4, kDiskGbWanted = 1;

Check check_machine() {
  const unsigned cores = std::thread::hardware_concurrency();
  const double gib =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGE_SIZE)) / (1u << 30);
  const bool is_small = cores < kCoresWanted || gib < kGibWanted;
  return {"machine", is_small ? Verdict::kWarning : Verdict::kOk,
          fmt::format("{} cores, {:.1f} GiB of memory{}", cores, gib,
                      is_small ? fmt::format("; the quickstart wants {} and {}", kCoresWanted, kGibWanted) : "")};
}

Check check_disk() {
  struct statvfs info {};
  if (::statvfs(".", &info) != 0)
    return {"disk", Verdict::kFailed, "cannot read the size of the working directory's disk"};
  const double gb = static_cast<double>(info.f_bavail) * static_cast<double>(info.f_frsize) / 1e9;
  return {"disk", gb < kDiskGbWanted ? Verdict::kWarning : Verdict::kOk, fmt::format("{:.1f} GB free for ./runs", gb)};
}

// Creates a ledger (the database of rentals) in a temporary folder: open() writes its tables durably, and totals()
// reads them back.
Check check_database() {
  std::string folder = (std::filesystem::temp_directory_path() / "echoline-doctor-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) return {"database", Verdict::kFailed, "cannot create a temporary folder"};
  const auto attempt = [&]() -> Status {
    ECHO_ASSIGN(provisioner::Ledger ledger, provisioner::Ledger::open(folder + "/ledger.sqlite", "doctor"));
    ECHO_ASSIGN(const auto totals, ledger.totals(/*now_unix_s=*/0));
    return totals.running == 0 ? ok() : fail(Code::kCorrupt, "ledger", "a new ledger is not empty");
  };
  const Status result = attempt();
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return check_of_status("database", result, "SQLite writes durably");
}

Check check_network() {
  overlay::LearnerOptions options;
  options.run_id = "doctor";
  auto node = overlay::LearnerNode::start(options, {});
  if (!node) return {"network", Verdict::kFailed, node.error().message()};
  return {"network", Verdict::kOk, "listening works on " + overlay::to_text((*node)->endpoint())};
}

// A missing sandbox is only a warning, because only tasks that run programs need one.
Check check_sandbox() {
  const auto pool = sandbox::Pool::start();
  if (!pool) return {"sandbox", Verdict::kWarning, "tasks that run programs cannot be used: " + pool.error().detail};
  return {"sandbox", Verdict::kOk, "untrusted programs can be isolated"};
}

// Reads the run file and makes the checks of `plan` and `up`.
std::vector<Check> check_run(const Arguments& args) {
  const auto load_config = [&]() -> Result<learner::RunConfig> {
    ECHO_ASSIGN(const auto overrides, parse_overrides(args.overrides));
    return learner::load_run_config(args.config, overrides);
  };
  const auto config = load_config();
  if (!config) return {{"run file", Verdict::kFailed, config.error().message(), config.error().code}};
  std::vector<Check> checks{{"run file", Verdict::kOk, args.config}};
  for (Check& check : learner::preflight(*config, {built_in_trainer()}).checks) checks.push_back(std::move(check));
  return checks;
}

int run(const Arguments& args) {
  std::vector<Check> checks{check_machine(), check_disk(),    check_database(),
                            check_network(), check_sandbox(), check_torch()};
  if (!args.config.empty())
    for (Check& check : check_run(args)) checks.push_back(std::move(check));
  bool some_failed = false;
  nlohmann::json rows = nlohmann::json::array();
  for (const Check& check : checks) {
    const char* verdict = check.verdict == Verdict::kOk        ? "ok"
                          : check.verdict == Verdict::kWarning ? "warning"
                                                               : "FAILED";
    some_failed = some_failed || check.verdict == Verdict::kFailed;
    if (!args.json) fmt::print("{:<14}{:<9}{}\n", check.name, verdict, check.detail);
    rows.push_back({{"check", check.name}, {"verdict", verdict}, {"detail", check.detail}});
  }
  if (args.json)
    fmt::print("{}\n", nlohmann::json{{"schema_version", 1}, {"ok", !some_failed}, {"checks", rows}}.dump(2));
  return some_failed ? 1 : 0;
}

}  // namespace

void add_doctor(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("doctor", "Check this machine and a run file before a run depends on them");
  auto args = std::make_shared<Arguments>();
  verb->add_option("config", args->config, "run file to check as well");
  verb->add_option("--set", args->overrides, "override a key of the run file, e.g. --set network.port=7070")
      ->one_value_each();
  verb->add_flag("--json", args->json, "print JSON");
  verb->callback([args, &exit_code] { exit_code = run(*args); });
}

}  // namespace echoline::cli
