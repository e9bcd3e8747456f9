// Implements the parts of Adapter and Episode that tasks share.
#include "data_plane/adapters/adapter.hpp"

#include <condition_variable>
#include <mutex>

#include "base/random.hpp"
#include "base/units.hpp"

namespace echoline::data_plane {
namespace {

constexpr Duration kStopCheckInterval = std::chrono::milliseconds(100);  // how often a wait checks `stop`

class OneResponseEpisode final : public QuickEpisode {
 public:
  OneResponseEpisode(const Adapter& adapter, Problem problem) : adapter_(adapter), problem_(std::move(problem)) {}
  Result<Step> step_now(std::string_view response) override {
    ECHO_ASSIGN(Score score, adapter_.score(problem_, response));
    return Step{.score = std::move(score), .done = true, .observation = {}};
  }

 private:
  const Adapter& adapter_;
  const Problem problem_;
};

}  // namespace

void add(Score& episode, const Score& step) {
  episode.reward += step.reward;
  for (const auto& [name, value] : step.components) episode.components[name] += value;
  episode.correct = step.correct;  // the last step decides
  episode.late = episode.late || step.late;
}

Result<Score> Adapter::score(const Problem& problem, std::string_view) const {
  return fail(Code::kUnavailable, "score", "'{}': a task of many turns ({}) cannot score a single response",
              problem.id(), name());
}

Result<std::unique_ptr<Episode>> Adapter::begin(const Problem& problem, std::uint64_t) const {
  return std::unique_ptr<Episode>(std::make_unique<OneResponseEpisode>(*this, problem));
}

// A side prompt asks another player for a move. In a run, the worker lets the policy answer it.
Error side_prompt_error() {
  return fail(Code::kInvalid, "task", "the policy also plays the opponent, which only the workers of a run can do");
}

Result<Step> step_and_wait(Episode& episode, std::string response, const std::atomic<bool>* stop) {
  struct Outcome {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<Result<Step>> result;
  };
  const auto outcome = std::make_shared<Outcome>();  // shared, because an abandoned episode may call back later
  episode.step(std::move(response), [outcome](Result<Step> step) {
    const std::lock_guard lock(outcome->mutex);
    outcome->result = std::move(step);
    outcome->changed.notify_one();
  });
  std::unique_lock lock(outcome->mutex);
  const auto has_result = [&] { return outcome->result.has_value(); };
  if (stop == nullptr) outcome->changed.wait(lock, has_result);  // the loop below then ends at once
  // No call notifies `changed` when `stop` becomes true, so the wait checks it at intervals.
  while (!outcome->changed.wait_for(lock, kStopCheckInterval, has_result))
    if (*stop) return fail(Code::kCancelled, "task", "the wait was cancelled");
  return *std::move(outcome->result);
}

std::uint64_t episode_seed(std::uint64_t run_seed, std::uint64_t group, std::uint32_t member) {
  // Mixes twice, so that neighbouring groups and members share no seed.
  return mix64(run_seed ^ mix64(mix64(group) + member));
}

}  // namespace echoline::data_plane
