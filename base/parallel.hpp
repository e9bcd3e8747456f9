// Distributes work over threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/result.hpp"

namespace echoline {

// `threads`, or the number of processors if it is 0.
inline unsigned thread_count(unsigned threads) {
  return threads != 0 ? threads : std::max(1u, std::thread::hardware_concurrency());
}

// Calls work(thread index, item) for every item below `count`, on up to `threads` threads. If a call throws, starts no
// further items, and rethrows the exception of the failed thread with the lowest index.
template <class F>
void for_each_parallel(std::size_t count, unsigned threads, F&& work) {
  threads = static_cast<unsigned>(std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(count, 1)));
  std::atomic<std::size_t> next_item{0};
  std::vector<std::exception_ptr> failures(threads);
  const auto work_items = [&](unsigned thread_index) {
    try {
      for (std::size_t item; (item = next_item.fetch_add(1)) < count;) work(thread_index, item);
    } catch (...) {
      failures[thread_index] = std::current_exception();
      next_item = count;  // so that no thread starts another
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (unsigned thread_index = 1; thread_index < threads; ++thread_index)
      helpers.emplace_back(work_items, thread_index);
    work_items(/*thread_index=*/0);
  }
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

// A pool of threads that run tasks in any order. The thread that owns the pool counts as one of them: it runs tasks
// itself when too many wait, and in finish(). With one thread, add() runs the task before it returns. The destructor
// discards tasks that have not begun; call finish() first to run them.
class TaskPool {
 public:
  // `thread_index` is below threads(). A task may throw std::bad_alloc only.
  using Task = std::function<Status(unsigned thread_index)>;

  explicit TaskPool(unsigned threads)
      : threads_(std::clamp(threads, 1u, kThreadsMax)), waiting_max_(kWaitingPerThread * threads_) {}
  ~TaskPool() {
    {
      const std::lock_guard lock(mutex_);
      waiting_.clear();
      ended_ = true;
    }
    task_added_or_ended_.notify_all();
  }
  TaskPool(const TaskPool&) = delete;
  TaskPool& operator=(const TaskPool&) = delete;

  unsigned threads() const { return threads_; }
  // Adds a task. Returns the first error of any task, after which no more are run; kExhausted if memory runs out.
  Status add(Task task) {
    std::unique_lock lock(mutex_);
    if (threads_ == 1) {
      waiting_.push_back(std::move(task));
      run_oldest(/*thread_index=*/0, lock);
      return status();
    }
    // The owner helps instead of waiting for room in the queue.
    if (waiting_.size() == waiting_max_) run_oldest(/*thread_index=*/0, lock);
    ECHO_TRY(status());
    waiting_.push_back(std::move(task));
    // Starts a helper only if more tasks wait than helpers are idle. The owner is one of the threads.
    if (idle_ < waiting_.size() && helpers_.size() + 1 < threads_)
      helpers_.emplace_back(
          [this, thread_index = static_cast<unsigned>(helpers_.size() + 1)] { run_tasks(thread_index); });
    task_added_or_ended_.notify_one();
    return ok();
  }
  // Waits for all tasks. Returns the first error.
  Status finish() {
    std::unique_lock lock(mutex_);
    while (!waiting_.empty()) run_oldest(/*thread_index=*/0, lock);
    none_running_.wait(lock, [this] { return running_ == 0; });
    return status();
  }

 private:
  static constexpr unsigned kThreadsMax = 256;
  static constexpr unsigned kWaitingPerThread = 2;  // bounds the memory of tasks that wait

  void run_tasks(unsigned thread_index) {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      task_added_or_ended_.wait(lock, [this] { return ended_ || !waiting_.empty(); });
      --idle_;
      if (ended_) return;
      run_oldest(thread_index, lock);
    }
  }
  // Runs the oldest task, or discards it after an error of another. The caller holds `lock`, which is released while
  // the task runs.
  void run_oldest(unsigned thread_index, std::unique_lock<std::mutex>& lock) {
    const Task task = std::move(waiting_.front());
    waiting_.pop_front();
    if (first_error_) return;
    ++running_;
    lock.unlock();
    Status result;
    try {
      result = task(thread_index);
    } catch (const std::bad_alloc&) {
      result = fail(Code::kExhausted, "", "out of memory");
    }
    lock.lock();
    if (!result && !first_error_) first_error_ = std::move(result).error();
    if (--running_ == 0) none_running_.notify_all();
  }
  Status status() const { return first_error_ ? Status(*first_error_) : ok(); }

  const unsigned threads_;
  const std::size_t waiting_max_;
  std::mutex mutex_;                             // guards the members below
  std::condition_variable task_added_or_ended_;  // wakes idle helpers
  std::condition_variable none_running_;
  std::deque<Task> waiting_;
  std::size_t idle_ = 0, running_ = 0;  // numbers of idle helpers and of running tasks
  bool ended_ = false;
  std::optional<Error> first_error_;
  std::vector<std::jthread> helpers_;  // last, so that the threads end before the members they use
};

}  // namespace echoline
