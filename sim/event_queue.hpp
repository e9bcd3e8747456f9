// The events of a simulated world, ordered by time, then by insertion.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/clock.hpp"

namespace echoline::sim {

// `kind` determines the meaning of `host`, `a` and `b`; the queue ignores them.
struct Event {
  TimePoint at;
  std::uint64_t sequence = 0;
  std::uint32_t kind = 0, host = 0;
  std::uint64_t a = 0, b = 0;
};

class EventQueue {
 public:
  bool empty() const { return heap_.empty(); }
  TimePoint next_at() const { return heap_.empty() ? kNever : heap_.front().at; }
  std::uint64_t pushed() const { return pushed_; }

  void push(TimePoint at, std::uint32_t kind, std::uint32_t host, std::uint64_t a, std::uint64_t b) {
    heap_.push_back({at, pushed_++, kind, host, a, b});
    std::size_t i = heap_.size() - 1;
    const Event event = heap_[i];
    for (std::size_t above; i > 0 && before(event, heap_[above = (i - 1) / kWidth]); i = above) heap_[i] = heap_[above];
    heap_[i] = event;
  }

  // Removes the first event. Requires that there is one.
  Event pop() {
    const Event first = heap_.front(), last = heap_.back();
    heap_.pop_back();
    const std::size_t size = heap_.size();
    std::size_t i = 0;
    for (std::size_t child; size > 0 && (child = i * kWidth + 1) < size; i = child) {
      const std::size_t end = std::min(child + kWidth, size);
      for (std::size_t c = child + 1; c < end; ++c)
        if (before(heap_[c], heap_[child])) child = c;
      if (!before(heap_[child], last)) break;
      heap_[i] = heap_[child];
    }
    if (size > 0) heap_[i] = last;
    return first;
  }

 private:
  // Children per heap node: a shallower heap than with two, and siblings are adjacent in memory.
  static constexpr std::size_t kWidth = 4;
  static bool before(const Event& a, const Event& b) { return a.at != b.at ? a.at < b.at : a.sequence < b.sequence; }

  std::vector<Event> heap_;
  std::uint64_t pushed_ = 0;
};

}  // namespace echoline::sim
