// The main job as a user runs it: a fleet of processes, a policy that learns, crashes in the middle.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "provisioner/ledger.hpp"
#include "replay_buffer/buffer.hpp"
#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using std::chrono::seconds;

constexpr const char* kQuickstart = "configs/quickstart.yaml";

std::vector<std::string> up(const std::filesystem::path& folder, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments{"up", kQuickstart, "--json", "--set", "run.folder=" + folder.string()};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::uint64_t step_of(const std::filesystem::path& run) {
  const json status = json_file(run / "status.json");
  return status.is_object() ? status.value("step", std::uint64_t{0}) : 0;
}

Result<std::unique_ptr<replay_buffer::ReplayBuffer>> open_buffer(const std::filesystem::path& run) {
  replay_buffer::BufferOptions options;
  options.group_size = 8;
  options.staleness_budget = 3;
  return replay_buffer::ReplayBuffer::open(run / "replay.sqlite", options);
}

// The offer of a worker that forwards to another one, from the topology "learner -> 1 -> 4 | learner -> 2".
std::string interior_offer(const json& status) {
  const std::string topology = status.value("topology", "");
  std::string offer;
  std::uint64_t most_rollouts = 0;  // the fastest such worker, because a slow one might not be replaced
  for (const json& worker : status.at("workers")) {
    const std::string forwards = " " + std::to_string(worker.at("id").get<int>()) + " -> ";
    if (worker.at("lost").get<bool>() || topology.find(forwards) == std::string::npos) continue;
    const std::uint64_t rollouts = worker.at("rollouts");
    if (offer.empty() || rollouts > most_rollouts) offer = worker.at("offer"), most_rollouts = rollouts;
  }
  return offer;
}

// Checks that the run's ledger adds up to the totals of the report.
void expect_booked(const json& report, const std::filesystem::path& run) {
  const auto ledger = provisioner::Ledger::open(run / "ledger.sqlite", "quickstart");
  ASSERT_TRUE(ledger) << ledger.error().message();
  const auto rows = ledger->rows();
  ASSERT_TRUE(rows) << rows.error().message();
  std::uint64_t downloaded = 0, uploaded = 0;
  double usd = 0;
  for (const provisioner::LedgerRow& row : *rows) {
    EXPECT_TRUE(row.ended_unix_s.has_value()) << row.label;
    EXPECT_TRUE(row.alive_unix_s.has_value()) << row.label;
    downloaded += row.downloaded.count;
    uploaded += row.uploaded.count;
    usd += row.usd(0);
  }
  // Every worker has received at least the snapshot, and workers within a chain have forwarded it.
  EXPECT_GT(downloaded, report.at("fleet").at("workers_planned").get<std::uint64_t>() *
                            report.at("broadcast").at("snapshot_bytes").get<std::uint64_t>());
  EXPECT_GT(uploaded, 0u);
  const json& cost = report.at("cost");
  EXPECT_NEAR(cost.at("usd_fleet").get<double>(), usd, 1e-9);
  EXPECT_NEAR(cost.at("usd_learner").get<double>(), 0.35 * report.at("wall_seconds").get<double>() / 3600, 1e-6);
  EXPECT_NEAR(cost.at("usd_total").get<double>(),
              cost.at("usd_fleet").get<double>() + cost.at("usd_learner").get<double>(), 1e-9);
}

// Checks the results that every finished quickstart has.
void expect_learned(const json& report, const std::filesystem::path& run) {
  EXPECT_EQ(report.at("ended"), "completed");
  EXPECT_LE(report.at("eval").at("before").get<double>(), 0.5);
  EXPECT_GE(report.at("eval").at("after").get<double>(), 0.9);
  EXPECT_GE(report.at("eval").at("problems").get<int>(), 200);
  EXPECT_TRUE(report.at("weights").at("all_workers_identical").get<bool>());
  EXPECT_GE(report.at("weights").at("workers").get<int>(), 6);
  EXPECT_LE(report.at("staleness").at("max").get<int>(), report.at("staleness").at("budget").get<int>());
  EXPECT_GE(report.at("fleet").at("workers_planned").get<int>(), 6);
  EXPECT_GT(report.at("broadcast").at("full_bytes").get<double>(),
            report.at("broadcast").at("delta_bytes_mean").get<double>());
  EXPECT_GT(report.at("broadcast").at("t_b_seconds_median").get<double>(),
            report.at("broadcast").at("lower_bound_seconds").get<double>());
  EXPECT_GT(report.at("cost").at("usd_total").get<double>(), 0);
  // No step is missing, and none was trained with a trajectory beyond the staleness limit.
  std::uint64_t expected = 1;
  for (const json& row : json_lines(run / "metrics.jsonl")) {
    if (row.value("kind", "") != "step") continue;
    EXPECT_EQ(row.at("step").get<std::uint64_t>(), expected++);
  }
  EXPECT_EQ(expected - 1, report.at("steps_planned").get<std::uint64_t>());
}

// A Markdown page by its headings: the lines below each, up to the next one of any level.
std::map<std::string, std::string> sections_of(const std::filesystem::path& page) {
  std::map<std::string, std::string> sections;
  std::ifstream in(page);
  std::string heading;
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("#"))
      heading = line.substr(line.find(' ') + 1);
    else
      sections[heading] += line + "\n";
  return sections;
}

