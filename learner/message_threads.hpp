// Number of threads that parse and check workers' messages that wait together. Private to learner/.
#pragma once
#include <algorithm>
#include <cstddef>

#include "base/parallel.hpp"

namespace echoline::learner {

// One thread for short messages, because starting another thread takes longer than reading them. At most four, because
// the learner's other threads need the processors as well.
inline unsigned message_threads(std::size_t bytes) {
  constexpr std::size_t kBytesPerThread = 48u << 10;
  constexpr std::size_t kThreadsMax = 4;
  return static_cast<unsigned>(std::min<std::size_t>(std::clamp<std::size_t>(bytes / kBytesPerThread, 1, kThreadsMax),
                                                     thread_count(/*threads=*/0)));
}

}  // namespace echoline::learner
