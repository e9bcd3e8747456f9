// Writes a node's state file, one write at a time. Changes during a write are written after it. A failed write is
// repeated. No I/O and no clock.
#pragma once
#include <utility>

#include "base/clock.hpp"

namespace echoline::overlay {

class Saver {
 public:
  static constexpr Duration kRetryPause = std::chrono::seconds(1);  // after a write that failed

  // Returns whether the caller has to write now. If not, a write is in flight, and another one follows it.
  bool begin() {
    if (saving_) {
      changed_meanwhile_ = true;
      return false;
    }
    saving_ = true;
    return true;
  }
  void on_failed(TimePoint now) {
    saving_ = false;
    retry_at_ = now + kRetryPause;
  }
  // The write in flight succeeded. Returns whether the state has changed meanwhile and the caller must call begin()
  // again.
  bool on_succeeded() {
    saving_ = false;
    return std::exchange(changed_meanwhile_, false);
  }
  // Returns, once, whether it is time to repeat a failed write.
  bool take_retry(TimePoint now) {
    if (now < retry_at_) return false;
    retry_at_ = kNever;
    return true;
  }
  void stop() { retry_at_ = kNever; }

  bool is_saving() const { return saving_; }
  // No write is in flight, and none waits to be repeated.
  bool is_settled() const { return !saving_ && retry_at_ == kNever; }
  TimePoint next_deadline() const { return retry_at_; }

 private:
  bool saving_ = false;
  bool changed_meanwhile_ = false;  // the state has changed since the write in flight began
  TimePoint retry_at_ = kNever;
};

}  // namespace echoline::overlay
