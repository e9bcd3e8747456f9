// Real runs against the test's vast.ai, whose processes are killed or stopped at random moments while a tenth of all
// requests fail. Afterwards nothing may stay rented, and each machine must be gone within the promised time.
//
//   random_kills [--brief] [--seeds N] [--first SEED] [--jobs N] [--hang S] [--keep FOLDER]
//
// The seed decides what is killed, when, and what the user does next. A violation prints the seed and a timeline.
// docs/explanation/rented-hosts.md has the promises and the figures.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "base/random.hpp"
#include "tests/cli/fake_host.hpp"
#include "tests/cli/program.hpp"
#include "tests/cli/vast_run.hpp"
#include "tests/provisioner/vast_server.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Seconds = std::chrono::duration<double>;

constexpr double kFaults = 0.1;
constexpr auto kTick = std::chrono::milliseconds(200);
// Settings of the run file.
constexpr double kAwayMax = 5, kSilenceMax = 12, kPullTimeout = 20, kBootTimeout = 40, kHeartbeatTimeout = 3;
// The promises of docs/explanation/rented-hosts.md, in seconds. kService is what a tenth of failing requests may cost.
constexpr double kService = 60;
constexpr double kWorkerEnded = 1 + kService;                             // the supervisor runs
constexpr double kLearnerGone = kHeartbeatTimeout + kAwayMax + kService;  // supervisor and worker run
constexpr double kSilent = kSilenceMax + kService;                        // the worker is stopped, or never joined
constexpr double kExited = 10 + kService;                                 // the learner runs, the container has ended
constexpr double kFrozen = kHeartbeatTimeout + kAwayMax + kService;       // the learner runs, the container is stopped
constexpr double kNotJoined = kPullTimeout + kBootTimeout + kService;     // the learner runs
constexpr double kUnknown = 60 + kService;                                // the learner runs, and its ledger has no row

struct Options {
  int seeds = 4, jobs = 4;
  std::uint64_t first = 1;
  double hang_s = 3;
  std::string keep;
  bool brief = false;  // earlier kills, and no ledgers of killed learners, for which `down` waits a minute
};

enum class Target { kLearner, kUp, kSupervisor, kWorker, kEngine, kContainer };
constexpr const char* kTargetNames[] = {"learner", "up", "supervisor", "worker", "engine", "container"};
struct Strike {
  double at_s = 0;
  int point = -1;  // at this point of the server instead (see VastServer::at_points)
  Target target{};
  int signal = SIGKILL;
  std::uint64_t pick = 0;
};
enum class Sequel { kNothing, kRestart, kDown };
constexpr const char* kSequelNames[] = {"nothing", "restart", "down --all-runs"};

// A process that leads a session of its own.
class Session {
 public:
  Session(const std::vector<std::string>& arguments, const std::filesystem::path& folder,
          const std::filesystem::path& log)
      : log_(log) {
    std::vector<std::string> words{ECHOLINE_PROGRAM};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::setsid();
      if (::chdir(folder.c_str()) != 0) ::_exit(127);
      ::dup2(::open("/dev/null", O_RDONLY), STDIN_FILENO);
      ::dup2(::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644), STDOUT_FILENO);
      ::dup2(STDOUT_FILENO, STDERR_FILENO);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
  }
  pid_t pid() const { return pid_; }
  // The exit code once the process has ended; 128 + signal if it was killed.
  std::optional<int> status() {
    int raw = 0;
    if (!status_ && ::waitpid(pid_, &raw, WNOHANG) == pid_)
      status_ = WIFSIGNALED(raw) ? 128 + WTERMSIG(raw) : WEXITSTATUS(raw);
    return status_;
  }
  std::string output() const {
    std::ifstream in(log_);
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
  }

 private:
  pid_t pid_ = -1;
  std::optional<int> status_;
  std::filesystem::path log_;
};

