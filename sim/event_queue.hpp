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
    for (std::size_t parent; hole > 0 && is_before(event, heap_[parent = (hole - 1) / kChildren]); hole = parent)
      heap_[hole] = heap_[parent];
    heap_[hole] = event;
  }

  // Removes and returns the first event; the queue must not be empty. This leaves a hole at the root. The hole moves
  // down to its earliest child, again and again, until `last`, the heap's last event, may take its place.
  Event pop() {
    const Event first = heap_.front(), last = heap_.back();
    heap_.pop_back();
    const std::size_t size = heap_.size();
    std::size_t hole = 0;
    for (std::size_t child; size > 0 && (child = hole * kChildren + 1) < size; hole = child) {
      const std::size_t end = std::min(child + kChildren, size);
      for (std::size_t sibling = child + 1; sibling < end; ++sibling)
        if (is_before(heap_[sibling], heap_[child])) child = sibling;
      if (!is_before(heap_[child], last)) break;
      heap_[hole] = heap_[child];
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
