// The events of a simulated world, ordered by time, then by insertion.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/clock.hpp"

namespace echoline::sim {

// `kind` determines the meaning of `host`, `detail` and `generation`, which the queue only stores.
struct Event {
  TimePoint at;
  std::uint64_t sequence = 0;  // order of insertion
  std::uint32_t kind = 0, host = 0;
  std::uint64_t detail = 0, generation = 0;
};

class EventQueue {
 public:
  bool empty() const { return heap_.empty(); }
  TimePoint next_at() const { return heap_.empty() ? kNever : heap_.front().at; }

  void push(TimePoint at, std::uint32_t kind, std::uint32_t host, std::uint64_t detail, std::uint64_t generation) {
    heap_.push_back({.at = at,
                     .sequence = next_sequence_++,
                     .kind = kind,
                     .host = host,
                     .detail = detail,
                     .generation = generation});
    std::size_t hole = heap_.size() - 1;  // moves up, past each parent that is later than the event
    const Event event = heap_[hole];
    while (hole > 0) {
      const std::size_t parent = (hole - 1) / kChildren;
      if (!is_before(event, heap_[parent])) break;
      heap_[hole] = heap_[parent];
      hole = parent;
    }
    heap_[hole] = event;
  }

  // Removes and returns the first event; the queue must not be empty. This leaves a hole at the root. The hole moves
  // down to its earliest child, again and again, until the heap's last event may take its place.
  Event pop() {
    const Event first = heap_.front(), last = heap_.back();
    heap_.pop_back();
    const std::size_t size = heap_.size();
    std::size_t hole = 0;
    for (;;) {
      const std::size_t first_child = hole * kChildren + 1, end = std::min(first_child + kChildren, size);
      if (first_child >= size) break;
      std::size_t earliest = first_child;
      for (std::size_t child = first_child + 1; child < end; ++child)
        if (is_before(heap_[child], heap_[earliest])) earliest = child;
      if (!is_before(heap_[earliest], last)) break;
      heap_[hole] = heap_[earliest];
      hole = earliest;
    }
    if (size > 0) heap_[hole] = last;
    return first;
  }

 private:
  // Children per heap node. With four, the heap is shallower than with two, and siblings are adjacent in memory.
  static constexpr std::size_t kChildren = 4;
  static bool is_before(const Event& a, const Event& b) { return a.at != b.at ? a.at < b.at : a.sequence < b.sequence; }

  std::vector<Event> heap_;
  std::uint64_t next_sequence_ = 0;
};

}  // namespace echoline::sim