// One seed.
class Trial {
 public:
  Trial(std::uint64_t seed, const Options& options, const std::filesystem::path& folder)
      : seed_(seed),
        options_(options),
        folder_(folder),
        random_(seed, 7),
        host_(server_, folder / "host", ECHOLINE_PROGRAM, kVastRolloutsPerSecond,
              [this](const std::string& line) { note(line); }) {
    server_.limit_rates(1);
    server_.fail_in_every_way(kFaults, seed, std::chrono::milliseconds(static_cast<int>(1000 * options.hang_s)));
    server_.bill_rentals();
    server_.on_log([this](const std::string& line) { note("  vast: " + line); });
    setenv("VAST_API_KEY", provisioner::VastServer::kKey, 1);
    setenv("ECHOLINE_VAST_URL", server_.url().c_str(), 1);  // for commands without a run file
    choose();
    write_run_file();
  }

  // Returns the result as JSON: violations, and the seconds that each promise took.
  json run() {
    start_up(/*resume=*/false);
    play_strikes();
    wait_s(sequel_after_s_);
    play_sequel();
    end_run();
    check_ledgers();
    check_processes();
    return {{"seed", seed_},
            {"violations", violations_},
            {"seconds", seconds_},
            {"machines", server_.rentals().size()},
            {"strikes", fired_.load()},
            {"ledger_usd", ledger_usd_},
            {"bill_usd", bill_usd_}};
  }
  std::string timeline() {
    const std::lock_guard lock(mutex_);
    return timeline_;
  }

 private:
  bool chance(double probability) { return random_.uniform() < probability; }
  double between(double low, double high) { return low + random_.uniform() * (high - low); }

  void note(const std::string& line) {
    const std::lock_guard lock(mutex_);
    timeline_ += fmt::format("{:7.2f}  {}\n", Seconds(Clock::now() - began_at_).count(), line);
  }
  void violate(const std::string& what) {
    note("VIOLATION: " + what);
    violations_.push_back(what);
  }

  void choose() {
    const double start_time = options_.brief ? 6 : 12, run_time = options_.brief ? 14 : 30;
    with_engine_ = chance(0.3);
    const std::uint64_t count = 1 + random_.below(3);
    for (std::uint64_t i = 0; i < count; ++i) {
      Strike strike;
      strike.at_s = chance(0.3) ? between(0.5, start_time) : between(start_time, run_time);
      const double number = random_.uniform();
      strike.target = number < 0.35   ? Target::kLearner
                      : number < 0.4  ? Target::kUp
                      : number < 0.55 ? Target::kSupervisor
                      : number < 0.75 ? Target::kWorker
                      : number < 0.85 ? Target::kEngine
                                      : Target::kContainer;
      if (strike.target == Target::kEngine && !with_engine_) strike.target = Target::kWorker;
      strike.signal = chance(0.7) ? SIGKILL : SIGSTOP;
      if (strike.target == Target::kLearner && strike.signal == SIGKILL && chance(0.4))
        strike.point = static_cast<int>(random_.below(8));
      strike.pick = random_.next();
      strikes_.push_back(strike);
    }
    std::sort(strikes_.begin(), strikes_.end(), [](const Strike& a, const Strike& b) { return a.at_s < b.at_s; });
    sequel_ = static_cast<Sequel>(random_.below(3));
    sequel_after_s_ = between(0, options_.brief ? 3 : 12);
    for (const Strike& strike : strikes_)
      note(fmt::format(
          "plan: {} {} at {}", strike.signal == SIGKILL ? "kill" : "stop",
          kTargetNames[static_cast<int>(strike.target)],
          strike.point >= 0 ? fmt::format("point {}", strike.point) : fmt::format("{:.1f} s", strike.at_s)));
    note(fmt::format("plan: then {} after {:.1f} s", kSequelNames[static_cast<int>(sequel_)], sequel_after_s_));
  }

  void write_run_file() {
    const auto text = [](double seconds) { return fmt::format("{} s", seconds); };
    json run = vast_run(folder_, server_.url(), 100 * seed_);
    run["network"]["heartbeat_timeout"] = text(kHeartbeatTimeout);
    run["fleet"].update({{"queue_timeout", "20 s"},
                         {"pull_timeout", text(kPullTimeout)},
                         {"boot_timeout", text(kBootTimeout)},
                         {"away_max", text(kAwayMax)},
                         {"silence_max", text(kSilenceMax)}});
    if (with_engine_)
      run["worker"] = {{"engine", "vllm"},
                       {"engine_command", ECHOLINE_ENGINE_PROGRAM " vllm {model} {port}"},
                       {"engine_patience", "20 s"}};
    write_json(folder_ / "run.yaml", run);
  }

