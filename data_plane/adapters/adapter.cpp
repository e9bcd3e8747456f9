#include "data_plane/adapters/adapter.hpp"

#include <condition_variable>
#include <mutex>

#include "base/random.hpp"

namespace echoline::data_plane {
namespace {

class OneResponse final : public QuickEpisode {
 public:
  OneResponse(const Adapter& adapter, Problem problem) : adapter_(adapter), problem_(std::move(problem)) {}
  Result<Step> take(std::string_view response) override {
    ECHO_ASSIGN(Score score, adapter_.score(problem_, response));
    return Step{std::move(score), true, {}};
  }

 private:
  const Adapter& adapter_;
  const Problem problem_;
};

}  // namespace

void add(Score& episode, const Score& step) {
  episode.reward += step.reward;
  for (const auto& [name, value] : step.components) episode.components[name] += value;
  episode.correct = step.correct;
}

Result<Score> Adapter::score(const Problem& problem, std::string_view) const {
  return fail(Code::kUnavailable, "score", "'{}': one response says nothing in a task of many turns ({})", problem.id(), name());
}

Result<std::unique_ptr<Episode>> Adapter::begin(const Problem& problem, std::uint64_t) const {
  return std::unique_ptr<Episode>(std::make_unique<OneResponse>(*this, problem));
}

Result<Step> step_and_wait(Episode& episode, std::string response) {
  std::mutex mutex;
  std::condition_variable told;
  std::optional<Result<Step>> result;
  episode.step(std::move(response), [&](Result<Step> step) {
    const std::lock_guard lock(mutex);
    result = std::move(step);
    told.notify_one();
  });
  std::unique_lock lock(mutex);
  told.wait(lock, [&] { return result.has_value(); });
  return *std::move(result);
}

std::uint64_t episode_seed(std::uint64_t run_seed, std::uint64_t group, std::uint32_t member) {
  return mix64(run_seed ^ mix64(mix64(group) + member));
}

}  // namespace echoline::data_plane