// Every field of `value` has its name, dotted, in backquotes on the page.
void expect_documented(const json& value, const std::string& text, const std::string& where,
                       const std::string& path = "") {
  if (value.is_array()) {
    for (const json& item : value)
      if (item.is_object()) expect_documented(item, text, where, path + "[]");
    return;
  }
  for (const auto& [key, child] : value.items()) {
    const std::string field = path.empty() ? key : path + "." + key;
    const bool names_vary = text.find("`" + path + ".<") != std::string::npos;
    if (names_vary && !path.empty()) continue;
    const bool nested = child.is_object() || (child.is_array() && !child.empty() && child[0].is_object());
    if (nested) {
      expect_documented(child, text, where, field);
    } else if (!(child.is_array() || child.is_object()) || !child.empty()) {
      EXPECT_NE(text.find("`" + field + "`"), std::string::npos) << where << " has an undocumented field " << field;
    }
  }
}

// docs/ describes every file that a run writes for other programs.
void expect_run_documented(const std::filesystem::path& run) {
  auto page = sections_of("docs/run-folder.md");
  expect_documented(json_file(run / "status.json"), page["status.json"], "status.json");
  const std::string drawn = *read_file(run / "topology.dot");
  EXPECT_NE(drawn.find("label=learner"), std::string::npos);
  EXPECT_NE(drawn.find("->"), std::string::npos) << "the fleet as it was before it was returned:\n" << drawn;
  std::set<std::string> seen;
  for (const json& row : json_lines(run / "metrics.jsonl")) {
    const std::string kind = row.at("kind");
    if (seen.insert(kind).second) expect_documented(row, page[kind] + page["metrics.jsonl"], "metrics.jsonl: " + kind);
  }
  EXPECT_TRUE(seen.contains("step") && seen.contains("broadcast") && seen.contains("evaluation"));
  std::istringstream events(page["events.jsonl"]);
  std::map<std::string, std::string> rows;  // event -> its row, and what all have
  for (std::string line; std::getline(events, line);) {
    std::istringstream names(line.substr(0, line.find('|', 2)));
    for (std::string name; names >> name;) {
      if (!name.empty() && name.back() == ',') name.pop_back();
      rows[name] += line + "`unix_s` `event`";
    }
  }
  for (const json& row : json_lines(run / "events.jsonl"))
    expect_documented(row, rows[row.at("event")], "events.jsonl: " + row.at("event").get<std::string>());
  std::string all;
  for (const auto& [heading, text] : sections_of("docs/report.md")) all += text;
  expect_documented(json_file(run / "report.json"), all, "report.json");
}

