// The reports of a worker: its vitals (counts, times and memory use, sent with each heartbeat), and progress on its
// leases. No I/O except to read the memory use. Private to worker/.
#pragma once
#include "base/process_memory.hpp"
#include "data_plane/schema.pb.h"
#include "worker/policies.hpp"

namespace echoline::worker {

class Vitals {
 public:
  static constexpr Duration kMemoryInterval = std::chrono::seconds(1);  // between two readings of memory use

  // `has_work`: the worker has work from `now` on. Time with work is reported as busy.
  void record_work(TimePoint now, bool has_work) {
    if (has_work_) busy_time_ += now - recorded_at_;
    recorded_at_ = now;
    has_work_ = has_work;
  }
  void add_generated(std::uint64_t rollouts) { rollouts_generated_ += rollouts; }
  // `read_memory` is called at most once in kMemoryInterval; tests replace it.
  schema::Vitals report(const InstallationQueue::Counts& policies, TimePoint now,
                        ProcessMemory (*read_memory)() = process_memory) {
    if (now >= next_memory_reading_) {
      memory_ = read_memory();
      next_memory_reading_ = now + kMemoryInterval;
    }
    schema::Vitals vitals;
    vitals.set_rollouts(rollouts_generated_);
    vitals.set_busy_s(seconds(busy_time_));
    vitals.set_policies(policies.installed);
    // From complete arrival to the end of the installation.
    vitals.set_install_s(seconds(policies.total_wait + policies.total_install_time));
    vitals.set_resident_bytes(memory_.resident.count);
    vitals.set_heap_bytes(memory_.heap.value_or(Bytes{}).count);  // in the message, 0 means unknown
    return vitals;
  }
  // All work is later than the clock's epoch, so it cannot take longer than the time since then.
  void check() const { ECHO_CHECK(busy_time_ <= recorded_at_.time_since_epoch(), "more work than time"); }

 private:
  TimePoint recorded_at_{};  // of the last call of record_work()
  bool has_work_ = false;    // since recorded_at_
  Duration busy_time_{};
  std::uint64_t rollouts_generated_ = 0;
  ProcessMemory memory_;
  TimePoint next_memory_reading_{};
};

// When a worker reports progress on its leases, and the number that it reports. The learner extends the leases of a
// worker that makes progress.
class Progress {
 public:
  // The interval that the learner asks for; 0: no change.
  void set_interval(Duration interval) {
    if (interval > Duration(0)) interval_ = interval;
  }
  bool is_due(TimePoint now) const { return now >= next_report_; }
  void on_reported(TimePoint now) { next_report_ = now + interval_; }
  // Returns a number that grows with the worker's progress. `is_waiting`: results are held back to keep to the
  // speed limit, or rollouts wait for the environment. The engine may then have nothing to do, so each call counts as
  // progress.
  std::uint64_t next_count(std::uint64_t engine_progress, bool is_waiting) {
    if (is_waiting) ++waiting_reports_;
    return engine_progress + waiting_reports_;
  }

 private:
  Duration interval_ = std::chrono::seconds(3);
  TimePoint next_report_{};
  std::uint64_t waiting_reports_ = 0;  // reports with `is_waiting`
};

}  // namespace echoline::worker
