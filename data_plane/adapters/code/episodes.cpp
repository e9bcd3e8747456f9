// A thread pool, and episodes that it scores, for the task "code".
#include "data_plane/adapters/code/episodes.hpp"

namespace echoline::data_plane {
namespace {

// Shared by an episode and its scoring job, which may outlive the episode.
struct JobState {
  std::recursive_mutex mutex;  // recursive, because the callback may destroy the episode
  bool cancelled = false;
};

class GradedEpisode final : public Episode {
 public:
  GradedEpisode(ThreadPool& threads, std::function<Result<Score>(const std::string&)> score)
      : threads_(threads), score_(std::move(score)) {}
  ~GradedEpisode() override {
    const std::lock_guard lock(state_->mutex);  // waits for a running callback
    state_->cancelled = true;
  }

  void step(std::string response, StepHandler on_step) override {
    threads_.post([state = state_, score = score_, response = std::move(response), on_step = std::move(on_step)] {
      {
        const std::lock_guard lock(state->mutex);
        if (state->cancelled) return;
      }
      auto scored = score(response);
      const std::lock_guard lock(state->mutex);
      if (state->cancelled) return;
      if (scored)
        on_step(Step{.score = std::move(*scored), .done = true, .observation = {}});
      else
        on_step(std::move(scored).error());
    });
  }

 private:
  ThreadPool& threads_;
  const std::function<Result<Score>(const std::string&)> score_;
  const std::shared_ptr<JobState> state_ = std::make_shared<JobState>();
};

}  // namespace

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    waiting_.clear();
  }
  wake_threads_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::post(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    waiting_.push_back(std::move(work));
    if (threads_.size() < threads_max_) threads_.emplace_back([this] { run_jobs(); });
  }
  wake_threads_.notify_one();
}

void ThreadPool::run_jobs() {
  for (;;) {
    std::unique_lock lock(mutex_);
    wake_threads_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
    if (closed_) return;
    const std::function<void()> work = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    work();
  }
}

std::unique_ptr<Episode> make_graded_episode(ThreadPool& threads,
                                             std::function<Result<Score>(const std::string&)> score) {
  return std::make_unique<GradedEpisode>(threads, std::move(score));
}

}  // namespace echoline::data_plane
