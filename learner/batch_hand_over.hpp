// Passes the batch of a step from the desk's thread to the waiting training thread. Private to learner/.
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
  // Waits for the answer to ask(); absent after `patience` or stop().
  Answer wait(Duration patience) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, patience, [this] { return stopped_ || wanted_->answered; });
    Answer answer = std::move(wanted_->answer);
    wanted_.reset();
    return answer;
  }
  // The step whose batch was asked for and is not handed over yet.
  std::optional<std::uint64_t> wanted() const {
    const std::lock_guard lock(mutex_);
    return wanted_ && !wanted_->answered ? std::optional(wanted_->step) : std::nullopt;
  }
  // False if the training thread no longer waits for this step.
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
