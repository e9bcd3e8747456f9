// For HTTP test servers: one thread per connection, so that an idle connection does not block the others.
#pragma once
#include <httplib.h>

#include <functional>
#include <list>
#include <thread>
#include <utility>

namespace echoline {

class ThreadEach final : public httplib::TaskQueue {
  using Taken = decltype(std::declval<httplib::TaskQueue&>().enqueue({}));  // void, or since cpp-httplib 0.15 bool

 public:
  Taken enqueue(std::function<void()> serve) override {
    threads_.emplace_back(std::move(serve));
    return Taken(true);
  }
  void shutdown() override {
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::list<std::thread> threads_;
};

}  // namespace echoline
