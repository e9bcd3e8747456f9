// The speed of one worker, for LeaseCore and FleetPaces.
#include "replay_buffer/pace.hpp"

#include <algorithm>

namespace echoline::replay_buffer {
namespace {

constexpr std::size_t kBatchesMax = 8;     // the latest batches, which determine the pace
constexpr double kBatchSecondsMin = 1e-6;  // keeps the rates finite

}  // namespace

void WorkerPace::record_result(double granted_unix_s, double now_unix_s, std::uint64_t tokens) {
  auto batch = std::find_if(batches_.begin(), batches_.end(),
                            [&](const Batch& earlier) { return earlier.granted_unix_s == granted_unix_s; });
  if (batch == batches_.end()) {
    if (batches_.size() == kBatchesMax) batches_.pop_front();
    batch = batches_.insert(batches_.end(), Batch{.granted_unix_s = granted_unix_s});
  }
  batch->seconds = std::max({batch->seconds, now_unix_s - granted_unix_s, kBatchSecondsMin});
  batch->groups += tokens > 0 ? 1 : 0;
  batch->tokens = std::max(batch->tokens, tokens);
}

std::optional<double> WorkerPace::batch_seconds() const {
  std::optional<double> slowest;
  for (const Batch& batch : batches_)
    if (batch.groups > 0) slowest = std::max(slowest.value_or(0), batch.seconds);
  return slowest;
}

std::uint64_t WorkerPace::results_of_batch(double granted_unix_s) const {
  for (const Batch& batch : batches_)
    if (batch.granted_unix_s == granted_unix_s) return batch.groups;
  return 0;
}

std::optional<double> WorkerPace::seconds_per_token() const {
  std::optional<double> slowest;
  for (const Batch& batch : batches_)
    if (batch.tokens > 0) slowest = std::max(slowest.value_or(0), batch.seconds / static_cast<double>(batch.tokens));
  return slowest;
}

std::optional<double> WorkerPace::groups_per_s() const {
  double seconds = 0, groups = 0;
  for (const Batch& batch : batches_) {
    seconds += batch.seconds;
    groups += static_cast<double>(batch.groups);
  }
  if (batches_.empty()) return std::nullopt;
  return groups / seconds;
}

}  // namespace echoline::replay_buffer
