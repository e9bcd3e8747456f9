// echoline ledger: shows the machines that a run has rented, their cost and their performance. The ledger is the run's
// database of them. echoline down: ends the run and releases them.
#include "provisioner/ledger.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "base/utc.hpp"
#include "cli/output.hpp"
#include "cli/verbs.hpp"
#include "learner/planning.hpp"
#include "learner/run_record.hpp"
#include "provisioner/bill.hpp"
#include "provisioner/down.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::cli {
namespace {

using nlohmann::json;
using provisioner::Ledger;
using provisioner::LedgerRow;

// The arguments of `down` and of all subcommands of `ledger`.
struct Arguments {
  std::string run;
  bool json = false, absent_is_gone = false, ask_for_charges = false, all_runs = false, by_label = false;
  std::string key_file;
};

struct OpenLedger {
  std::filesystem::path folder;
  std::optional<learner::RunConfig> config;  // absent if the run file cannot be read
  Ledger ledger;
};

Result<OpenLedger> open_ledger(const std::string& run) {
  ECHO_ASSIGN(const std::filesystem::path folder, find_run(run));
  const auto file = folder / "ledger.sqlite";
  if (!std::filesystem::exists(file))
    return fail(Code::kNotFound, "ledger", "{}: this run has not rented anything", file.string());
  auto config = learner::load_run_config(folder / "config.yaml");
  std::error_code ignored;
  const std::string name =
      config ? config->run.name : std::filesystem::weakly_canonical(folder, ignored).filename().string();
  ECHO_ASSIGN(Ledger ledger, Ledger::open(file, name));
  return OpenLedger{folder, config ? std::optional(std::move(*config)) : std::nullopt, std::move(ledger)};
}

void print_json(const json& object) {
  fmt::print("{}\n", object.dump(2, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace));
}

template <class Number>
json json_or_null(const std::optional<Number>& number) {
  return number ? json(*number) : json();
}

std::string or_dash(const std::string& text) { return text.empty() ? "-" : text; }

using ChargesByRow = std::map<std::int64_t, provisioner::LedgerCharge>;  // each row's charges of all days, by row id

Result<ChargesByRow> charges_by_row(const Ledger& ledger) {
  ECHO_ASSIGN(const auto days, ledger.charges());
  ChargesByRow charges;
  for (const auto& day : days) {
    auto& sum = charges[day.row];
    sum.usd += day.usd;
    sum.usd_rent += day.usd_rent;
    sum.usd_traffic += day.usd_traffic;
    sum.day_unix_s = std::max(sum.day_unix_s, day.day_unix_s);  // the last day
  }
  return charges;
}

// Stores in the ledger what providers say they have charged for this run's instances, and the credit left on the
// accounts.
Status store_charges(OpenLedger& opened) {
  const auto options = opened.config ? learner::provider_options(*opened.config) : provisioner::ProviderOptions{};
  const Status booked = provisioner::book_bills(opened.ledger, options, SystemClock().unix_seconds());
  if (booked || booked.error().code != Code::kNotFound) return booked;
  return fail(Code::kNotFound, "ledger", "{}: {}", opened.folder.string(), booked.error().detail);
}

json row_json(const LedgerRow& row, double now_unix_s) {
  json prices = json::array();
  for (const auto& price : row.prices)
    prices.push_back({{"from_unix_s", price.from_unix_s}, {"usd_per_hour", price.usd_per_hour}});
  return {{"row", row.id},
          {"label", row.label},
          {"offer", row.offer},
          {"provider", row.provider},
          {"instance", row.instance},
          {"host", row.host},
          {"gpu", row.gpu},
          {"gpu_count", row.gpu_count},
          {"state", provisioner::to_string(row.state)},
          {"intended_unix_s", row.intended_unix_s},
          {"running_unix_s", json_or_null(row.running_unix_s)},
          {"ended_unix_s", json_or_null(row.ended_unix_s)},
          {"note", row.note},
          {"prices", prices},
          {"price_known", row.price_known},
          {"uploaded_bytes", row.uploaded.count},
          {"downloaded_bytes", row.downloaded.count},
          {"promised_rollouts_per_s", json_or_null(row.promised_rollouts_per_s)},
          {"measured_rollouts_per_s", json_or_null(row.measured_rollouts_per_s)},
          {"usd_rent", row.usd_rent(now_unix_s)},
          {"usd_traffic", row.usd_traffic()},
          {"usd", row.usd(now_unix_s)}};
}

Status print_instances(const Arguments& args) {
  ECHO_ASSIGN(const OpenLedger opened, open_ledger(args.run));
  const double now = SystemClock().unix_seconds();
  ECHO_ASSIGN(const auto rows, opened.ledger.rows());
  ECHO_ASSIGN(const auto states, opened.ledger.states());
  ECHO_ASSIGN(const auto decisions, opened.ledger.decisions());
  if (args.json) {
    json object = {{"instances", json::array()}, {"states", json::array()}, {"decisions", json::array()}};
    for (const LedgerRow& row : rows) object["instances"].push_back(row_json(row, now));
    for (const auto& change : states)
      object["states"].push_back({{"row", change.row},
                                  {"state", provisioner::to_string(change.state)},
                                  {"unix_s", change.unix_s},
                                  {"note", change.note}});
    for (const auto& decision : decisions)
      object["decisions"].push_back({{"unix_s", decision.unix_s},
                                     {"what", decision.what},
                                     {"why", decision.why},
                                     {"numbers", json::parse(decision.numbers, nullptr, /*allow_exceptions=*/false)}});
    print_json(object);
    return ok();
  }
  fmt::print("{:>4}  {:<8}  {:<8}  {:<22}  {:<16}  {:<12}  {:>8}  {:>9}  {}\n", "row", "state", "provider", "instance",
             "offer", "host", "$/h", "$", "note");
  for (const LedgerRow& row : rows)
    fmt::print("{:>4}  {:<8}  {:<8}  {:<22}  {:<16}  {:<12}  {:>8.4f}  {:>9.4f}  {}\n", row.id,
               provisioner::to_string(row.state), row.provider, or_dash(row.instance), row.offer, or_dash(row.host),
               row.usd_per_hour, row.usd(now), row.note);
  if (!decisions.empty()) fmt::print("\n");
  for (const auto& decision : decisions)
    fmt::print("{}  {:<10}  {}\n", utc_text(decision.unix_s), decision.what, decision.why);
  return ok();
}

Status print_costs(const Arguments& args) {
  ECHO_ASSIGN(OpenLedger opened, open_ledger(args.run));
  if (args.ask_for_charges) ECHO_TRY(store_charges(opened));
  ECHO_ASSIGN(const ChargesByRow charges, charges_by_row(opened.ledger));
  ECHO_ASSIGN(const auto credits, opened.ledger.credits());
  const double now = SystemClock().unix_seconds();
  ECHO_ASSIGN(const auto rows, opened.ledger.rows());
  ECHO_ASSIGN(const auto totals, opened.ledger.totals(now));
  double rent = 0, traffic = 0;
  for (const LedgerRow& row : rows) {
    rent += row.usd_rent(now);
    traffic += row.usd_traffic();
  }
  // For the instances that providers have charged: the providers' sum, the ledger's sum, and the last charged day.
  double usd_charged = 0, usd_counted = 0, last_day_unix_s = 0;
  for (const LedgerRow& row : rows) {
    const auto it = charges.find(row.id);
    if (it == charges.end()) continue;
    usd_charged += it->second.usd;
    usd_counted += row.usd(now);
    last_day_unix_s = std::max(last_day_unix_s, it->second.day_unix_s);
  }
  if (args.json) {
    json object = {{"usd", totals.usd},
                   {"usd_rent", rent},
                   {"usd_traffic", traffic},
                   {"usd_per_hour", totals.usd_per_hour},
                   {"prices_known", totals.prices_known},
                   {"charged", nullptr},
                   {"credits", json::object()},
                   {"instances", json::array()}};
    if (!charges.empty())
      object["charged"] = {{"usd", usd_charged}, {"usd_ours", usd_counted}, {"last_day_unix_s", last_day_unix_s}};
    for (const auto& credit : credits)
      object["credits"][credit.provider] = {{"usd", credit.usd}, {"unix_s", credit.unix_s}};
    for (const LedgerRow& row : rows) {
      json instance = row_json(row, now);
      const auto it = charges.find(row.id);
      instance["usd_charged"] = it == charges.end() ? json() : json(it->second.usd);
      object["instances"].push_back(std::move(instance));
    }
    print_json(object);
    return ok();
  }
  fmt::print("{:>4}  {:<16}  {:<19}  {:>9}  {:>8}  {:>10}\n", "row", "offer", "from (UTC)", "hours", "$/h", "$");
  for (const LedgerRow& row : rows) {
    // An instance that never ran cost nothing.
    if (row.state == provisioner::InstanceState::kFailed && !row.running_unix_s) continue;
    const double end = row.ended_unix_s.value_or(now);
    for (std::size_t i = 0; i < row.prices.size(); ++i) {
      const double from = row.prices[i].from_unix_s;
      const double until = i + 1 < row.prices.size() ? std::min(row.prices[i + 1].from_unix_s, end) : end;
      const double hours = std::max(0.0, until - from) / 3600;
      fmt::print("{:>4}  {:<16}  {:<19}  {:>9.4f}  {:>8.4f}  {:>10.4f}\n", row.id, row.offer, utc_text(from), hours,
                 row.prices[i].usd_per_hour, hours * row.prices[i].usd_per_hour);
    }
    if (row.uploaded.count + row.downloaded.count > 0)
      fmt::print("{:>4}  {:<16}  {} up, {} down{:>20.4f}\n", row.id, row.offer, to_text(row.uploaded),
                 to_text(row.downloaded), row.usd_traffic());
  }
  fmt::print("\n{} ${:.2f}: rent ${:.2f}, traffic ${:.2f}; now ${:.4f} an hour\n",
             totals.prices_known ? "total" : "at least, because some prices are unknown,", totals.usd, rent, traffic,
             totals.usd_per_hour);
  if (!charges.empty()) fmt::print("\n{:>4}  {:<16}  {:>10}  {:>10}\n", "row", "offer", "ours, $", "theirs, $");
  for (const LedgerRow& row : rows)
    if (const auto it = charges.find(row.id); it != charges.end())
      fmt::print("{:>4}  {:<16}  {:>10.4f}  {:>10.4f}\n", row.id, row.offer, row.usd(now), it->second.usd);
  if (!charges.empty())
    fmt::print(
        "for these, ${:.2f} by our count and ${:.2f} charged, up to {} (providers charge by the day, and late)\n",
        usd_counted, usd_charged, utc_text(last_day_unix_s).substr(0, std::string_view("YYYY-MM-DD").size()));
  for (const auto& credit : credits)
    fmt::print("left on the account of {}: ${:.2f}, {}\n", credit.provider, credit.usd, utc_text(credit.unix_s));
  return ok();
}

Status print_hosts(const Arguments& args) {
  std::filesystem::path folder = "runs";
  if (!args.run.empty()) {
    ECHO_ASSIGN(const std::filesystem::path run, find_run(args.run));
    folder = std::filesystem::absolute(run).parent_path();
  }
  const auto machines = provisioner::known_hosts(folder);
  if (args.json) {
    json rows = json::array();
    for (const auto& machine : machines)
      rows.push_back({{"run", machine.run},
                      {"provider", machine.provider},
                      {"host", machine.host},
                      {"gpu", machine.gpu},
                      {"gpu_count", machine.gpu_count},
                      {"promised_rollouts_per_s", json_or_null(machine.promised_rollouts_per_s)},
                      {"measured_rollouts_per_s", json_or_null(machine.measured_rollouts_per_s)},
                      {"up_mbit_per_s", machine.up ? json(machine.up->mbit_per_s()) : json()},
                      {"down_mbit_per_s", machine.down ? json(machine.down->mbit_per_s()) : json()},
                      {"unix_s", machine.unix_s},
                      {"hours", machine.hours},
                      {"lost", machine.lost}});
    print_json(rows);
    return ok();
  }
  const auto number = [](const std::optional<double>& n) {
    return n ? fmt::format("{:.3f}", *n) : std::string("unknown");
  };
  const auto rate = [](const std::optional<BitRate>& r) { return r ? to_text(*r) : std::string("unknown"); };
  fmt::print("{:<10}  {:<14}  {:<14}  {:>10}  {:>10}  {:>12}  {:>12}  {:>6}  {:<4}  {}\n", "provider", "host", "gpu",
             "promised", "measured", "up", "down", "hours", "lost", "run");
  for (const auto& machine : machines)
    fmt::print("{:<10}  {:<14}  {:<14}  {:>10}  {:>10}  {:>12}  {:>12}  {:>6.1f}  {:<4}  {}\n", machine.provider,
               machine.host, or_dash(machine.gpu), number(machine.promised_rollouts_per_s),
               number(machine.measured_rollouts_per_s), rate(machine.up), rate(machine.down), machine.hours,
               machine.lost ? "yes" : "no", machine.run);
  return ok();
}

std::size_t rentals_not_ended(const std::filesystem::path& folder) {
  const auto opened = open_ledger(folder.string());
  return opened ? opened->ledger.orphans().size() : 0;
}

// Asks the run's learner to end. The learner returns its fleet before it ends, so this waits until two minutes have
// passed without the end of a rental.
Status end_learner(const std::filesystem::path& folder) {
  const Descriptor lock(::open((folder / "lock").c_str(), O_RDWR | O_CLOEXEC));
  if (lock.get() < 0 || ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) return ok();  // a running learner holds the lock
  ECHO_ASSIGN(const json status, learner::read_json_object(folder / "status.json"));
  const json pid = status.value("pid", json());
  if (!pid.is_number_integer() || pid.get<int>() <= 1)  // kill() takes 0 and below for groups of processes
    return fail(Code::kCorrupt, "down", "{}: expected the pid of the learner", (folder / "status.json").string());
  print_stderr("asking the learner (process {}) to end\n", pid.get<int>());
  ::kill(pid.get<int>(), SIGTERM);
  constexpr auto kPollInterval = std::chrono::milliseconds(100);
  constexpr int kPolls = 1200;            // two minutes
  constexpr int kPollsBetweenReads = 50;  // the ledger is read every five seconds
  std::size_t rented = rentals_not_ended(folder);
  for (int i = 0; i < kPolls; ++i) {
    if (::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) return ok();
    if (i % kPollsBetweenReads == kPollsBetweenReads - 1) {
      const std::size_t left = rentals_not_ended(folder);
      if (left < rented) i = 0;  // the learner has ended a rental, so it gets another two minutes
      rented = left;
    }
    std::this_thread::sleep_for(kPollInterval);
  }
  return fail(Code::kUnavailable, "down",
              "the learner (process {}) has not ended; kill it, then run this command again", pid.get<int>());
}

int print_report(const Arguments& args, const provisioner::DownReport& report, const std::string& scope) {
  if (args.json) {
    json object = {{"released", json::array()}, {"problems", report.problems}};
    for (const auto& line : report.released)
      object["released"].push_back(
          {{"provider", line.provider}, {"instance", line.instance}, {"label", line.label}, {"what", line.what}});
    print_json(object);
  } else {
    for (const auto& line : report.released) fmt::print("{}  {}  {}\n", line.label, or_dash(line.instance), line.what);
    if (report.problems.empty()) fmt::print("nothing of {} is rented\n", scope);
  }
  for (const std::string& problem : report.problems) print_stderr("echoline down: {}\n", problem);
  return report.problems.empty() ? 0 : 1;
}

// Releases the instances whose label names the run, or all runs' instances. Needs no ledger.
Result<int> down_by_label(const Arguments& args) {
  provisioner::DownOptions options;
  provisioner::ProviderOptions provider_options;
  std::string run;
  if (!args.all_runs) {
    run = std::filesystem::path(args.run).filename().string();
    if (run.empty()) return fail(Code::kInvalid, "down", "expected the name of a run, found '{}'", args.run);
    if (const auto folder = find_run(args.run))
      if (const auto config = learner::load_run_config(*folder / "config.yaml")) {
        run = config->run.name;
        provider_options = learner::provider_options(*config);
        if (!config->fleet.joined_by_hand()) options.providers = {config->fleet.provider};
      }
  }
  // Without a run file that names the provider, all providers are asked that have accounts.
  if (options.providers.empty())
    for (const provisioner::ProviderKind* kind : provisioner::provider_kinds())
      if (kind->account) options.providers.push_back(kind->name);
  if (!args.key_file.empty())
    for (const std::string& name : options.providers) provider_options.services[name].key_file = args.key_file;
  options.provider = [&](const std::string& name) { return provisioner::make_provider(name, provider_options); };
  const SystemClock clock;
  const auto report = provisioner::bring_down_labelled(clock, options, run);
  return print_report(args, report, args.all_runs ? "any run" : run);
}

// Adds to the error the command that releases a run whose folder or ledger is lost.
Error with_release_advice(Error error, const std::string& run) {
  error.detail +=
      fmt::format("; `echoline down {} --by-label` releases what carries the run's label, without the ledger",
                  std::filesystem::path(run).filename().string());
  return error;
}

Result<int> down(const Arguments& args) {
  const bool has_run = !args.run.empty();
  if (args.all_runs == has_run)  // both or neither
    return fail(Code::kInvalid, "down", "expected a run, or --all-runs without one");
  if (args.all_runs || args.by_label) return down_by_label(args);
  const auto folder_or_error = find_run(args.run);
  if (!folder_or_error) return with_release_advice(folder_or_error.error(), args.run);
  const std::filesystem::path& folder = *folder_or_error;
  ECHO_TRY(end_learner(folder));
  auto opened_or_error = open_ledger(args.run);
  if (!opened_or_error && opened_or_error.error().code == Code::kNotFound)
    return with_release_advice(opened_or_error.error(), args.run);
  if (!opened_or_error) return opened_or_error.error();
  OpenLedger opened = std::move(*opened_or_error);
  provisioner::DownOptions options;
  options.absent_is_gone = args.absent_is_gone;
  provisioner::ProviderOptions provider_options;
  provider_options.log_folder = folder / "logs";
  if (opened.config) {
    provider_options = learner::provider_options(*opened.config);
    if (const auto& fleet = opened.config->fleet; !fleet.joined_by_hand()) options.providers = {fleet.provider};
  }
  options.provider = [&](const std::string& name) { return provisioner::make_provider(name, provider_options); };
  options.bill = provisioner::bill_reader(provider_options);
  SystemClock clock;
  ECHO_ASSIGN(const provisioner::DownReport report, provisioner::bring_down(opened.ledger, clock, options));
  return print_report(args, report, folder.string());
}

}  // namespace

