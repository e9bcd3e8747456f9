// The records of a running learner. The service opens it, and the parts of the run write to it.
#include "learner/run_journal.hpp"

#include <thread>

#include "learner/disk_patience.hpp"
#include "learner/planning.hpp"

namespace echoline::learner {
namespace {

constexpr Duration kLockPatience = std::chrono::seconds(20);  // with a run whose last process is ending
constexpr Duration kDiskRetry = std::chrono::seconds(1);
constexpr Duration kPoll = std::chrono::milliseconds(50);  // between two looks at the request to stop

}  // namespace

Result<std::unique_ptr<RunJournal>> RunJournal::open(const RunHost& run, WhileWaiting while_waiting) {
  const bool resume = run.options.resume;
  const std::filesystem::path folder = run.config.run_folder();
  // Before the folder is moved: after a failure, the next start tries again.
  const auto release = [&] { return release_earlier(run.config, folder); };
  ECHO_ASSIGN(auto record, RunRecord::open(folder, resume, resume ? kLockPatience : Duration{}, release));
  ECHO_ASSIGN(auto run_clock, RunClock::open(record->folder(), run.config.learner.usd_per_hour, resume, run.clock));
  return std::unique_ptr<RunJournal>(
      new RunJournal(run, std::move(while_waiting), std::move(record), std::move(run_clock)));
}

RunJournal::RunJournal(const RunHost& run, WhileWaiting while_waiting, std::unique_ptr<RunRecord> record,
                       std::unique_ptr<RunClock> run_clock)
    : run_(run),
      while_waiting_(std::move(while_waiting)),
      record_(std::move(record)),
      run_clock_(std::move(run_clock)),
      status_(run.config, *record_, *run_clock_, run.clock) {}

Status RunJournal::persist(std::string_view part, const std::function<Status()>& work) {
  DiskPatience patience;
  for (;;) {
    const Status written = work();
    const bool will_retry = !written &&
                            patience.verdict_after(written.error(), run_.clock.now()) == DiskPatience::Verdict::kWait &&
                            !while_waiting_.is_pointless();
    if (!will_retry) record_->set_disk_alarm(part, step_, /*error=*/nullptr);  // it is written, or the run ends
    if (!will_retry || run_.stop) return written;
    record_->set_disk_alarm(part, step_, &written.error());
    ECHO_TRY(while_waiting_.keep_alive("waiting for the disk: " + written.error().message()));
    const TimePoint retry_at = run_.clock.now() + kDiskRetry;
    while (!run_.stop && run_.clock.now() < retry_at) std::this_thread::sleep_for(kPoll);
    disk_wait_ += kDiskRetry;
  }
}

}  // namespace echoline::learner
