// Digests of tensors and states: XXH3-128 over the raw bytes, with name, type and shape bound in (FORMAT.md).
// They prove equality against accident and version mix-ups; authenticity comes from the signatures of the overlay.
#pragma once
#include <span>

#include "delta/tensor.hpp"

namespace echoline::delta {

Digest digest_tensor(const TensorView& tensor);
// Digest of a canonical state from the digests of its tensors, in canonical order.
Digest combine_digests(std::span<const Digest> tensors);
// Digest of `state` in any order; kInvalid when canonical() refuses it.
Result<Digest> digest_state(const StateView& state);

}  // namespace echoline::delta
