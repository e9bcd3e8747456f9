// How long the processes of a run have worked on it, and what the learner's machine has cost; a killed process is
// counted up to a few seconds before its end.
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

// Thread-safe. What there was is kept in usage.json of the run's folder: {"schema_version":1, "wall_seconds":...,
// "learner_usd":...}, the latter null once a process did not know the price of its machine.
class RunClock {
 public:
  // Starts counting, after what usage.json says where `resume`. The file is renewed every few seconds by a thread of
  // this object. `clock` must outlive it. kIo, or kCorrupt when the file is not what it should be.
  static Result<std::unique_ptr<RunClock>> open(const std::filesystem::path& folder, std::optional<double> usd_per_hour,
                                                bool resume, const Clock& clock);
  ~RunClock();

  double wall_seconds() const;                // of all processes of the run
  std::optional<double> learner_usd() const;  // of all processes; absent where a price is not known
  Status save() const;

 private:
  RunClock(std::filesystem::path file, std::optional<double> usd_per_hour, const Clock& clock);
  void loop();
  double seconds_here() const { return seconds(clock_.now() - started_); }

  const std::filesystem::path file_;
  const std::optional<double> usd_per_hour_;
  const Clock& clock_;
  const TimePoint started_;
  double seconds_before_ = 0;
  std::optional<double> usd_before_ = 0.0;

  mutable std::mutex saving_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace echoline::learner
