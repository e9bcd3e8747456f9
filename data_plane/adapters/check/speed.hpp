// How quick a task is.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

struct Speed {
  std::uint64_t calls = 0, failed = 0;           // one after the other
  double median_us = 0, p99_us = 0, max_us = 0;  // of a step, begun alone
  std::uint64_t batched = 0, batch = 0;          // steps of the second half, so many at a time
  double per_s = 0;
};

// What is asked: first steps of episodes, in turn.
struct Question {
  Problem problem;
  std::string response;
};

// Asks for about `time`, half of it one by one and half `batch` at a time; fewer where so many would take several times
// as long. `questions` must not be empty.
Speed measure_speed(const Adapter& adapter, const std::vector<Question>& questions, std::size_t batch, Duration time,
                    const Clock& clock);

}  // namespace echoline::data_plane
