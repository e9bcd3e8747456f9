// Access to an OwnedState's memory and cached digests; internal to this folder.
#pragma once
#include <span>
#include <vector>

#include "delta/tensor.hpp"

namespace echoline::delta {

// For code that writes to a state and knows the digests of the result.
class StateWriter {
 public:
  // The tensor's memory. Unlike mutable_bytes(), leaves the tensor sealed (it counts as unchanging) and its digests
  // cached.
  static std::span<std::byte> memory(OwnedState& state, std::size_t index);
  // Returns the digests of all leaves (digest.hpp) by tensor. Computes those that are not cached, and caches those of
  // sealed tensors.
  static LeafDigests leaf_digests(OwnedState& state, unsigned threads);
  // Caches the digests of the current content.
  static void cache_leaf_digests(OwnedState& state, LeafDigests leaves);
};

}  // namespace echoline::delta
