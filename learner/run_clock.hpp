// The working time of all processes of a run, and the cost of the learner's machine. For a killed process, the last few
// seconds may be missing.
#pragma once
#include <condition_variable>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "base/clock.hpp"
#include "base/result.hpp"

namespace echoline::learner {

// Thread-safe. The sums are kept in usage.json of the run's folder: {"schema_version":1, "wall_seconds":...,
// "learner_usd":...}. The latter is null once the price of a process's machine was unknown.
class RunClock {
 public:
  // Starts counting; with `resume`, from the sums in usage.json. A thread of this object renews the file every few
  // seconds. `clock` must outlive it. kIo; kCorrupt for an invalid file.
  static Result<std::unique_ptr<RunClock>> open(const std::filesystem::path& folder, std::optional<double> usd_per_hour,
                                                bool resume, const Clock& clock);
  ~RunClock();

  double wall_seconds() const;                // of all processes of the run
  std::optional<double> learner_usd() const;  // of all processes; absent if a price is unknown
  Status save() const;

 private:
  RunClock(std::filesystem::path file, std::optional<double> usd_per_hour, const Clock& clock);
  void save_until_stopped();
  double seconds_of_process() const { return seconds(clock_.now() - started_); }

  const std::filesystem::path file_;
  const std::optional<double> usd_per_hour_;
  const Clock& clock_;
  const TimePoint started_;
  double seconds_before_ = 0;               // of earlier processes of the run
  std::optional<double> usd_before_ = 0.0;  // absent if a price was unknown

  mutable std::mutex save_mutex_;  // held by save(), so that an older file never replaces a newer one
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace echoline::learner
