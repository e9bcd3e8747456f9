// How fast one worker is, from its own results.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>

namespace echoline::replay_buffer {

// The leases of one grant come back together: they are one batch. The latest few batches count, the slowest of them for
// times, so that one lucky batch does not shorten the next lease. A batch that ended without a result has taken its
// time, but does not say how long the work takes.
class WorkerPace {
 public:
  // A result, accepted or late, for a lease granted then; `tokens` is its longest response, 0 when there was none.
  void handed_in(double granted_unix_s, double now_unix_s, std::uint64_t tokens);

  std::optional<double> batch_seconds() const;              // from grant to result
  std::uint64_t handed_in_of(double granted_unix_s) const;  // groups of that batch
  std::optional<double> seconds_per_token() const;          // of the longest response, for all rows of a batch together
  std::optional<double> groups_per_s() const;               // while it had work

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
