// Digests of tensors and states: XXH3-128 over leaves of the raw bytes, then over the leaves' digests together with
// name, type and shape (FORMAT.md, "Digests"). Leaves are independent, so that threads share a tensor and only what
// changed is hashed again.
#pragma once
#include <span>
#include <vector>

#include "delta/tensor.hpp"

namespace echoline::delta {

inline constexpr std::size_t kLeafBytes = 64u << 10;  // the last leaf of a tensor is shorter
inline std::size_t leaf_count(std::uint64_t bytes) {
  return static_cast<std::size_t>((bytes + kLeafBytes - 1) / kLeafBytes);
}

Digest digest_bytes(std::span<const std::byte> bytes);
// Of every leaf of `bytes`; `to` has room for leaf_count().
void digest_leaves(std::span<const std::byte> bytes, Digest* to);

// Room for the digests of every leaf of every tensor.
std::vector<std::vector<Digest>> places_for_leaves(const StateView& state);
// Of every leaf of every tensor, in the order of `state`; on up to `threads` threads, also within one tensor.
std::vector<std::vector<Digest>> leaves_of(const StateView& state, unsigned threads);

// From the digests of the tensor's leaves; `tensor.bytes` is not read.
Digest digest_tensor(const TensorView& tensor, std::span<const Digest> leaves);
Digest digest_tensor(const TensorView& tensor);
// From the digests of all tensors in canonical order.
Digest combine_digests(std::span<const Digest> tensors);
// Of a canonical state, from the digests of all leaves; the tensors' bytes are not read.
Digest combine_leaves(const StateView& state, const std::vector<std::vector<Digest>>& leaves);
// kInvalid when the state is not sound.
Result<Digest> digest_state(const StateView& state, unsigned threads = 1);

}  // namespace echoline::delta
