// Passes the batch of a learner step from the RolloutDesk's thread to the waiting training thread. Private to learner/.
#pragma once
#include <condition_variable>
#include <mutex>
#include <optional>

#include "base/units.hpp"
#include "replay_buffer/buffer.hpp"

namespace echoline::learner {

// Thread-safe; one thread waits at a time.
class BatchRequest {
 public:
  using Answer = Result<std::optional<replay_buffer::Batch>>;

  // Requests the batch of a step; wait() must follow.
  void request(std::uint64_t step) {
    const std::lock_guard lock(mutex_);
    pending_ = Pending{.step = step};
  }
  // Waits for the answer to request(); absent after `timeout` or stop().
  Answer wait(Duration timeout) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout, [this] { return stopped_ || pending_->answered; });
    Answer answer = std::move(pending_->answer);
    pending_.reset();
    return answer;
  }
  // The step whose batch is requested and not answered yet.
  std::optional<std::uint64_t> requested_step() const {
    const std::lock_guard lock(mutex_);
    return pending_ && !pending_->answered ? std::optional(pending_->step) : std::nullopt;
  }
  // Passes the batch, or the error that ends the run. Returns false if the training thread no longer waits for this
  // step.
  bool answer(std::uint64_t step, Answer answer) {
    {
      const std::lock_guard lock(mutex_);
      if (!pending_ || pending_->step != step) return false;
      pending_->answer = std::move(answer);
      pending_->answered = true;
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
  struct Pending {
    std::uint64_t step = 0;
    Answer answer = std::optional<replay_buffer::Batch>();  // absent until answer()
    bool answered = false;
  };
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Pending> pending_;  // guarded by mutex_
  bool stopped_ = false;            // guarded by mutex_
};

}  // namespace echoline::learner
