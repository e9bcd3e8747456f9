// Digests of tensors and states: XXH3-128 over leaves (parts of a fixed size) of the raw bytes, then over the leaves'
// digests with name, type and shape (FORMAT.md, "Digests"). Leaves are independent, so threads can share a tensor, and
// only changed leaves are hashed again.
#pragma once
#include <span>
#include <vector>

#include "delta/tensor.hpp"

namespace echoline::delta {

inline constexpr std::size_t kLeafBytes = 64u << 10;  // the last leaf of a tensor may be shorter
inline std::size_t leaf_count(std::uint64_t bytes) {
  return static_cast<std::size_t>((bytes + kLeafBytes - 1) / kLeafBytes);
}

// XXH3-128 of the bytes.
Digest digest_bytes(std::span<const std::byte> bytes);
// Writes the digests of all leaves of `bytes`; `to` has room for leaf_count() of them.
void digest_leaves(std::span<const std::byte> bytes, Digest* to);

// A digest of zeros for each leaf of each tensor, to be overwritten.
LeafDigests zeroed_leaf_digests(const StateView& state);
// Digests of all leaves of all tensors, in the order of `state`. Uses up to `threads` threads, also within one tensor.
LeafDigests leaf_digests_of(const StateView& state, unsigned threads);

// The tensor's digest, from those of its leaves; does not read `tensor.bytes`.
Digest digest_tensor(const TensorView& tensor, std::span<const Digest> leaves);
Digest digest_tensor(const TensorView& tensor);
// The state's digest, from those of all tensors in canonical order.
Digest state_digest_of_tensors(std::span<const Digest> tensors);
// The digest of a canonical state, from the digests of all leaves; does not read the tensors' bytes.
Digest state_digest_of_leaves(const StateView& state, const LeafDigests& leaves);
// kInvalid if the state is invalid.
Result<Digest> digest_state(const StateView& state, unsigned threads = 1);

}  // namespace echoline::delta
