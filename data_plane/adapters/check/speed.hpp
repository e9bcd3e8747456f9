// Measures the speed of a task.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

struct Speed {
  std::uint64_t calls = 0, failed = 0;           // sequential calls
  double median_us = 0, p99_us = 0, max_us = 0;  // times of a single step
  std::uint64_t batched = 0, batch = 0;          // concurrent steps, and how many ran at a time
  double per_s = 0;                              // concurrent steps per second
};

// A response to score as the first step of an episode.
struct Question {
  Problem problem;
  std::string response;
};

// Asks questions for about `time`: half of it one by one, half `batch` at a time, or fewer at a time if a batch would
// take several times as long. `questions` must not be empty.
Speed measure_speed(const Adapter& adapter, const std::vector<Question>& questions, std::size_t batch, Duration time,
                    const Clock& clock);

}  // namespace echoline::data_plane