  std::filesystem::path run_folder() const { return folder_ / "runs" / "night"; }

  void start_up(bool resume) {
    std::vector<std::string> words{"up", (folder_ / "run.yaml").string(), "--json"};
    if (resume) words.emplace_back("--resume");
    note(resume ? "up --resume" : "up");
    up_.emplace(words, folder_, folder_ / fmt::format("up-{}.log", ++ups_));
    up_sessions_.push_back(up_->pid());
    up_began_at_ = Clock::now();
  }

  // The learner is the child of `up`. It survives `up` only for a moment.
  std::optional<ProcessState> learner() const {
    for (const ProcessState& process : processes_)
      if (up_ && process.session == up_->pid() && process.pid != up_->pid()) return process;
    return std::nullopt;
  }
  bool learner_runs() const {
    const auto process = learner();
    return process && !process->is_stopped();
  }

  std::int64_t count_rented() const { return static_cast<std::int64_t>(server_.rented().size()); }

  // One look at all processes; checks the promises.
  void tick() {
    std::this_thread::sleep_for(kTick);
    processes_ = read_processes();
    host_.update(processes_);
    if (up_) up_->status();
    check_promises();
  }
  void wait_s(double seconds) {
    const Time end = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
    while (Clock::now() < end) tick();
  }
  bool wait_until(double limit_s, const std::function<bool()>& condition) {
    const Time end = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(limit_s));
    while (!condition()) {
      if (Clock::now() >= end) return false;
      tick();
    }
    return true;
  }

  // Since when each net has had to end each instance. An instance that stays longer than promised is a violation.
  void check_promises() {
    const Time now = Clock::now();
    const auto rented = server_.rented();
    std::set<std::int64_t> disowned;
    for (const auto& rental : server_.rentals())
      if (rental.disowned) disowned.insert(rental.instance);
    const bool has_learner = learner_runs();
    std::set<std::pair<std::int64_t, std::string>> due;
    for (const auto& entry : host_.containers()) {
      const std::int64_t id = entry.first;
      const Container& container = entry.second;
      const bool is_rented = rented.contains(id);
      const bool guarded = container.supervisor && !container.supervisor->is_stopped();
      const bool works = container.worker && !container.worker->is_stopped();
      const auto must = [&](const char* promise, double limit_s, bool holds) {
        const auto key = std::pair(id, std::string(promise));
        if (!holds) return;
        due.insert(key);
        const auto since = since_.try_emplace(key, now).first->second;
        if (Seconds(now - since).count() > limit_s && late_.insert(key).second)
          violate(fmt::format("{} ({}) is rented {:.0f} s after: {}", id, container.label, limit_s, promise));
      };
      if (is_rented) {
        const bool runs = container.runs();
        must("its worker has ended", kWorkerEnded, runs && guarded && container.had_worker && !container.worker);
        must("its worker was stopped", kSilent, runs && guarded && container.worker && !works);
        must("its learner is gone", kLearnerGone, runs && guarded && works && container.had_joined && !has_learner);
        must("its learner is gone, and it never joined", kSilent,
             runs && guarded && works && !container.had_joined && !has_learner);
        must("its container has exited", kExited, has_learner && container.has_exited);
        must("its container was stopped", kFrozen,
             has_learner && runs && container.had_joined && container.supervisor && !guarded && !works);
        must("its worker has not joined", kNotJoined, has_learner && !container.had_joined && !container.has_exited);
        must("the service disowned it", kUnknown, has_learner && disowned.contains(id));
        continue;
      }
      // It is gone: the promise that was due longest has been kept, or was late.
      for (auto it = since_.begin(); it != since_.end();) {
        if (it->first.first != id) {
          ++it;
          continue;
        }
        seconds_[it->first.second].push_back(Seconds(now - it->second).count());
        it = since_.erase(it);
      }
    }
    for (auto it = since_.begin(); it != since_.end();) it = due.contains(it->first) ? std::next(it) : since_.erase(it);
  }

  // ---- kills ----

  void play_strikes() {
    if (wait_until(3, [this] { return up_->status().has_value(); }))
      violate(fmt::format("`up` ended with {} at once: {}", *up_->status(), up_->output()));
    for (const Strike& strike : strikes_)
      if (strike.point >= 0)
        server_.at_points([this, point = strike.point](int at) {
          if (at != point) return;
          const json status = json_file(run_folder() / "status.json");
          if (!status.is_object()) return;
          note(fmt::format("kill learner at point {}", at));
          ::kill(status.at("pid").get<pid_t>(), SIGKILL);
          ++fired_;
        });
    for (const Strike& strike : strikes_) {
      if (strike.point >= 0) continue;
      wait_until(strike.at_s - Seconds(Clock::now() - began_at_).count(),
                 [this] { return !learner() && count_rented() == 0; });
      constexpr double kTargetWait = 10;  // for a process that does not run yet
      bool is_struck = false;
      wait_until(kTargetWait, [&] { return (is_struck = strike_now(strike)) || (!learner() && count_rented() == 0); });
      if (!is_struck) note(fmt::format("no {} to strike", kTargetNames[static_cast<int>(strike.target)]));
    }
    constexpr double kPointWait = 25;
    const bool has_point = std::any_of(strikes_.begin(), strikes_.end(), [](const Strike& s) { return s.point >= 0; });
    if (has_point) wait_until(options_.brief ? 1 : kPointWait, [&] { return !learner(); });
    server_.at_points({});
  }

  bool strike_now(const Strike& strike) {
    std::vector<pid_t> victims;
    std::string name = kTargetNames[static_cast<int>(strike.target)];
    if (strike.target == Target::kLearner) {
      if (const auto process = learner()) victims.push_back(process->pid);
    } else if (strike.target == Target::kUp) {
      if (up_ && !up_->status()) victims.push_back(up_->pid());
    } else {
      std::vector<const Container*> running;
      for (const auto& [id, container] : host_.containers())
        if (container.runs() && container.worker && (strike.target != Target::kEngine || container.engine))
          running.push_back(&container);
      if (running.empty()) return false;
      const Container& chosen = *running[strike.pick % running.size()];
      name += fmt::format(" of {}", chosen.id);
      if (strike.target == Target::kSupervisor) victims.push_back(chosen.supervisor->pid);
      if (strike.target == Target::kWorker) victims.push_back(chosen.worker->pid);
      if (strike.target == Target::kEngine) victims.push_back(chosen.engine->pid);
      if (strike.target == Target::kContainer)
        for (const ProcessState& process : processes_)
          if (process.session == chosen.session) victims.push_back(process.pid);
    }
    for (const pid_t pid : victims) ::kill(pid, strike.signal);
    if (victims.empty()) return false;
    note(fmt::format("{} {}", strike.signal == SIGKILL ? "kill" : "stop", name));
    ++fired_;
    return true;
  }

  // ---- what the user does ----

  bool is_settled() {
    if (!learner_runs()) return !has_net();
    if (count_rented() == 0) return false;
    for (const auto& [id, container] : host_.containers())
      if (!container.is_destroyed && !(container.runs() && container.had_joined && container.supervisor &&
                                       container.worker && !container.worker->is_stopped()))
        return false;
    return true;
  }
  // Whether some net will still end a rented machine without the user.
  bool has_net() {
    const auto rented = server_.rented();
    if (learner_runs()) return !rented.empty();
    for (const auto& [id, container] : host_.containers())
      if (rented.contains(id) && !container.has_exited && !(container.supervisor && container.supervisor->is_stopped()))
        return true;
    return false;
  }

  void continue_learner() {
    if (const auto process = learner(); process && process->is_stopped()) {
      note("continue learner");
      ::kill(process->pid, SIGCONT);
    }
    if (up_ && !up_->status()) ::kill(up_->pid(), SIGCONT);
  }

  void play_sequel() {
    note(fmt::format("sequel: {}", kSequelNames[static_cast<int>(sequel_)]));
    constexpr double kSettleMax = 150;
    if (sequel_ == Sequel::kNothing) {
      wait_until(kSettleMax, [this] { return is_settled(); });
    } else if (sequel_ == Sequel::kDown) {
      release_all();
    } else {
      if (learner()) {  // stopped, or never hit: killed now
        note("kill learner, to restart it");
        ::kill(learner()->pid, SIGKILL);
      }
      restart();
    }
  }

  void restart() {
    if (up_ && !up_->status()) ::kill(up_->pid(), SIGCONT);
    if (!wait_until(30, [this] { return up_->status().has_value() && !learner(); }))
      return violate("`up` did not end after its learner was killed");
    check_session(up_->pid());
    const bool can_resume = std::filesystem::exists(run_folder() / "checkpoints");
    const bool resume = can_resume && chance(0.6);
    start_up(resume);
    const auto is_training = [this] {
      const json status = json_file(run_folder() / "status.json");
      return status.is_object() && status.value("phase", "") == "training" && learner() &&
             status.value("pid", 0) == learner()->pid;
    };
    wait_until(120, [&] { return up_->status().has_value() || is_training(); });
    wait_s(5);
    if (up_->status()) violate(fmt::format("the restarted `up` ended with {}: {}", *up_->status(), up_->output()));
  }

  // `down --all-runs` in another folder, with only the key.
  void release_all() {
    const std::filesystem::path elsewhere = folder_ / "elsewhere";
    std::filesystem::create_directories(elsewhere);
    const auto before = server_.rented();
    note(fmt::format("down --all-runs, with {} machines rented", before.size()));
    const Time began_at = Clock::now();
    for (int attempt = 0;; ++attempt) {
      Session down({"down", "--all-runs"}, elsewhere, folder_ / fmt::format("down-{}.log", ++downs_));
      if (!wait_until(240, [&] { return down.status().has_value(); })) {
        ::kill(down.pid(), SIGKILL);
        return violate("`down --all-runs` did not end within 240 s");
      }
      note(fmt::format("down ended with {}: {}", *down.status(), down.output()));
      if (*down.status() == 0) break;
      if (attempt == 2) return violate("`down --all-runs` failed three times: " + down.output());
    }
    seconds_["down --all-runs"].push_back(Seconds(Clock::now() - began_at).count());
    const auto after = server_.rented();
    for (const auto& [id, instance] : before)
      if (after.contains(id)) violate(fmt::format("{} is rented after `down --all-runs`", id));
    if (!learner() && !after.empty()) violate("machines are rented after `down --all-runs`, and no learner lives");
  }

  // Ends a living run as with Ctrl-C; releases what no net can reach.
  void end_run() {
    continue_learner();
    wait_s(1);
    if (learner() && up_ && !up_->status()) {
      note("interrupt `up`");
      const Time began_at = Clock::now();
      ::kill(up_->pid(), SIGINT);
      constexpr double kEndMax = 330;
      if (!wait_until(kEndMax, [this] { return up_->status().has_value() && !learner(); })) {
        violate(fmt::format("the run did not end within {:.0f} s: {}", kEndMax, up_->output()));
        signal_session(up_->pid(), SIGKILL);
      } else {
        seconds_["end of the run"].push_back(Seconds(Clock::now() - began_at).count());
        const json report = json_file(run_folder() / "report.json");
        note(fmt::format("`up` ended with {}", *up_->status()));
        if (!report.is_object() || !report.contains("ended"))
          violate("the run ended without a report: " + up_->output());
        else if (const json& left = report.at("fleet").at("unreturned"); !left.empty())
          note("unreturned: " + left.dump());
        else if (count_rented() > 0)
          violate(fmt::format("{} machines are rented after a run that reports none", count_rented()));
      }
    }
    // A learner whose `up` was killed ends in order.
    if (!wait_until(60, [this] { return !learner(); })) violate("the learner outlives its `up`");
    const Time since = Clock::now();
    wait_until(kLearnerGone + kSilent, [this] { return !has_net(); });
    if (count_rented() > 0) {
      note(fmt::format("{} machines have no net but `down`, after {:.0f} s", count_rented(),
                       Seconds(Clock::now() - since).count()));
      release_all();
    }
    if (count_rented() > 0) violate(fmt::format("{} machines are leaked", count_rented()));
    tick();
  }

  // Every rental is in a ledger, ledgers and bill agree.
  void check_ledgers() {
    server_.fail_randomly(0, 1);
    std::map<std::string, double> own_usd, charged;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "runs", ignored)) {
      if (!std::filesystem::exists(entry.path() / "ledger.sqlite")) continue;
      const json status = json_file(entry.path() / "status.json");
      const bool was_killed = !status.is_object() || status.value("phase", "") != "interrupted";
      if (options_.brief && was_killed) {
        knows_all_ledgers_ = false;
        continue;
      }
      const std::string run = entry.path();
      const Outcome down = run_program({"down", run, "--gone"}, std::chrono::seconds(180));
      if (down.status != 0) violate(fmt::format("down {}: {}{}", run, down.out, down.err));
      const Outcome costs = run_program({"ledger", "costs", run, "--charges", "--json"});
      const json object = json::parse(costs.out, nullptr, false);
      if (!object.is_object() || !object.contains("instances")) {
        if (costs.err.find("has rented nothing from") == std::string::npos)
          violate(fmt::format("ledger costs {}: {}{}", run, costs.out, costs.err));
        continue;
      }
      for (const json& row : object.at("instances")) {
        if (row.at("ended_unix_s").is_null()) violate("an open row: " + row.dump());
        const std::string instance = row.at("instance");
        if (instance.empty()) continue;
        if (own_usd.contains(instance)) violate("two rows: " + row.dump());
        own_usd[instance] = row.at("usd");
        if (row.at("usd_charged").is_number()) charged[instance] = row.at("usd_charged");
        notes_[instance] = row.at("note");
      }
    }
    for (const auto& rental : server_.rentals()) {
      const std::string instance = fmt::format("vast:{}", rental.instance);
      const double usd = rental.usd(0);
      bill_usd_ += usd;
      if (!own_usd.contains(instance) && !knows_all_ledgers_) continue;
      if (!own_usd.contains(instance)) {
        // Ended by its host, or by `down --all-runs`, before the learner knew its number.
        note(fmt::format("no ledger has {} ({}), which cost {:.1f} s", instance, rental.label,
                         rental.end - rental.begin));
        ++unknown_rentals_;
        continue;
      }
      ledger_usd_ += own_usd[instance];
      if (std::abs(charged[instance] - usd) > 1e-6)
        violate(
            fmt::format("{}: the bill has ${:.6f}, the ledger shows ${:.6f} of it", instance, usd, charged[instance]));
      const double missing_s = (usd - own_usd[instance]) / rental.usd_per_hour * 3600;
      note(fmt::format("{}: {:.1f} s rented, the ledger has {:+.1f} s ({})", instance, rental.end - rental.begin,
                       -missing_s, notes_[instance]));
      seconds_[missing_s > 0 ? "ledger below the bill" : "ledger above the bill"].push_back(std::abs(missing_s));
    }
    seconds_["rentals in no ledger"].push_back(unknown_rentals_);
  }

  void check_session(pid_t session) {
    for (const ProcessState& process : read_processes())
      if (process.session == session)
        violate(fmt::format("process {} of a run is left ({})", process.pid, process.state));
  }
  void check_processes() {
    for (const pid_t session : up_sessions_) check_session(session);
    for (const pid_t session : up_sessions_) signal_session(session, SIGKILL);
  }

  const std::uint64_t seed_;
  const Options& options_;
  const std::filesystem::path folder_;
  const Time began_at_ = Clock::now();
  Random random_;
  std::mutex mutex_;  // of timeline_
  std::string timeline_;
  provisioner::VastServer server_;
  FakeHost host_;
  std::vector<ProcessState> processes_;
  std::vector<Strike> strikes_;
  Sequel sequel_{};
  double sequel_after_s_ = 0;
  bool with_engine_ = false;
  bool knows_all_ledgers_ = true;
  std::optional<Session> up_;
  std::vector<pid_t> up_sessions_;
  Time up_began_at_{};
  int ups_ = 0, downs_ = 0, unknown_rentals_ = 0;
  std::atomic<int> fired_ = 0;
  std::map<std::pair<std::int64_t, std::string>, Time> since_;
  std::set<std::pair<std::int64_t, std::string>> late_;
  std::map<std::string, std::vector<double>> seconds_;
  std::map<std::string, std::string> notes_;
  std::vector<std::string> violations_;
  double ledger_usd_ = 0, bill_usd_ = 0;
};

