// Whether the values of a policy are numbers that bf16 can hold.
#pragma once
#include "delta/tensor.hpp"

namespace echoline::model {

// kInvalid if a floating-point value is NaN or infinite, or becomes infinite when it is rounded to bf16: names the
// first such tensor, the index of its first such value, and their count. Looked for by up to `threads` threads.
Status check_finite(const delta::StateView& state, unsigned threads = 1);

}  // namespace echoline::model