TEST(MainJob, LearnsThoughAnInteriorWorkerIsKilledHalfWay) {
  TemporaryFolder folder;
  const std::filesystem::path run = folder.path() / "quickstart";
  Program program(up(folder.path()));
  std::uint64_t steps = 0;
  ASSERT_TRUE(eventually(seconds(240), [&] {
    const json status = json_file(run / "status.json");
    if (status.is_object()) steps = status.at("steps");
    return !program.running() ||
           (steps > 0 && status.is_object() && status.at("step").get<std::uint64_t>() >= steps / 2);
  }));
  ASSERT_TRUE(program.running()) << program.wait(seconds(0)).err;
  const std::string victim = interior_offer(json_file(run / "status.json"));
  ASSERT_NE(victim, "") << json_file(run / "status.json").dump();
  const auto process_of = [&](const std::string& wanted) {
    for (const auto& [offer, process] : rented_processes(run))
      if (offer == wanted) return process;
    return pid_t{0};
  };
  // A pause costs a worker only its leases.
  const json paused = [&] {
    const json status = json_file(run / "status.json");
    for (const json& worker : status.at("workers"))
      if (worker.at("offer") != victim && !worker.at("lost").get<bool>()) return worker;
    return json();
  }();
  ASSERT_TRUE(paused.is_object());
  const pid_t sleeper = process_of(paused.at("offer"));
  ASSERT_GT(sleeper, 0);
  const auto is_away = [&] {
    const json status = json_file(run / "status.json");
    for (const json& worker : status.at("workers"))
      if (worker.at("id") == paused.at("id")) return worker.at("away").get<bool>();
    return false;
  };
  ASSERT_EQ(::kill(sleeper, SIGSTOP), 0);
  const bool went_away = eventually(seconds(60), is_away);
  ASSERT_EQ(::kill(sleeper, SIGCONT), 0);
  EXPECT_TRUE(went_away);
  EXPECT_TRUE(eventually(seconds(60), [&] { return !is_away(); }));
  EXPECT_TRUE(alive(sleeper));

  const pid_t pid = process_of(victim);
  ASSERT_GT(pid, 0);
  ASSERT_EQ(::kill(pid, SIGKILL), 0);

  const Outcome outcome = program.wait(seconds(300));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report, json_file(run / "report.json"));
  expect_learned(report, run);
  expect_booked(report, run);
  EXPECT_EQ(report.at("fleet").at("workers_lost"), 1);
  // Two slower workers may replace a fast one.
  const int replaced = report.at("fleet").at("workers_replaced");
  EXPECT_GE(replaced, 1);
  // The quickstart rents its planned workers, and replacements for the killed one.
  EXPECT_EQ(report.at("fleet").at("workers_started"), report.at("fleet").at("workers_planned").get<int>() + replaced);
  bool listed = false;
  for (const json& worker : report.at("workers"))
    if (worker.at("offer") == victim) listed = worker.at("lost").get<bool>();
  EXPECT_TRUE(listed);
  for (const json& worker : report.at("workers")) {
    if (worker.at("id") != paused.at("id")) continue;
    EXPECT_FALSE(worker.at("lost").get<bool>());
    EXPECT_GT(worker.at("rollouts"), paused.at("rollouts")) << "it went on working";
  }
  for (const auto& [offer, process] : rented_processes(run)) EXPECT_FALSE(alive(process)) << offer;

  // The same run, simulated with its measurements.
  const Outcome simulated = run_program({"sim", "run", "--like", run.string(), "--json"});
  ASSERT_EQ(simulated.status, 0) << simulated.err;
  const json like = json::parse(simulated.out), both = like.at("simulation").at("like");
  EXPECT_EQ(like.at("steps"), report.at("steps"));
  EXPECT_EQ(both.at("fleet.workers_started").at("real"), report.at("fleet").at("workers_started"));
  EXPECT_EQ(both.at("fleet.workers_started").at("simulated"), report.at("fleet").at("workers_planned"))
      << "the simulation kills no worker";
  EXPECT_GT(both.at("broadcast.t_b_seconds_median").at("simulated"), 0);
  EXPECT_NEAR(like.at("broadcast").at("delta_bytes_mean").get<double>(),
              report.at("broadcast").at("delta_bytes_mean").get<double>(),
              0.05 * report.at("broadcast").at("delta_bytes_mean").get<double>());
  EXPECT_LE(both.at("staleness.total_variation"), 1);

  // The exported model answers sums with numbers.
  const std::string model = (folder.path() / "exported").string();
  const std::vector<std::string> export_words{
      "model", "export", run.string() + "@" + std::to_string(report.at("steps").get<int>()), "-o", model, "--json"};
  const Outcome exported = run_program(export_words);
  ASSERT_EQ(exported.status, 0) << exported.err;
  EXPECT_EQ(json::parse(exported.out).at("digest"), report.at("weights").at("digest"));
  EXPECT_EQ(run_program(export_words).status, 2) << "the file was overwritten";
  const Outcome answer = run_program({"model", "generate", model, "--prompt", "12+34=", "--temperature", "0"});
  EXPECT_GE(answer.out.size(), 2u) << answer.err;
  EXPECT_EQ(answer.out.find_first_not_of("0123456789\n"), std::string::npos) << answer.out;
}

