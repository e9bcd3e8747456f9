// Checks that the values of a policy are finite in bf16.
#pragma once
#include "delta/tensor.hpp"

namespace echoline::model {

// kInvalid if a floating-point value is NaN or infinite, or becomes infinite when rounded to bf16. Names the first such
// tensor, the index of its first such value, and their count. Uses up to `threads` threads.
Status check_finite(const delta::StateView& state, unsigned threads = 1);

}  // namespace echoline::model
