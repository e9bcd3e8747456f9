// Episodes of one response whose grading takes long, so that threads of their own do it. Private to data_plane/.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

// A few threads that do what they are given, in turn. Begun with the first of it.
class Threads {
 public:
  explicit Threads(std::size_t count) : count_(count) {}
  ~Threads();  // waits for what is being done; what nobody has begun is not done
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  void post(std::function<void()> work);

 private:
  void loop();

  const std::size_t count_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;  // no more than there are episodes
  std::vector<std::thread> threads_;
  bool closed_ = false;
};

// Both must outlive what `threads` are given.
std::unique_ptr<Episode> graded_beside(Threads& threads,
                                       std::function<Result<Score>(const std::string& response)> score);

}  // namespace echoline::data_plane
