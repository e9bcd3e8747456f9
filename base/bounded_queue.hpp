// A bounded queue between threads. try_push() fails if it is full; pop() waits for an item up to a limit.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "base/units.hpp"

namespace echoline {

// Thread-safe. After close(), pushes fail and pop() returns the remaining items.
template <class T>
class BoundedQueue {
 public:
  explicit BoundedQueue(std::size_t items_max) : items_max_(items_max) {}

  // False if the queue is full or closed; the item is then dropped.
  bool try_push(T item) {
    {
      const std::lock_guard lock(mutex_);
      if (closed_ || items_.size() >= items_max_) return false;
      items_.push_back(std::move(item));
    }
    changed_.notify_one();
    return true;
  }

  // Removes and returns the oldest item. Absent if none came within `wait`, or if the queue is closed and empty.
  std::optional<T> pop(Duration wait) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, wait, [&] { return closed_ || !items_.empty(); });
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    return item;
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

  bool closed() const {
    const std::lock_guard lock(mutex_);
    return closed_;
  }

 private:
  const std::size_t items_max_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<T> items_;
  bool closed_ = false;
};

}  // namespace echoline
