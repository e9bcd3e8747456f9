// Measures how fast a task scores, for check_adapter().
#include "data_plane/adapters/check/speed.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>

namespace echoline::data_plane {
namespace {

constexpr std::size_t kCallsMax = 200'000;  // per half

// Asks `batch` questions at once and returns how many failed.
std::uint64_t ask_together(const Adapter& adapter, const std::vector<Question>& questions, std::size_t from,
                           std::size_t batch) {
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t left = batch;
  std::uint64_t failed = 0;
  const auto on_done = [&](bool good) {
    const std::lock_guard lock(mutex);
    failed += good ? 0 : 1;
    if (--left == 0) changed.notify_one();
  };
  std::vector<std::unique_ptr<Episode>> episodes;
  for (std::size_t i = 0; i < batch; ++i) {
    const Question& q = questions[(from + i) % questions.size()];
    auto episode = adapter.begin(q.problem, 0);
    if (!episode) {
      on_done(false);
      continue;
    }
    episodes.push_back(*std::move(episode));
    episodes.back()->step(q.response, [&on_done](Result<Step> step) { on_done(step.has_value()); });
  }
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return left == 0; });
  return failed;
}

}  // namespace

Speed measure_speed(const Adapter& adapter, const std::vector<Question>& questions, std::size_t batch, Duration time,
                    const Clock& clock) {
  Speed speed;
  std::vector<Duration> took;
  const TimePoint start = clock.now();
  while (took.size() < kCallsMax) {
    const Question& q = questions[took.size() % questions.size()];
    const TimePoint before = clock.now();
    if (!took.empty() && before - start >= time / 2) break;
    const auto episode = adapter.begin(q.problem, 0);
    if (!episode || !step_and_wait(**episode, q.response)) ++speed.failed;
    took.push_back(clock.now() - before);
  }
  std::ranges::sort(took);
  const auto us = [&](std::size_t at) { return 1e6 * seconds(took[std::min(at, took.size() - 1)]); };
  speed.calls = took.size();
  speed.median_us = us(took.size() / 2);
  speed.p99_us = us(took.size() * 99 / 100);
  speed.max_us = us(took.size() - 1);
  const double room = 4e6 * seconds(time) / std::max(speed.median_us, 1e-3);
  if (room < static_cast<double>(batch)) batch = std::max<std::size_t>(1, static_cast<std::size_t>(room));
  speed.batch = batch;
  const TimePoint second = clock.now();
  Duration together{};
  while (speed.batched < kCallsMax && (speed.batched == 0 || together < time / 2)) {
    speed.failed += ask_together(adapter, questions, speed.batched, batch);
    speed.batched += batch;
    together = clock.now() - second;
  }
  speed.per_s = static_cast<double>(speed.batched) / std::max(seconds(together), 1e-9);
  return speed;
}

}  // namespace echoline::data_plane
