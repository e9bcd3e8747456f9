// The state that a worker reports: vitals with its heartbeats, and signs of progress on its leases. Pure. Private to
// worker/.
#pragma once
#include "base/process_memory.hpp"
#include "data_plane/schema.pb.h"
#include "worker/policies.hpp"

namespace echoline::worker {

class Vitals {
 public:
  static constexpr Duration kMemoryEvery = std::chrono::seconds(1);  // between two readings

  // `works`: it has work from now on. Time with work counts as time spent on rollouts.
  void note(TimePoint now, bool works) {
    if (works_) busy_ += now - noted_at_;
    noted_at_ = now;
    works_ = works;
  }
  void add_generated(std::uint64_t rollouts) { generated_ += rollouts; }
  // `read`: process_memory(), called once in kMemoryEvery.
  schema::Vitals report(const Policies::Counts& policies, TimePoint now, ProcessMemory (*read)() = process_memory) {
    if (now >= memory_due_) {
      memory_ = read();
      memory_due_ = now + kMemoryEvery;
    }
    schema::Vitals vitals;
    vitals.set_rollouts(generated_);
    vitals.set_busy_s(seconds(busy_));
    vitals.set_policies(policies.installed);
    vitals.set_install_s(seconds(policies.waits + policies.times));
    vitals.set_resident_bytes(memory_.resident.count);
    vitals.set_heap_bytes(memory_.heap.value_or(Bytes{}).count);
    return vitals;
  }
  void check() const { ECHO_CHECK(busy_ <= noted_at_.time_since_epoch(), "more work than time"); }

 private:
  TimePoint noted_at_{};
  bool works_ = false;  // at noted_at_
  Duration busy_{};
  std::uint64_t generated_ = 0;
  ProcessMemory memory_;
  TimePoint memory_due_{};
};

// The learner extends the leases that a worker makes progress on.
class Progress {
 public:
  // As the learner asks for; 0: no change.
  void set_interval(Duration every) {
    if (every > Duration(0)) every_ = every;
  }
  bool is_due(TimePoint now) const { return now >= due_; }
  void on_reported(TimePoint now) { due_ = now + every_; }
  // A number that grows. `engine`: its progress. `waits`: results or tasks wait, which is progress as well.
  std::uint64_t count(std::uint64_t engine, bool waits) { return engine + (waits ? ++waits_ : waits_); }

 private:
  Duration every_ = std::chrono::seconds(3);
  TimePoint due_{};
  std::uint64_t waits_ = 0;  // reports while results or tasks waited
};

}  // namespace echoline::worker
