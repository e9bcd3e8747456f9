// Measures one worker's speed from its results.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>

namespace echoline::replay_buffer {

// The leases of one grant form a batch, whose results come together. The latest few batches count; the slowest
// determines the times, so that one lucky batch does not shorten the next lease. A batch without a result counts with
// its time, but gives no measure of the work.
class WorkerPace {
 public:
  // A result, accepted or late, for a lease granted then; `tokens`: its longest response, 0 if there was none.
  void handed_in(double granted_unix_s, double now_unix_s, std::uint64_t tokens);

  std::optional<double> batch_seconds() const;              // from grant to result
  std::uint64_t handed_in_of(double granted_unix_s) const;  // groups of that batch
  std::optional<double> seconds_per_token() const;  // of the longest response, for all rows of a batch in parallel
  std::optional<double> groups_per_s() const;       // while it had work

 private:
  struct Batch {
    double granted_unix_s = 0;
    double seconds = 0;
    std::uint64_t groups = 0;
    std::uint64_t tokens = 0;
  };
  std::deque<Batch> batches_;  // oldest first
};

}  // namespace echoline::replay_buffer