TEST(MainJob, ResumesAfterTheLearnerIsKilled) {
  TemporaryFolder folder;
  const std::filesystem::path run = folder.path() / "quickstart";
  const std::uint16_t port = free_port();
  const std::vector<std::string> shorter{"--set", "run.steps=16",
                                         "--set", "rollout.on_new_policy=finish",
                                         "--set", "learner.checkpoint_every=4",
                                         "--set", "learner.warm_start.steps_max=20",
                                         "--set", "network.port=" + std::to_string(port)};
  Program program(up(folder.path(), shorter));
  ASSERT_TRUE(eventually(seconds(120), [&] { return !program.running() || step_of(run) >= 1; }));
  // A worker from elsewhere, which outlives the learner.
  const Outcome token = run_program({"token", run.string(), "--instance", "by-hand"});
  ASSERT_EQ(token.status, 0) << token.err;
  Program outlives({"worker", "--join", "127.0.0.1:" + std::to_string(port), "--name", "by-hand", "--token",
                    token.out.substr(0, token.out.find('\n')), "--folder", (folder.path() / "by-hand").string()});
  ASSERT_TRUE(eventually(seconds(120), [&] { return !program.running() || step_of(run) >= 7; }));
  ASSERT_TRUE(program.running()) << program.wait(seconds(0)).err;
  const pid_t learner = json_file(run / "status.json").at("pid");
  ASSERT_EQ(::kill(learner, SIGKILL), 0);
  const double killed_unix_s = SystemClock().unix_seconds();
  const double wall_before = json_file(run / "usage.json").at("wall_seconds");
  EXPECT_GT(wall_before, 0);
  const Outcome crashed = program.wait(seconds(30));
  EXPECT_EQ(crashed.status, 1);
  EXPECT_NE(crashed.err.find("--resume"), std::string::npos) << crashed.err;
  for (const auto& [offer, pid] : rented_processes(run))
    EXPECT_TRUE(eventually(seconds(10), [pid = pid] { return !alive(pid); })) << offer << " outlived the learner";

  // Everything that the learner has acknowledged is on disk. (status.json may be a moment old, never ahead.)
  std::uint64_t acknowledged = 0;
  const json status = json_file(run / "status.json");
  for (const json& worker : status.at("workers")) acknowledged += worker.at("rollouts").get<std::uint64_t>();
  EXPECT_GT(acknowledged, 0u);
  std::uint64_t stored = 0;
  {
    const auto buffer = open_buffer(run);
    ASSERT_TRUE(buffer) << buffer.error().message();
    stored = (*buffer)->counts(0)->stored;
  }
  EXPECT_GE(stored, acknowledged);

  std::vector<std::string> again = shorter;
  again.emplace_back("--resume");
  const double resumed_unix_s = SystemClock().unix_seconds();
  const Outcome resumed = run_program(up(folder.path(), again), seconds(200));
  ASSERT_EQ(resumed.status, 0) << resumed.err;
  const json report = json::parse(resumed.out);
  // It found the restarted learner, which listens before it loads, and has been a full member since.
  const Outcome elsewhere = outlives.wait(seconds(30));
  EXPECT_EQ(elsewhere.status, 0) << elsewhere.err;
  bool member = false;
  for (const json& worker : report.at("workers"))
    member = member || (worker.at("offer") == "by-hand" && !worker.at("lost").get<bool>() &&
                        worker.at("rollouts").get<int>() > 0 && worker.at("version") == 16);
  EXPECT_TRUE(member) << report.at("workers").dump();
  // The totals contain the spending of the killed process until it was last seen, not until the run resumed.
  expect_booked(report, run);
  EXPECT_GT(report.at("wall_seconds").get<double>(), wall_before);
  EXPECT_GT(json_file(run / "status.json").at("usd_learner").get<double>(), 0);
  {
    const auto ledger = provisioner::Ledger::open(run / "ledger.sqlite", "quickstart");
    ASSERT_TRUE(ledger);
    std::size_t rows_of_first_process = 0;
    for (const provisioner::LedgerRow& row : *ledger->rows()) {
      if (row.intended_unix_s >= resumed_unix_s) continue;
      ++rows_of_first_process;
      EXPECT_LE(row.ended_unix_s.value(), killed_unix_s + 1) << row.label;
    }
    EXPECT_GT(rows_of_first_process, 0u);
  }
  EXPECT_EQ(report.at("ended"), "completed");
  EXPECT_EQ(report.at("steps"), 16);
  EXPECT_TRUE(report.at("weights").at("all_workers_identical").get<bool>());
  std::optional<std::uint64_t> resumed_at_step;
  int listening = 0;  // once by the first process, and again before the second has loaded anything
  for (const json& row : json_lines(run / "events.jsonl")) {
    listening += row.value("event", "") == "listening" && !resumed_at_step ? 1 : 0;
    if (row.value("event", "") == "resumed") resumed_at_step = row.at("step").get<std::uint64_t>();
  }
  EXPECT_EQ(listening, 2);
  ASSERT_TRUE(resumed_at_step.has_value());
  EXPECT_GE(*resumed_at_step, 4u);  // from a checkpoint, not from the start
  EXPECT_EQ(*resumed_at_step % 4, 0u);
  // The resumed run trained on stored rollouts: none was lost or generated a second time.
  const auto buffer = open_buffer(run);
  ASSERT_TRUE(buffer) << buffer.error().message();
  EXPECT_EQ((*buffer)->counts(16)->consumed, 16u * 2048);
  EXPECT_EQ((*buffer)->counts(16)->stored, 16u * 2048);
  std::map<std::uint64_t, int> steps;
  for (const json& row : json_lines(run / "metrics.jsonl"))
    if (row.value("kind", "") == "step") {
      ++steps[row.at("step").get<std::uint64_t>()];
      EXPECT_EQ(row.at("mixed_fraction"), 0) << "responses are finished before a new policy is installed";
    }
  EXPECT_EQ(steps.size(), 16u);
}

