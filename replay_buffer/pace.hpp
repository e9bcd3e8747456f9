// Measures one worker's speed from its results.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>

namespace echoline::replay_buffer {

// The leases of one grant form a batch, whose results come together. Only the latest few batches count. The slowest of
// them determines the times, so that one lucky batch does not shorten the next lease. A batch without a result lowers
// groups_per_s() and does not affect the other measures.
class WorkerPace {
 public:
  // Records the end, `now`, of a lease granted at `granted_unix_s`: its result came, accepted or late, or it expired.
  // `tokens`: the length of the longest response; 0: the lease expired without a result.
  void record_result(double granted_unix_s, double now_unix_s, std::uint64_t tokens);

  std::optional<double> batch_seconds() const;                  // from grant to result
  std::uint64_t results_of_batch(double granted_unix_s) const;  // number of groups with a result
  // Seconds of a batch per token of its longest response, because all responses are generated at the same time.
  std::optional<double> seconds_per_token() const;
  std::optional<double> groups_per_s() const;  // results per second in which the worker had work

 private:
  struct Batch {
    double granted_unix_s = 0;
    double seconds = 0;
    std::uint64_t groups = 0;  // groups with a result
    std::uint64_t tokens = 0;  // length of the longest response
  };
  std::deque<Batch> batches_;  // oldest first
};

}  // namespace echoline::replay_buffer