void add_ledger(Verb& program, int& exit_code) {
  auto* ledger = program.add_verb("ledger", "Show what a run rented, what it cost, and how its machines performed");
  ledger->require_verb();
  const auto add_subcommand = [&](const char* name, const char* help_text, const char* run_help_text,
                                  Status (*show_part)(const Arguments&)) {
    auto* verb = ledger->add_verb(name, help_text);
    auto args = std::make_shared<Arguments>();
    verb->add_option("run", args->run, run_help_text);
    verb->add_flag("--json", args->json, "print JSON");
    if (show_part == print_costs)
      verb->add_flag("--charges", args->ask_for_charges,
                     "read the charges from vast.ai first and store them in the ledger");
    verb->callback([args, show_part, &exit_code] {
      const Status done = show_part(*args);
      exit_code = done ? 0 : report_error("ledger", done.error());
    });
  };
  const char* const run_help_text = "name or folder of the run; default: the newest below ./runs";
  add_subcommand("show", "Show every instance of a run and every decision about them", run_help_text, print_instances);
  add_subcommand("costs", "Show what a run cost, interval by interval", run_help_text, print_costs);
  add_subcommand("hosts", "Compare the measured with the promised performance of machines in all runs of a folder",
                 "folder or name of one of the runs; default: all below ./runs", print_hosts);
}

void add_down(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("down", "End a run and release everything it has rented");
  auto args = std::make_shared<Arguments>();
  verb->add_option("run", args->run, "name or folder of the run");
  verb->add_flag("--all-runs", args->all_runs,
                 "release the machines of all runs of the account, living ones included; needs the key and no folder");
  verb->add_flag("--by-label", args->by_label,
                 "release what carries the run's label, without its ledger: if the ledger or the folder is lost");
  verb->add_option("--key-file", args->key_file,
                   "with these two: a file of mode 600 with the key (default: VAST_API_KEY)");
  verb->add_flag("--gone", args->absent_is_gone,
                 "instances that the provider does not list count as gone, even if it lists none at all");
  verb->add_flag("--json", args->json, "print what was released and what is wrong, as JSON");
  verb->footer(
      "The command checks the result by listing the instances with the run's label. It may be repeated. Exits with 1 "
      "when something may be left.");
  verb->callback([args, &exit_code] {
    const auto done = down(*args);
    exit_code = done ? *done : report_error("down", done.error());
  });
}

}  // namespace echoline::cli