// One of three machines is killed and one is preempted. The run replaces both, and its ledger records it and adds up.
TEST(MainJob, KilledAndPreemptedMachinesAreReplaced) {
  TemporaryFolder folder;
  const std::filesystem::path run = folder.path() / "quickstart";
  json offers = {{"schema_version", 1}, {"offers", json::array()}};
  for (int i = 0; i < 6; ++i)
    offers["offers"].push_back({{"id", fmt::format("m{}", i)},
                                {"provider", "local"},
                                {"host", fmt::format("h{}", i)},
                                {"gpu", "L4"},
                                {"gpu_count", 1},
                                {"vram_gb", 24},
                                {"up_mbit_per_s", 100},
                                {"down_mbit_per_s", 100},
                                {"reliability", 0.99},
                                {"rollouts_per_s", 40},
                                {"rollouts_source", "profile"},
                                {"gpu_usd_per_hour", i < 3 ? 30 : 60},
                                {"storage_usd_per_hour", 0},
                                {"upload_usd_per_gb", 0},
                                {"download_usd_per_gb", 0}});
  std::ofstream(folder.path() / "offers.json") << offers;
  Program program(up(folder.path(), {"--set", "fleet.offers=" + (folder.path() / "offers.json").string(), "--set",
                                     "rollout.prompts_per_step=8", "--set", "rollout.on_new_policy=abort", "--set",
                                     "learner.warm_start.steps_max=1", "--set", "run.steps=100000"}));
  ASSERT_TRUE(eventually(seconds(120), [&] { return !program.running() || step_of(run) >= 2; }));
  ASSERT_TRUE(program.running()) << program.wait(seconds(0)).err;
  const auto machines = rented_processes(run);
  ASSERT_EQ(machines.size(), 3u);
  ASSERT_EQ(::kill(machines[0].second, SIGKILL), 0);
  ASSERT_EQ(::kill(machines[1].second, SIGTERM), 0);
  EXPECT_TRUE(eventually(seconds(120), [&] {
    const json status = json_file(run / "status.json");
    int lost = 0, working = 0;
    for (const json& worker : status.is_object() ? status.at("workers") : json::array())
      lost += worker.at("lost").get<bool>() ? 1 : 0,
          working += !worker.at("lost").get<bool>() && worker.at("rollouts") > 0 ? 1 : 0;
    return lost == 2 && working == 3;
  })) << json_file(run / "status.json").dump();
  program.signal(SIGINT);
  const Outcome outcome = program.wait(seconds(60));
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report.at("fleet").at("workers_lost"), 2);
  EXPECT_EQ(report.at("fleet").at("workers_replaced"), 2);
  EXPECT_EQ(report.at("fleet").at("workers_started"), 5);
  for (const json& row : json_lines(run / "metrics.jsonl")) EXPECT_EQ(row.value("mixed_fraction", 0.0), 0);

  const auto ledger = provisioner::Ledger::open(run / "ledger.sqlite", "quickstart");
  ASSERT_TRUE(ledger);
  double usd = 0;
  for (const provisioner::LedgerRow& row : *ledger->rows()) {
    ASSERT_TRUE(row.ended_unix_s) << row.label;
    ASSERT_FALSE(row.prices.empty()) << row.label;
    for (std::size_t i = 0; i < row.prices.size(); ++i) {
      const double to = i + 1 < row.prices.size() ? row.prices[i + 1].from_unix_s : *row.ended_unix_s;
      usd += row.prices[i].usd_per_hour * (to - row.prices[i].from_unix_s) / 3600;
    }
    const std::string why = row.offer == machines[0].first   ? "killed by signal 9"
                            : row.offer == machines[1].first ? "told to stop"
                                                             : "";
    EXPECT_NE(row.note.find(why), std::string::npos) << row.offer << ": " << row.note;
  }
  EXPECT_GT(usd, 0.01);
  EXPECT_NEAR(report.at("cost").at("usd_fleet").get<double>(), usd, 0.005);
  std::map<std::string, int> decided;
  for (const provisioner::LedgerDecision& decision : *ledger->decisions()) ++decided[decision.what];
  EXPECT_EQ(decided["planned"], 3);
  EXPECT_EQ(decided["lost"], 2);
  EXPECT_EQ(decided["replaced"], 2);
}

