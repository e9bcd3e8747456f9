// A queue in one block of memory, for a world's many short queues.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

namespace echoline::sim {

template <class T>
class Fifo {
 public:
  bool empty() const { return first_ == items_.size(); }
  std::size_t size() const { return items_.size() - first_; }
  T& operator[](std::size_t i) { return items_[first_ + i]; }
  T& front() { return items_[first_]; }
  T& back() { return items_.back(); }
  void push(T item) { items_.push_back(std::move(item)); }
  void pop_back() { items_.pop_back(); }
  T pop() {
    T item = std::move(items_[first_]);
    // Waits until half of the block is free, so that each item is moved forward about once on average.
    if (++first_ * 2 >= items_.size()) {
      items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(first_));
      first_ = 0;
    }
    return item;
  }
  void clear() { items_.clear(), first_ = 0; }

 private:
  std::vector<T> items_;
  std::size_t first_ = 0;  // index of the front; items before it are already moved out
};

}  // namespace echoline::sim
