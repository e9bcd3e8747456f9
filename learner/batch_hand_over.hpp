// Where the training thread waits for the batch of a step, and the desk's thread hands it over. Private to learner/.
#pragma once
#include <condition_variable>
#include <mutex>
#include <optional>

#include "base/units.hpp"
#include "replay_buffer/buffer.hpp"

namespace echoline::learner {

// Thread-safe; one thread waits at a time.
class BatchHandOver {
 public:
  using Answer = Result<std::optional<replay_buffer::Batch>>;

  // Asks for the batch of a step; wait() follows.
  void ask(std::uint64_t step) {
    const std::lock_guard lock(mutex_);
    wanted_ = Wanted{.step = step};
  }
  // The answer to ask(); nothing when `patience` is over or stop() was called.
  Answer wait(Duration patience) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, patience, [this] { return stopped_ || wanted_->answered; });
    Answer answer = std::move(wanted_->answer);
    wanted_.reset();
    return answer;
  }
  // The step whose batch is asked for and not handed over.
  std::optional<std::uint64_t> wanted() const {
    const std::lock_guard lock(mutex_);
    return wanted_ && !wanted_->answered ? std::optional(wanted_->step) : std::nullopt;
  }
  // False where the training thread waits for this step no more.
  bool answer(std::uint64_t step, Answer answer) {
    {
      const std::lock_guard lock(mutex_);
      if (!wanted_ || wanted_->step != step) return false;
      wanted_->answer = std::move(answer);
      wanted_->answered = true;
    }
    changed_.notify_all();
    return true;
  }
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
  }

 private:
  struct Wanted {
    std::uint64_t step = 0;
    Answer answer = std::optional<replay_buffer::Batch>();
    bool answered = false;
  };
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Wanted> wanted_;  // guarded by mutex_
  bool stopped_ = false;          // guarded by mutex_
};

}  // namespace echoline::learner