// A policy folder in memory that no process locks: its worker has ended and did not remove it.
std::vector<std::string> abandoned_policy_folders() {
  std::vector<std::string> abandoned;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    if (!entry.path().filename().string().starts_with("echoline-engine-")) continue;
    const Descriptor lock(::open((entry.path() / ".echoline-worker").c_str(), O_RDWR | O_CLOEXEC));
    if (lock.get() >= 0 && ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) abandoned.push_back(entry.path().filename());
  }
  return abandoned;
}

// Each worker starts a server that loads the policy from a directory in memory. Both are removed at the end. The
// directories of workers that other tests have killed are removed by this run's workers when they start.
TEST(MainJob, GeneratesWithServersOverHttp) {
  TemporaryFolder folder;
  const Outcome outcome = run_program(
      up(folder.path(), {"--set", "worker.engine=vllm", "--set",
                         std::string("worker.engine_command=") + ECHOLINE_ENGINE_PROGRAM + " vllm {model} {port}",
                         "--set", "rollout.prompts_per_step=8", "--set", "learner.warm_start.steps_max=20", "--set",
                         "run.steps=4", "--set", "fleet.workers_max=2"}),
      seconds(240));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report.at("steps"), 4);
  EXPECT_TRUE(report.at("weights").at("all_workers_identical").get<bool>());
  EXPECT_EQ(report.at("weights").at("version"), 4);
  for (const json& worker : report.at("workers")) EXPECT_GT(worker.at("rollouts").get<int>(), 0);
  for (const json& step : json_lines(folder.path() / "quickstart" / "metrics.jsonl"))
    if (step.at("kind") == "step") {
      EXPECT_LT(std::abs(step.at("behaviour_kl").get<double>()), 0.5)
          << "log-probabilities of another policy: " << step;
    }
  EXPECT_EQ(abandoned_policy_folders(), std::vector<std::string>());
}

