#include "data_plane/adapters/code/episodes.hpp"

namespace echoline::data_plane {
namespace {

// Shared by an episode and its scoring job, which may outlive the episode.
struct Asked {
  std::recursive_mutex mutex;  // recursive, because the callback may destroy the episode
  bool gone = false;
};

class GradedBeside final : public Episode {
 public:
  GradedBeside(Threads& threads, std::function<Result<Score>(const std::string&)> score)
      : threads_(threads), score_(std::move(score)) {}
  ~GradedBeside() override {
    const std::lock_guard lock(asked_->mutex);  // waits for a running callback
    asked_->gone = true;
  }

  void step(std::string response, Done done) override {
    threads_.post([asked = asked_, score = score_, response = std::move(response), done = std::move(done)] {
      {
        const std::lock_guard lock(asked->mutex);
        if (asked->gone) return;
      }
      auto scored = score(response);
      const std::lock_guard lock(asked->mutex);
      if (asked->gone) return;
      if (scored)
        done(Step{std::move(*scored), true, {}});
      else
        done(std::move(scored).error());
    });
  }

 private:
  Threads& threads_;
  const std::function<Result<Score>(const std::string&)> score_;
  const std::shared_ptr<Asked> asked_ = std::make_shared<Asked>();
};

}  // namespace

Threads::~Threads() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    waiting_.clear();
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Threads::post(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    waiting_.push_back(std::move(work));
    if (threads_.size() < count_) threads_.emplace_back([this] { loop(); });
  }
  changed_.notify_one();
}

void Threads::loop() {
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
    if (closed_) return;
    const std::function<void()> work = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    work();
  }
}

std::unique_ptr<Episode> graded_beside(Threads& threads, std::function<Result<Score>(const std::string&)> score) {
  return std::make_unique<GradedBeside>(threads, std::move(score));
}

}  // namespace echoline::data_plane
