// Runs the processes of a sweep for cli/sweep.cpp.
#include "study/sweep_runner.hpp"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/child_process.hpp"
#include "base/files.hpp"
#include "base/text.hpp"
#include "learner/run_record.hpp"

namespace echoline::study {
namespace {

constexpr std::size_t kLogBytesMax = 64u << 20;                     // of one run
constexpr Duration kPollInterval = std::chrono::milliseconds(200);  // one pass over all running processes takes so long
constexpr std::size_t kLastLineBytesShown = 300;                    // of a failed run's output

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

// A running process.
struct RunningProcess {
  const SweepCell* cell;
  const SweepRun* run;
  ChildProcess child;
  std::unique_ptr<std::FILE, CloseFile> log;
  std::filesystem::path log_path;
  TimePoint started_at{};
  std::size_t logged_bytes = 0;
  std::string last_line = {};
  std::optional<TimePoint> end_requested_at = {};
  bool timed_out = false, killed = false;
};

struct WaitingRun {
  const SweepCell* cell;
  const SweepRun* run;
};

std::string name_of(const SweepCell& cell, const SweepRun& run) {
  return fmt::format("{} seed {}", cell.name(), run.seed);
}

std::string span_text(Duration span) {
  const double span_s = seconds(span);
  if (span_s < 120) return fmt::format("{:.0f} s", span_s);
  return span_s < 7200 ? fmt::format("{:.0f} min", span_s / 60) : fmt::format("{:.1f} h", span_s / 3600);
}

// Makes the sweep's folders, and locks them against another sweep as long as the returned descriptor lives.
Result<std::unique_ptr<Descriptor>> take_lock(const std::filesystem::path& out) {
  ECHO_TRY(make_folders(out / "cells"));
  ECHO_TRY(make_folders(out / "logs"));
  auto lock = std::make_unique<Descriptor>(::open((out / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (lock->get() < 0) return os_error("lock sweep", out / "lock");
  if (::flock(lock->get(), LOCK_EX | LOCK_NB) != 0)
    return fail(Code::kUnavailable, "lock sweep",
                "another echoline sweep uses {}: wait until it ends, or choose another folder with --out",
                out.string());
  return lock;
}

class Runner {
 public:
  Runner(const SweepPlan& plan, const SweepRunnerOptions& options, const Clock& clock, const std::atomic<bool>& stop)
      : plan_(plan), options_(options), clock_(clock), stop_(stop) {}

  Result<SweepOutcomes> run() {
    ECHO_ASSIGN(const auto lock, take_lock(plan_.out));
    ECHO_TRY(write_sweep_source(plan_));
    // The first seed of all cells comes first, so that an overview exists early.
    for (std::uint32_t seed_index = 0; seed_index < plan_.seeds; ++seed_index)
      for (const SweepCell& cell : plan_.cells) {
        const SweepRun& run = cell.runs[seed_index];
        if (!outcomes_.emplace(run.digest, SweepOutcome{}).second) continue;  // equal to a run of another cell
        if (is_complete(plan_.kind, run.folder))
          outcomes_[run.digest].end = SweepEnd::kCached;
        else
          waiting_.push_back({.cell = &cell, .run = &run});
      }
    runs_to_do_ = waiting_.size();
    if (const std::size_t cached = outcomes_.size() - runs_to_do_; cached > 0)
      options_.on_message(fmt::format("{} of {} runs are complete from an earlier sweep", cached, outcomes_.size()));
    sweep_started_at_ = clock_.now();
    while (!running_.empty() || (!waiting_.empty() && !stop_)) {
      if (!stop_) ECHO_TRY(start_waiting_runs());
      poll_children();
      options_.on_status(status_text());
    }
    return std::move(outcomes_);
  }

 private:
  Status start_waiting_runs() {
    const std::size_t waiting_count = waiting_.size();
    for (std::size_t i = 0; i < waiting_count && running_.size() < options_.jobs; ++i) {
      const WaitingRun next = waiting_.front();
      waiting_.pop_front();
      if (learner::is_running(next.run->folder) && clock_.now() - sweep_started_at_ < options_.lock_wait) {
        waiting_.push_back(next);  // a process of an earlier sweep still uses the folder, so other runs start first
        continue;
      }
      ECHO_TRY(start(next));  // after lock_wait, a run whose folder is in use fails and reports why
    }
    return ok();
  }

  Status start(const WaitingRun& waiting_run) {
    const SweepRun& run = *waiting_run.run;
    ECHO_TRY(make_folders(run.folder));
    const std::filesystem::path config = run.folder / "config.yaml";
    const auto old_config = read_file(config);
    if (!old_config || *old_config != run.config) ECHO_TRY(write_file_atomic(config, run.config));
    const std::filesystem::path log_path = plan_.out / "logs" / (run.digest + ".log");
    std::unique_ptr<std::FILE, CloseFile> log(std::fopen(log_path.c_str(), "ae"));  // appends: a resumed run goes on
    if (!log) return os_error("write log", log_path);
    auto child = ChildProcess::start(command(run, config));
    if (!child) return std::move(child).error();
    outcomes_[run.digest].log = log_path;
    running_.push_back(std::make_unique<RunningProcess>(RunningProcess{.cell = waiting_run.cell,
                                                                       .run = waiting_run.run,
                                                                       .child = *std::move(child),
                                                                       .log = std::move(log),
                                                                       .log_path = log_path,
                                                                       .started_at = clock_.now()}));
    return ok();
  }

  // Returns the command of a run. Removes what an interrupted simulation has left; a real run resumes instead.
  std::vector<std::string> command(const SweepRun& run, const std::filesystem::path& config) const {
    if (plan_.kind == SweepKind::kSimulated) {
      for (const char* name : {"report.json", "metrics.jsonl", "events.jsonl"}) {
        std::error_code ignored;
        std::filesystem::remove(run.folder / name, ignored);
      }
      return {options_.program.string(), "sim", "run", config.string(), "--seed", std::to_string(run.seed), "--out",
              run.folder.string()};
    }
    std::vector<std::string> words{options_.program.string(), "up", config.string()};
    if (std::filesystem::exists(run.folder / "checkpoints" / "LATEST")) words.emplace_back("--resume");
    return words;
  }

  void poll_children() {
    if (running_.empty()) {
      std::this_thread::sleep_for(kPollInterval);
      return;
    }
    const Duration wait_per_child = kPollInterval / static_cast<int>(running_.size());
    for (auto& process : running_) {
      end_if_stopped_or_overdue(*process);
      const auto end = process->child.pump(wait_per_child, [&](const std::string& line) { log(*process, line); });
      if (!end) continue;
      finish(*process, *end);
      process.reset();
      options_.on_run_ended(outcomes_);
    }
    std::erase(running_, nullptr);
  }

  // Asks the process to end if the sweep stops or the run takes too long. Kills it after the grace period.
  void end_if_stopped_or_overdue(RunningProcess& process) {
    const TimePoint now = clock_.now();
    if (!process.end_requested_at && (stop_ || now - process.started_at >= options_.limit)) {
      process.end_requested_at = now;
      process.timed_out = !stop_;  // a run that the user stops has not failed
      process.child.signal(SIGTERM);
    }
    if (process.end_requested_at && !process.killed && now - *process.end_requested_at >= options_.grace) {
      process.killed = true;
      process.child.signal(SIGKILL);
    }
  }

  void log(RunningProcess& process, const std::string& line) {
    if (!line.empty()) process.last_line = line;
    if (process.logged_bytes > kLogBytesMax) return;
    process.logged_bytes += line.size() + 1;
    fmt::print(process.log.get(), "{}\n",
               process.logged_bytes > kLogBytesMax ? "the log is too long: the rest is left out" : line);
    std::fflush(process.log.get());
  }

  void finish(RunningProcess& process, const ProcessEnd& end) {
    SweepOutcome& outcome = outcomes_[process.run->digest];
    const std::string name = name_of(*process.cell, *process.run);
    if (is_complete(plan_.kind, process.run->folder)) {
      outcome.end = SweepEnd::kDone;
      ++runs_ended_;
      options_.on_message(
          fmt::format("[{}/{}] {}: {}", runs_ended_, runs_to_do_, name, span_text(clock_.now() - process.started_at)));
      return;
    }
    if (process.end_requested_at && !process.timed_out)
      return;  // stopped by the user: the next sweep continues the run
    ++runs_ended_;
    ++runs_failed_;
    outcome.end = SweepEnd::kFailed;
    if (process.timed_out)
      outcome.why = fmt::format("not done within {}", span_text(options_.limit));
    else if (end.signal)
      outcome.why = fmt::format("ended by signal {} ({})", *end.signal, ::strsignal(*end.signal));
    else if (*end.status == 0)  // without a signal there is an exit status
      outcome.why = "it wrote no report.json that says how it ended";
    else
      outcome.why = fmt::format("exit code {}", *end.status);
    if (!process.last_line.empty() && !process.timed_out)
      outcome.why += fmt::format(": {}", printable(process.last_line, kLastLineBytesShown));
    options_.on_message(fmt::format("[{}/{}] {}: failed: {}\n  log: {}", runs_ended_, runs_to_do_, name, outcome.why,
                                    process.log_path.string()));
  }

  // Example: "2 of 12 done, 1 failed; S=3 kappa=1 seed 7, step 12 of 40; about 5 min left".
  std::string status_text() const {
    std::string text = fmt::format("{} of {} done", runs_ended_ - runs_failed_, runs_to_do_);
    if (runs_failed_ > 0) text += fmt::format(", {} failed", runs_failed_);
    if (running_.size() == 1) {
      const RunningProcess& process = *running_.front();
      text += fmt::format("; {}", name_of(*process.cell, *process.run));
      const auto status = learner::read_json_object(process.run->folder / "status.json");
      if (status && status->value("step", nlohmann::json()).is_number_unsigned() &&
          status->value("steps", nlohmann::json()).is_number_unsigned())
        text += fmt::format(", step {} of {}", (*status)["step"].get<std::uint64_t>(),
                            (*status)["steps"].get<std::uint64_t>());
    } else if (!running_.empty()) {
      text += fmt::format("; {} at work", running_.size());
    } else if (!waiting_.empty()) {
      text += "; waiting for runs that an earlier sweep left running";
    }
    if (runs_ended_ > 0 && runs_ended_ < runs_to_do_) {
      const Duration time_per_run = (clock_.now() - sweep_started_at_) / static_cast<std::int64_t>(runs_ended_);
      text += fmt::format("; about {} left",
                          span_text(time_per_run * static_cast<std::int64_t>(runs_to_do_ - runs_ended_)));
    }
    return text;
  }

  const SweepPlan& plan_;
  const SweepRunnerOptions& options_;
  const Clock& clock_;
  const std::atomic<bool>& stop_;
  SweepOutcomes outcomes_;
  std::deque<WaitingRun> waiting_;
  std::vector<std::unique_ptr<RunningProcess>> running_;
  TimePoint sweep_started_at_{};
  // Runs that no earlier sweep has completed. runs_ended_ includes runs_failed_.
  std::size_t runs_to_do_ = 0, runs_ended_ = 0, runs_failed_ = 0;
};

}  // namespace

Result<SweepOutcomes> run_sweep(const SweepPlan& plan, const SweepRunnerOptions& options, const Clock& clock,
                                const std::atomic<bool>& stop) {
  return Runner(plan, options, clock, stop).run();
}

}  // namespace echoline::study
