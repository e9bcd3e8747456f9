// Episodes of one response whose scoring is slow and runs on separate threads. Private to data_plane/.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

// A small thread pool with a queue. A job starts one more thread until there are `threads_max`.
class ThreadPool {
 public:
  explicit ThreadPool(std::size_t threads_max) : threads_max_(threads_max) {}
  ~ThreadPool();  // waits for running jobs, drops queued ones
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  void post(std::function<void()> work);

 private:
  void run_jobs();

  const std::size_t threads_max_;
  std::mutex mutex_;
  std::condition_variable wake_threads_;
  std::deque<std::function<void()>> waiting_;  // jobs; at most one per episode
  std::vector<std::thread> threads_;
  bool closed_ = false;
};

// Returns an episode of one response, which a job on `threads` scores. Both arguments must outlive the jobs.
std::unique_ptr<Episode> make_graded_episode(ThreadPool& threads,
                                             std::function<Result<Score>(const std::string& response)> score);

}  // namespace echoline::data_plane
