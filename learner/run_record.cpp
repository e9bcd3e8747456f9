// Writes events, metrics and state into a run's folder, for all parts of the learner.
#include "learner/run_record.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "learner/row_file.hpp"

namespace echoline::learner {
namespace {

constexpr std::string_view kStepPrefix = "step-";  // of a checkpoint's name
constexpr std::size_t kLatestFileBytesMax = 4096;
constexpr const char* kLockFile = "lock";
constexpr std::chrono::milliseconds kLockPoll(50);
// The fields that a row keeps if it is too long.
const std::set<std::string, std::less<>> kFieldsOfLongRows{"unix_s",  "event",  "kind", "step",
                                                           "version", "worker", "offer"};

// Moves an earlier run of the same name aside; returns its new folder.
Result<std::filesystem::path> move_aside(const std::filesystem::path& folder) {
  for (int suffix = 1;; ++suffix) {
    std::filesystem::path target = folder;
    target += fmt::format(".{}", suffix);
    if (std::filesystem::exists(target)) continue;
    std::error_code error;
    std::filesystem::rename(folder, target, error);
    if (error) return fail(Code::kIo, "keep the earlier run", "{}: {}", folder.string(), error.message());
    return target;
  }
}

}  // namespace

std::string json_text(const nlohmann::json& value, int indent) {
  return value.dump(indent, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace);
}

std::string earlier_runs(const std::filesystem::path& folder) {
  std::string runs;
  for (int suffix = 1;; ++suffix) {
    std::filesystem::path run = folder;
    run += fmt::format(".{}", suffix);
    if (!std::filesystem::exists(run)) return runs;
    const auto latest = read_file(run / "checkpoints" / "LATEST", kLatestFileBytesMax);  // "step-000000012"
    if (!latest || !latest->starts_with(kStepPrefix)) continue;
    const long long step = std::strtoll(latest->c_str() + kStepPrefix.size(), nullptr, 10);
    runs = fmt::format("{} (step {}){}{}", run.string(), step, runs.empty() ? "" : ", ", runs);
  }
}

std::string earlier_runs_hint(const std::filesystem::path& folder) {
  const std::string earlier = earlier_runs(folder);
  if (earlier.empty()) return {};
  return fmt::format(". Earlier runs of this name have checkpoints: {}. To go on with one, give it the name {} again",
                     earlier, folder.string());
}

Result<std::unique_ptr<RunRecord>> RunRecord::open(const std::filesystem::path& folder, bool resume, Duration patience,
                                                   const std::function<Status()>& before_move) {
  std::unique_ptr<RunRecord> record(new RunRecord);
  record->folder_ = folder;
  if (resume && !std::filesystem::exists(folder / "metrics.jsonl"))
    return fail(Code::kNotFound, "resume", "{} holds no run; start it without --resume{}", folder.string(),
                earlier_runs_hint(folder));
  const auto take_lock = [&]() -> Status {
    ECHO_TRY(make_folders(folder));
    record->lock_fd_ = ::open((folder / kLockFile).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (record->lock_fd_ < 0)
      return fail(Code::kIo, "lock run", "{}: {}", (folder / kLockFile).string(), std::strerror(errno));
    // The process with the lock may end soon: if the `echoline up` that started a learner is killed, the learner still
    // finishes its step.
    const auto lock_deadline = std::chrono::steady_clock::now() + patience;
    bool is_locked = ::flock(record->lock_fd_, LOCK_EX | LOCK_NB) == 0;
    if (!is_locked && patience > Duration::zero()) log::info("waiting for the process that writes {}", folder.string());
    while (!is_locked && std::chrono::steady_clock::now() < lock_deadline) {
      std::this_thread::sleep_for(kLockPoll);
      is_locked = ::flock(record->lock_fd_, LOCK_EX | LOCK_NB) == 0;
    }
    if (!is_locked)
      return fail(Code::kUnavailable, "lock run",
                  "{} is being written by another echoline; stop it or choose another run.name", folder.string());
    return ok();
  };
  const bool has_earlier_run = std::filesystem::exists(folder / "metrics.jsonl");
  ECHO_TRY(take_lock());  // an earlier run that another process still writes is not moved away
  if (has_earlier_run && !resume) {
    if (before_move) ECHO_TRY(before_move());
    ::close(record->lock_fd_);
    record->lock_fd_ = -1;
    ECHO_ASSIGN(record->moved_to_, move_aside(folder));
    ECHO_TRY(take_lock());  // again, because the lock file moved with the earlier run
  }
  if (resume) {
    ECHO_TRY(cut_torn_row(folder / "events.jsonl"));
    ECHO_TRY(cut_torn_row(folder / "metrics.jsonl"));
    ECHO_TRY(each_row(folder / "metrics.jsonl", [&](const nlohmann::json& row) {
      record->alarms_.add_row(row);
      return ok();
    }));
  }
  for (const auto& [rows, name] :
       {std::pair(&record->events_, "events.jsonl"), std::pair(&record->metrics_, "metrics.jsonl")}) {
    rows->path = folder / name;
    rows->fd = ::open(rows->path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (rows->fd < 0) return os_error("open run", rows->path);
  }
  return record;
}

RunRecord::~RunRecord() {
  if (const Status written = write_pending_rows(); !written) log::error("rows are lost: {}", written.error().message());
  for (const Rows* rows : {&events_, &metrics_})
    if (rows->fd >= 0) ::close(rows->fd);
  if (lock_fd_ >= 0) ::close(lock_fd_);
}

Status RunRecord::Rows::write_out() {
  while (!pending.empty()) {
    const ssize_t bytes_written = ::write(fd, pending.data(), pending.size());
    if (bytes_written < 0 && errno == EINTR) continue;
    if (bytes_written < 0) return os_error("record the run", path);
    pending.erase(0, static_cast<std::size_t>(bytes_written));
  }
  if (const std::uint64_t lost_rows = std::exchange(lost, 0); lost_rows > 0)
    log::error("{}: {} rows are lost", path.string(), lost_rows);
  return ok();
}

void RunRecord::append_row(Rows& rows, nlohmann::json fields) {
  fields["unix_s"] = SystemClock().unix_seconds();
  std::string line = json_text(fields);
  if (line.size() > kRowBytesMax) {  // because readers refuse longer rows
    log::error("{}: a row of {} bytes is shortened to its main fields; the limit is {}", rows.path.string(),
               line.size(), kRowBytesMax);
    std::erase_if(fields.get_ref<nlohmann::json::object_t&>(),
                  [](const auto& field) { return !kFieldsOfLongRows.contains(field.first); });
    fields["bytes_left_out"] = line.size();
    line = json_text(fields);
  }
  line += '\n';
  const std::lock_guard lock(mutex_);
  if (rows.fd < 0) return;
  if (rows.pending.size() + line.size() > kPendingBytesMax)
    ++rows.lost;
  else
    rows.pending += line;
  (void)rows.write_out();  // write_pending_rows() reports the error
}

std::vector<std::string> RunRecord::alarms() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> kinds = alarms_.active_kinds();
  for (const auto& [part, alarm] : disk_alarms_)
    if (std::find(kinds.begin(), kinds.end(), alarm.kind) == kinds.end()) kinds.push_back(alarm.kind);
  return kinds;
}

void RunRecord::set_disk_alarm(std::string_view part, std::uint64_t step, const Error* error) {
  const TimePoint now = SystemClock().now();
  if (error == nullptr) {
    Duration lasted{};
    {
      const std::lock_guard lock(mutex_);
      const auto alarm = disk_alarms_.find(part);
      if (alarm == disk_alarms_.end()) return;
      lasted = now - alarm->second.since;
      disk_alarms_.erase(alarm);
    }
    log::info("{}: writing succeeds again after {}, and the run goes on", part, to_text(lasted));
    return append_event("disk_recovered", {{"part", part}, {"step", step}, {"seconds", seconds(lasted)}});
  }
  const bool is_full = error->code == Code::kExhausted;
  const std::string kind = is_full ? "disk_full" : "disk_failing";
  {
    const std::lock_guard lock(mutex_);
    if (!disk_alarms_.try_emplace(std::string(part), DiskAlarm{.kind = kind, .since = now}).second) return;
  }
  const char* advice = is_full ? "make room there: the run waits, no worker is blamed, and it goes on by itself"
                               : "check the disk: the run retries for a minute, then ends; continue it with --resume";
  log::error("{}: {}. Advice: {}", part, error->message(), advice);
  append_event(
      "alarm",
      {{"kind", kind}, {"step", step}, {"detail", fmt::format("{}: {}", part, error->message())}, {"advice", advice}});
}

Status RunRecord::write_pending_rows() {
  const std::lock_guard lock(mutex_);
  ECHO_TRY(events_.write_out());
  return metrics_.write_out();
}

Status RunRecord::check_folder() const {
  std::error_code ignored;
  if (std::filesystem::exists(folder_ / kLockFile, ignored)) return ok();
  return fail(Code::kIo, "run", "{} was deleted or moved during the run, so the run ends and its machines are released",
              folder_.string());
}

void RunRecord::append_event(std::string_view kind, nlohmann::json fields) {
  fields["event"] = kind;
  append_row(events_, std::move(fields));
}

void RunRecord::append_metric(std::string_view kind, nlohmann::json fields) {
  fields["kind"] = kind;
  std::vector<Alarm> new_alarms;
  {
    const std::lock_guard lock(mutex_);
    new_alarms = alarms_.add_row(fields);
  }
  for (const Alarm& alarm : new_alarms) {
    log::warn("{} at step {}: {}. Advice: {}", alarm.kind, alarm.step, alarm.detail, alarm.advice);
    append_event("alarm",
                 {{"kind", alarm.kind}, {"step", alarm.step}, {"detail", alarm.detail}, {"advice", alarm.advice}});
  }
  append_row(metrics_, std::move(fields));
}

void RunRecord::replace(std::string_view name, std::string_view content, bool& is_failing) {
  const Status written = write_file_atomic(folder_ / name, content);
  if (!written && !is_failing) log::warn("{}", written.error().message());
  is_failing = !written;
}

void RunRecord::write_status(const nlohmann::json& status) {
  replace("status.json", json_text(status), status_is_failing_);
}

void RunRecord::write_topology(const std::string& dot) { replace("topology.dot", dot, topology_is_failing_); }

Status RunRecord::write_report(const nlohmann::json& report) {
  return write_file_atomic(folder_ / "report.json", json_text(report, /*indent=*/2) + "\n");
}

bool is_running(const std::filesystem::path& folder) {
  const int fd = ::open((folder / kLockFile).c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return false;
  const bool is_held = ::flock(fd, LOCK_EX | LOCK_NB) != 0;
  ::close(fd);  // releases the lock if it was free
  return is_held;
}

Result<nlohmann::json> read_json_object(const std::filesystem::path& path) {
  ECHO_ASSIGN(const std::string text, read_file(path));
  nlohmann::json object = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return fail(Code::kCorrupt, "read run", "{}: expected a JSON object", path.string());
  return object;
}

}  // namespace echoline::learner
