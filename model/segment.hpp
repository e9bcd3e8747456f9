// A segment of a packed row of tokens. Without libtorch, for the kernels.
#pragma once
#include <cstdint>

namespace echoline::model {

// Tokens [begin, begin + count) of a packed row. A token attends to itself, to earlier tokens of its segment, and to
// all tokens of the prefix segment. A prefix segment has no prefix, and comes right before the segments that share it.
struct Segment {
  std::int64_t begin = 0, count = 0;
  std::int64_t prefix = -1;  // index of the prefix segment, -1: none
};

}  // namespace echoline::model
