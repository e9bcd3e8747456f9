// Measures how fast a task scores, for check_adapter().
#include "data_plane/adapters/check/speed.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>

namespace echoline::data_plane {
namespace {

constexpr std::size_t kCallsMax = 200'000;  // calls in each half of the measurement: one by one, and in batches

// Asks `batch` questions at once and returns how many failed.
std::uint64_t ask_concurrently(const Adapter& adapter, const std::vector<Question>& questions,
                               std::size_t first_question, std::size_t batch) {
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t steps_left = batch;
  std::uint64_t failed = 0;
  const auto on_done = [&](bool succeeded) {
    const std::lock_guard lock(mutex);
    failed += succeeded ? 0 : 1;
    if (--steps_left == 0) changed.notify_one();
  };
  std::vector<std::unique_ptr<Episode>> episodes;
  for (std::size_t i = 0; i < batch; ++i) {
    const Question& question = questions[(first_question + i) % questions.size()];
    auto episode = adapter.begin(question.problem, /*seed=*/0);
    if (!episode) {
      on_done(/*succeeded=*/false);
      continue;
    }
    episodes.push_back(*std::move(episode));
    episodes.back()->step(question.response, [&on_done](Result<Step> step) { on_done(step.has_value()); });
  }
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return steps_left == 0; });
  return failed;
}

}  // namespace

Speed measure_speed(const Adapter& adapter, const std::vector<Question>& questions, std::size_t batch, Duration time,
                    const Clock& clock) {
  Speed speed;
  std::vector<Duration> step_times;
  const TimePoint start = clock.now();
  while (step_times.size() < kCallsMax) {
    const Question& question = questions[step_times.size() % questions.size()];
    const TimePoint started_at = clock.now();
    if (!step_times.empty() && started_at - start >= time / 2) break;
    const auto episode = adapter.begin(question.problem, /*seed=*/0);
    if (!episode || !step_and_wait(**episode, question.response)) ++speed.failed;
    step_times.push_back(clock.now() - started_at);
  }
  std::ranges::sort(step_times);
  const auto us_at_rank = [&](std::size_t rank) {
    return 1e6 * seconds(step_times[std::min(rank, step_times.size() - 1)]);
  };
  speed.calls = step_times.size();
  speed.median_us = us_at_rank(step_times.size() / 2);
  speed.p99_us = us_at_rank(step_times.size() * 99 / 100);
  speed.max_us = us_at_rank(step_times.size() - 1);
  // A smaller batch if the steps, one after another, would take more than four times `time`: they may not overlap.
  const double batch_us_max = 4 * 1e6 * seconds(time);
  const double steps_in_time = batch_us_max / std::max(speed.median_us, 1e-3);
  if (steps_in_time < static_cast<double>(batch))
    batch = std::max<std::size_t>(1, static_cast<std::size_t>(steps_in_time));
  speed.batch = batch;
  const TimePoint batched_start = clock.now();
  Duration batched_time{};
  while (speed.batched < kCallsMax && (speed.batched == 0 || batched_time < time / 2)) {
    speed.failed += ask_concurrently(adapter, questions, speed.batched, batch);
    speed.batched += batch;
    batched_time = clock.now() - batched_start;
  }
  speed.per_s = static_cast<double>(speed.batched) / std::max(seconds(batched_time), 1e-9);
  return speed;
}

}  // namespace echoline::data_plane