// Runs a seed in this process; writes result.json and the timeline.
void run_seed(std::uint64_t seed, const Options& options, const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  Trial trial(seed, options, folder);
  const json result = trial.run();
  std::ofstream(folder / "timeline") << trial.timeline();
  std::ofstream(folder / "result.json") << result.dump(1);
}

double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values.at(std::min(values.size() - 1, static_cast<std::size_t>(share * static_cast<double>(values.size()))));
}

int run_all(const Options& options) {
  std::optional<TemporaryFolder> holder;
  if (options.keep.empty()) holder.emplace();
  const std::filesystem::path folder = options.keep.empty() ? holder->path() : std::filesystem::absolute(options.keep);
  std::map<pid_t, std::uint64_t> running;
  int next = 0, violations = 0, machines = 0, strikes = 0;
  std::map<std::string, std::vector<double>> seconds;
  double ledger_usd = 0, bill_usd = 0;
  while (next < options.seeds || !running.empty()) {
    if (next < options.seeds && static_cast<int>(running.size()) < options.jobs) {
      const std::uint64_t seed = options.first + static_cast<std::uint64_t>(next++);
      std::fflush(nullptr);
      const pid_t child = ::fork();
      if (child == 0) {
        run_seed(seed, options, folder / std::to_string(seed));
        std::fflush(nullptr);
        ::_exit(0);
      }
      running[child] = seed;
      continue;
    }
    int raw = 0;
    const pid_t ended = ::waitpid(-1, &raw, 0);
    const auto it = running.find(ended);
    if (it == running.end()) continue;
    const std::filesystem::path trial = folder / std::to_string(it->second);
    const json result = json_file(trial / "result.json");
    if (raw != 0 || !result.is_object() || !result.at("violations").empty()) {
      ++violations;
      std::ifstream in(trial / "timeline");
      std::stringstream timeline;
      timeline << in.rdbuf();
      std::printf("seed %llu: %s\n%s\n", static_cast<unsigned long long>(it->second),
                  result.is_object() ? result.at("violations").dump(1).c_str() : "the test program itself failed",
                  timeline.str().c_str());
    }
    if (result.is_object()) {
      for (const auto& [promise, values] : result.at("seconds").items())
        for (const json& value : values) seconds[promise].push_back(value);
      machines += result.at("machines").get<int>();
      strikes += result.at("strikes").get<int>();
      ledger_usd += result.at("ledger_usd").get<double>();
      bill_usd += result.at("bill_usd").get<double>();
    }
    std::fflush(stdout);
    running.erase(it);
  }
  std::printf("%d seeds, %d kills and stops, %d machines rented, %d seeds with a violation\n", options.seeds, strikes,
              machines, violations);
  std::printf("ledgers $%.4f, bill $%.4f\n", ledger_usd, bill_usd);
  for (const auto& [promise, values] : seconds)
    std::printf("| %s | %zu | %.1f | %.1f | %.1f |\n", promise.c_str(), values.size(), quantile(values, 0.5),
                quantile(values, 0.95), quantile(values, 1));
  return violations > 0 ? 1 : 0;
}

}  // namespace
}  // namespace echoline::testing

int main(int argc, char** argv) {
  using namespace echoline::testing;
  ::signal(SIGPIPE, SIG_IGN);
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> const char* {
      if (++i < argc) return argv[i];
      std::fprintf(stderr, "random_kills: %s needs a value\n", name.c_str());
      std::exit(2);
    };
    if (name == "--brief")
      options.brief = true;
    else if (name == "--seeds")
      options.seeds = std::atoi(value());
    else if (name == "--first")
      options.first = std::strtoull(value(), nullptr, 10);
    else if (name == "--jobs")
      options.jobs = std::atoi(value());
    else if (name == "--hang")
      options.hang_s = std::atof(value());
    else if (name == "--keep")
      options.keep = value();
    else {
      std::fprintf(stderr,
                   "usage: random_kills [--brief] [--seeds N] [--first SEED] [--jobs N] [--hang S] [--keep FOLDER]\n");
      return 2;
    }
  }
  return run_all(options);
}