TEST(MainJob, CtrlCWritesAReportAndLeavesNothingRunning) {
  TemporaryFolder folder;
  const std::filesystem::path run = folder.path() / "quickstart";
  Program program(up(folder.path(), {"--set", "learner.warm_start.steps_max=20"}));
  ASSERT_TRUE(eventually(seconds(120), [&] { return !program.running() || step_of(run) >= 3; }));
  ASSERT_TRUE(program.running()) << program.wait(seconds(0)).err;
  const pid_t learner = json_file(run / "status.json").at("pid");
  program.signal(SIGINT);
  const Outcome outcome = program.wait(seconds(30));
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report.at("ended"), "interrupted");
  EXPECT_GE(report.at("steps").get<int>(), 3);
  EXPECT_FALSE(alive(learner));
  for (const auto& [offer, pid] : rented_processes(run)) EXPECT_FALSE(alive(pid)) << offer;
  EXPECT_NE(outcome.err.find("go on with: echoline up configs/quickstart.yaml --set run.folder=" +
                             folder.path().string() + " --set learner.warm_start.steps_max=20 --resume"),
            std::string::npos)
      << outcome.err;
  expect_run_documented(run);
  // The resolved file is a run file that means the same from any folder.
  const std::filesystem::path here = std::filesystem::current_path();
  std::filesystem::current_path("/");
  const Outcome planned = run_program({"plan", (run / "config.yaml").string(), "--json"});
  std::filesystem::current_path(here);
  EXPECT_EQ(planned.status, 0) << planned.err;

  // A refused resume changes nothing.
  const auto contents = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(run))
      if (entry.is_regular_file()) files[entry.path().string()] = *read_file(entry.path());
    return files;
  };
  const auto resume = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"--set", "learner.warm_start.steps_max=20"});
    more.emplace_back("--resume");
    return run_program(up(folder.path(), more), seconds(200));
  };
  const auto before = contents();
  for (const auto& [setting, what] : {std::pair<std::string, std::string>{"run.seed=9", "run.seed was 7 and is 9"},
                                      {"rollout.group_size=4", "rollout.group_size was 8 and is 4"},
                                      {"learner.kl_coefficient=0.1", "reference.safetensors"}}) {
    const Outcome refused = resume({"--set", setting});
    EXPECT_EQ(refused.status, 2) << refused.err;
    EXPECT_NE(refused.err.find(what), std::string::npos) << refused.err;
    EXPECT_TRUE(contents() == before) << setting;
  }
  // A resume with changed settings reports them, with the step from which they hold.
  const auto steps = report.at("steps").get<std::uint64_t>();
  const Outcome changed =
      resume({"--set", "learner.learning_rate=0.0001", "--set", fmt::format("run.steps={}", steps + 1)});
  ASSERT_EQ(changed.status, 0) << changed.err;
  json rate_change;
  const json resumed = json::parse(changed.out);
  for (const json& change : resumed.at("settings_changed"))
    if (change.at("key") == "learner.learning_rate") rate_change = change;
  EXPECT_EQ(rate_change,
            (json{{"key", "learner.learning_rate"}, {"old", "0.0002"}, {"new", "0.0001"}, {"step", steps}}));
  bool is_recorded = false;
  for (const json& row : json_lines(run / "events.jsonl"))
    is_recorded = is_recorded || (row.at("event") == "setting_changed" && row.at("key") == "learner.learning_rate" &&
                                  row.at("step") == steps);
  EXPECT_TRUE(is_recorded);
  EXPECT_NE(read_file(run / "config.yaml")->find("learning_rate: 0.0001"), std::string::npos);
  expect_run_documented(run);
}

