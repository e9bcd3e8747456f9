// Decides how long the learner waits for its own disk. Pure.
//
// The learner waits for a full disk (kExhausted) without end: a person or another program makes room. It waits for any
// other failure of the disk (kIo, kUnavailable) up to a limit, because a single failed sync may pass. It does not wait
// for a damaged file.
#pragma once
#include "base/clock.hpp"
#include "base/result.hpp"

namespace echoline::learner {

class DiskPatience {
 public:
  static constexpr Duration kDefault = std::chrono::minutes(1);
  explicit DiskPatience(Duration limit = kDefault) : limit_(limit) {}

  enum class Verdict { kNotADiskError, kWait, kGiveUp };
  // The verdict after an attempt that failed with this error.
  Verdict verdict_after(const Error& error, TimePoint now) {
    if (error.code == Code::kCorrupt) return Verdict::kGiveUp;
    if (error.code == Code::kExhausted) {
      failing_since_ = kNever;
      return Verdict::kWait;
    }
    if (error.code != Code::kIo && error.code != Code::kUnavailable) return Verdict::kNotADiskError;
    if (failing_since_ == kNever) failing_since_ = now;
    return now - failing_since_ >= limit_ ? Verdict::kGiveUp : Verdict::kWait;
  }
  // Call after a successful attempt.
  void on_success() { failing_since_ = kNever; }

 private:
  const Duration limit_;
  TimePoint failing_since_ = kNever;  // the time of the first error in a row that is not a full disk
};

}  // namespace echoline::learner