// There is no checkpoint yet, so the printed command does not resume.
TEST(MainJob, CtrlCInTheWarmStartPrintsACommandThatWorks) {
  TemporaryFolder folder;
  const auto warms_up = [&](Program& program) {
    return eventually(seconds(120),
                      [&] {
                        const json status = json_file(folder.path() / "quickstart/status.json");
                        return !program.running() ||
                               (status.is_object() && status.value("phase", "").starts_with("warm start: step"));
                      }) &&
           program.running();
  };
  std::vector<std::string> command{"up",    kQuickstart,
                                   "--set", "run.folder=" + folder.path().string(),
                                   "--set", "learner.warm_start.steps_max=100000",
                                   "--set", "learner.warm_start.target_accuracy=1"};
  {
    Program program(command);
    ASSERT_TRUE(warms_up(program)) << program.wait(seconds(0)).err;
    program.signal(SIGINT);
    const Outcome outcome = program.wait(seconds(60));
    EXPECT_EQ(outcome.status, 1);
    const std::string_view before = "start it again with: echoline ";
    const std::size_t at = outcome.err.find(before);
    ASSERT_NE(at, std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.err.find("--resume"), std::string::npos) << outcome.err;
    std::istringstream words(outcome.err.substr(at + before.size(), outcome.err.find('\n', at) - at - before.size()));
    std::vector<std::string> printed;
    for (std::string word; words >> word;) printed.push_back(word);
    EXPECT_EQ(printed, command);
  }
  std::filesystem::remove(folder.path() / "quickstart/status.json");
  Program again(command);
  ASSERT_TRUE(warms_up(again)) << again.wait(seconds(0)).err;
  again.signal(SIGINT);
  again.wait(seconds(60));
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "quickstart.1/report.json"));
}

// While the disk is full, the run pauses. Afterwards it goes on normally.
TEST(MainJob, AFullDiskIsWaitedForAndNoWorkerIsBlamed) {
  TemporaryFolder folder;
  const std::filesystem::path disk = folder.path() / "disk";
  std::filesystem::create_directories(disk);
  if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("none", disk.c_str(), "tmpfs", 0, "size=512m") != 0)
    GTEST_SKIP() << "this process may not mount a file system: " << std::strerror(errno);
  const std::filesystem::path run = disk / "quickstart", ballast = disk / "ballast";
  {
    Program program(up(disk, {"--set", "run.steps=12", "--set", "learner.checkpoint_every=2", "--set",
                              "learner.warm_start.steps_max=20", "--set", "rollout.lease_min=2 s", "--set",
                              "rollout.lease_first=3 s", "--set", "rollout.lease_max=3 s"}));
    ASSERT_TRUE(eventually(seconds(120), [&] { return !program.running() || step_of(run) >= 3; }));
    {
      std::ofstream fill(ballast, std::ios::binary);
      const std::string block(1 << 16, 'x');
      while (fill.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
      }
    }
    EXPECT_FALSE(eventually(seconds(10), [&] { return !program.running(); })) << program.wait(seconds(0)).err;
    std::filesystem::remove(ballast);
    const Outcome outcome = program.wait(seconds(200));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const json report = json::parse(outcome.out);
    EXPECT_EQ(report.at("ended"), "completed");
    EXPECT_EQ(report.at("steps"), 12);
    EXPECT_EQ(report.at("fleet").at("workers_lost"), 0) << outcome.err;
    EXPECT_NE(outcome.err.find("No space left on device"), std::string::npos) << outcome.err;
    bool full = false, recovered = false;
    for (const json& row : json_lines(run / "events.jsonl")) {
      EXPECT_NE(row.at("event"), "expelled") << row.dump();
      full = full || (row.at("event") == "alarm" && row.at("kind") == "disk_full");
      recovered = recovered || row.at("event") == "disk_recovered";
    }
    EXPECT_TRUE(full && recovered) << outcome.err;
    expect_run_documented(run);
    const auto buffer = open_buffer(run);
    ASSERT_TRUE(buffer) << buffer.error().message();
    EXPECT_EQ((*buffer)->counts(12)->consumed, 12u * 2048);
  }
  EXPECT_EQ(::umount(disk.c_str()), 0);
}

}  // namespace
}  // namespace echoline::testing
